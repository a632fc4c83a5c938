"""The settings of a model of ExLlamaV3 in `weft.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, MaxLen
from typing_extensions import override

from runner_svc.policy.repository_files import ModelForm
from runner_svc.runtimes.settings import FileModelSettings
from weft.kernel.settings import PUBLIC, Before, Name, PathText, Pattern

PAGE_TOKENS = 256
"""Tokens of a page of the cache; a request takes whole pages."""
FULL_BITS = 16
"""Bits of a number in a cache that is not quantized."""
WEIGHTS_FILE = "model.safetensors"
TensorBackend = Literal["native", "nccl"]


def _text_of_number(value: Any) -> Any:
    """Returns a number as text: YAML reads `4` as one, and `4,6` as text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


CacheBits = Annotated[str, Pattern(r"^[2-8](,[2-8])?$"), Before(_text_of_number)]
"""Bits of keys and values, `4`, or of each, `4,6`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExllamaV3Model(FileModelSettings):
    """A model in the format EXL3 that ExLlamaV3 generates with, on CUDA devices."""

    form: ClassVar[ModelForm] = ModelForm.FOLDER
    path: Annotated[PathText, PUBLIC] | None = None
    """The folder of the model: `config.json`, safetensors and the tokenizer's files. Required without `source`."""
    quantizations: Annotated[Mapping[Name, PathText], MaxLen(16)] = field(default_factory=dict)
    """Further folders of the same model by quantization, for `weft load`."""
    slots: Annotated[int, Ge(1), Le(256), PUBLIC] = 4
    """Requests it works on at once, which share the cache."""
    embeddings: bool = False
    """Always false: these models give no embeddings."""
    cache_tokens: Annotated[int, Ge(PAGE_TOKENS), Le(16_777_216), PUBLIC] | None = None
    """Tokens of the cache, for all requests together; a multiple of 256. Default: the context of every slot."""
    cache_quant: Annotated[CacheBits, PUBLIC] | None = None
    """Bits of keys and values in the cache, 2 to 8: `4`, or `4,6` for each. Default: 16."""
    gpu_split: Annotated[tuple[Annotated[float, Ge(0), Le(1024)], ...], MaxLen(16), PUBLIC] = ()
    """Most memory on each device, in GiB; 0 leaves one out. Default: one device after the other is filled."""
    tensor_parallel: Annotated[bool, PUBLIC] = False
    """Whether each layer is split over the devices; some architectures cannot be."""
    tp_backend: TensorBackend = "native"
    """How the devices exchange their parts with `tensor_parallel`."""
    chunk_tokens: Annotated[int, Ge(PAGE_TOKENS), Le(65_536)] = 2048
    """Tokens of a prompt that are computed at once (`max_chunk_size`); a multiple of 256."""
    step_tokens: Annotated[int, Ge(1), Le(64)] = 8
    """Most tokens of one request that are evaluated at once in an answer (`max_q_size`)."""
    requeue_tokens: Annotated[int, Ge(PAGE_TOKENS), Le(16_777_216)] | None = None
    """Tokens of an answer for which pages are taken at a time (`max_rq_tokens`): with fewer, more requests fit a small
    cache. Default: for the whole answer."""
    loop_tokens: Annotated[int, Ge(0), Le(65_536)] = 4096
    """An answer whose last tokens, so many, are nothing but repeats ends with `repeated_line_loop`, whatever they are;
    0: only weft's own detection. It holds where the policy for repetition is `kill`."""
    loop_repeats: Annotated[int, Ge(2), Le(1024)] = 16
    """Fewest repeats among these tokens."""
    shared_cache: bool = False
    """Whether all callers share prefixes, so that a caller may learn from the time to the first token what another has
    asked. Default: requests of one tenant work side by side, those of different tenants one after the other."""

    @override
    def weights_of(self, path: Path) -> Path:
        index = path / f"{WEIGHTS_FILE}.index.json"
        return index if index.is_file() else path / WEIGHTS_FILE


def cache_bits(words: str | None) -> tuple[int, int]:
    """Returns the bits of keys and of values."""
    if words is None or words == str(FULL_BITS):
        return FULL_BITS, FULL_BITS
    keys, _, values = words.partition(",")
    return int(keys), int(values or keys)


def cache_tokens_of(configured: int | None, context_tokens: int, slots: int) -> int:
    """Returns the tokens of the cache, in whole pages: by default every slot has room for its context."""
    # The library reserves one token more than a request can take.
    return configured or slots * (context_tokens // PAGE_TOKENS + 1) * PAGE_TOKENS

"""The settings of a model of CTranslate2 in `weft.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, MaxLen
from typing_extensions import override

from runner_svc.policy.repository_files import ModelForm
from runner_svc.runtimes.settings import FileModelSettings
from weft.kernel.settings import PUBLIC, Name, PathText

WEIGHTS_FILE = "model.bin"
Device = Literal["cpu", "cuda", "auto"]
ComputeType = Literal[
    "default",
    "auto",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
    "float32",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CTranslate2Model(FileModelSettings):
    """A model that CTranslate2 generates with, converted by `ct2-transformers-converter`."""

    form: ClassVar[ModelForm] = ModelForm.FOLDER
    path: Annotated[PathText, PUBLIC] | None = None
    """The folder of the converted model, with `tokenizer.json`, `tokenizer_config.json` and, where the model has one,
    `chat_template.jinja`. Required without `source`."""
    quantizations: Annotated[Mapping[Name, PathText], MaxLen(16)] = field(default_factory=dict)
    """Further folders of the same model by quantization, for `weft load`."""
    slots: Annotated[int, Ge(1), Le(1024)] = 1
    """Requests it works on at once, each in threads of its own. With more than 1, no prefix of a prompt is reused."""
    embeddings: bool = False
    """Always false: these models give no embeddings."""
    device: Annotated[Device, PUBLIC] = "auto"
    """Where it computes; `auto` takes an accelerator if there is one."""
    compute_type: Annotated[ComputeType, PUBLIC] = "int8"
    """Type of the weights. One that the device does not have becomes the nearest that it has."""
    beam_size: Annotated[int, Ge(1), Le(16), PUBLIC] = 1
    """Beams of an answer whose request names none (`beam_size`). With more than 1 an answer comes whole, with a
    warning: a beam search has no text until it ends."""
    sleeps_in_place: bool = False
    """Whether it hibernates, when idle, by unloading the weights in its process, which wakes in a moment. Default: its
    process is ended, as it always is where it holds memory of accelerators."""
    unload_keeps_process: bool = False
    """Whether an explicit unload, such as `weft unload`, lets it sleep in its process too. Default: it ends the
    process. Needs `sleeps_in_place`."""
    prefix_cache_tokens: Annotated[int, Ge(0), Le(16_777_216)] | None = None
    """Most tokens of prompts that are kept for later ones; 0 keeps none. Each takes as much memory as a token of the
    context. Default: as many as the context has."""

    @override
    def weights_of(self, path: Path) -> Path:
        return path / WEIGHTS_FILE

    @property
    def kept_tokens(self) -> int:
        """Most tokens of prompts that are kept."""
        return self.slot_context_tokens if self.prefix_cache_tokens is None else self.prefix_cache_tokens

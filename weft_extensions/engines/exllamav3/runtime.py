"""The runtime exllamav3: the library in its own child process, one per model (docs/decisions/0011)."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen
from typing_extensions import override

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES, PYTORCH_VARIABLES
from runner_svc.policy.model_sizing import EngineLocations
from runner_svc.policy.parameters import (
    LOOK_BACK,
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Grammar,
    Number,
    Texts,
)
from runner_svc.runtimes.runtime import Requirement, Runtime, deferred
from runner_svc.runtimes.runtime_settings import Argument, FileModelSettings
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.settings.setting_annotations import PUBLIC, Before, Pattern
from weft.kernel.values.reach import PLAIN
from weft_extensions.engines.environments import FOLDER

ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "exllamav3",
    summary="ExLlamaV3 1.6.5",
    variants={
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=5_720_000_000, download_bytes=2_700_000_000
        ),
    },
    check="import exllamav3",
)


PARAMETERS = EngineParameters(
    engine="ExLlamaV3",
    # Arguments of ComboSampler and Job in version 1.6.5.
    allowed={
        "adaptive_decay": Number(0, 0.99),
        "adaptive_target": Number(0, 1),
        "banned_strings": Texts(64, 256),
        "dry_allowed_length": LOOK_BACK,
        "dry_base": Number(1, 10),
        "dry_multiplier": Number(0, 100),
        "dry_range": LOOK_BACK,
        "grammar": Grammar(),
        "min_new_tokens": Number(0, MAX_INT, whole=True),
        "rep_decay_range": LOOK_BACK,
        "rep_sustain_range": LOOK_BACK,
        "temp_last": Flag(),
        "token_healing": Flag(),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
    },
    untaken=frozenset({"parallel_tool_calls", "reasoning_effort"}),
    renamed={"repeat_penalty": "rep_p", "frequency_penalty": "freq_p", "presence_penalty": "pres_p"},
    thinks_by_template=True,
)


PAGE_TOKENS = 256
"""Number of tokens in a cache page; a request uses whole pages."""
FULL_BITS = 16
"""Bits per number in an unquantized cache."""
WEIGHTS_FILE = "model.safetensors"
Gibibytes = Annotated[float, Ge(0), Le(1024)]


def _text_of_number(value: Any) -> Any:
    """Returns a number as text, since YAML parses `4` as a number but `4,6` as text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


CacheBits = Annotated[str, Pattern(r"^[2-8](,[2-8])?$"), Before(_text_of_number), PLAIN]
"""Bits of keys and values together (`4`) or separately (`4,6`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExllamaV3Model(FileModelSettings):
    """A model in the format EXL3 that ExLlamaV3 generates with, on CUDA devices."""

    slots: Annotated[int, Ge(1), Le(256), PUBLIC] = 4
    """Maximum number of concurrent requests; they share the cache."""
    cache_tokens: Annotated[int, Ge(PAGE_TOKENS), Le(16_777_216), PUBLIC] | None = None
    """Size of the cache in tokens, shared by all requests; a multiple of 256. Default: the full context of every
    slot."""
    cache_quant: Annotated[CacheBits, PUBLIC] | None = None
    """Bits per number in the cache, 2 to 8: `4` for keys and values, or `4,6` for each. Default: 16."""
    gpu_split: Annotated[
        tuple[Annotated[float, Ge(0), Le(1024)], ...], MaxLen(16), Argument("--gpu-split"), PUBLIC
    ] = ()
    """Maximum memory on each device, in GiB; 0 excludes the device. Default: devices are filled one after the other."""
    tensor_parallel: Annotated[bool, Argument("--tensor-parallel"), PUBLIC] = False
    """Whether each layer is split over the devices; not all architectures support this. To choose how devices exchange
    data: `extra_arguments: [--tp-backend, nccl]`."""

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
    """Returns the cache size in whole pages; by default each slot has room for its context."""
    # The library reserves one more token than a request can use.
    return configured or slots * (context_tokens // PAGE_TOKENS + 1) * PAGE_TOKENS


COMPILER_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
USUAL_FOLDER = Path("/usr/local/cuda")
DRIVER_SECONDS = 5.0
"""Timeout for querying the driver's devices."""


def _find(command: tuple[str, ...] | None) -> str:
    """Returns the location of CUDA's compiler. Raises CONNECT_FAILED if it or a GPU is missing."""
    _require_card()
    if command:
        return f"up to the environment of {command[0]}"
    named = next((os.environ[name] for name in COMPILER_VARIABLES if os.environ.get(name)), None)
    if named is not None:
        return named
    if found := shutil.which("nvcc"):
        return found
    if USUAL_FOLDER.is_dir():
        return str(USUAL_FOLDER)
    message = "no CUDA compiler: ExLlamaV3 compiles its kernels for the cards of this machine, and runs on CUDA only"
    raise WeftError(Reason.CONNECT_FAILED, message)


def _require_card() -> None:
    # Imported here because only `weft doctor` needs it.
    from weft.gpu.nvml import read_within  # noqa: PLC0415

    reading = read_within(DRIVER_SECONDS)
    if reading is None or not reading.devices:
        raise WeftError(Reason.CONNECT_FAILED, "no responding NVIDIA card: ExLlamaV3 runs on CUDA only")


RUNTIME = Runtime(
    name="exllamav3",
    summary="ExLlamaV3 in a process that weft starts, on CUDA devices",
    docs="docs/engines.md",
    settings=ExllamaV3Model,
    build=deferred("weft_extensions.engines.exllamav3.exllamav3_backend:build"),
    formats=frozenset({WeightFormat.EXL3}),
    locations=EngineLocations(on_host=False, in_layers=False),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, *PYTORCH_VARIABLES, "EXLLAMA*"),
    requirement=Requirement(
        name="CUDA",
        find=_find,
        remedy="a machine with an NVIDIA card, and the CUDA toolkit with CUDA_HOME set to its folder",
    ),
    environment=ENVIRONMENT,
    advice={
        "operations": "the library's operations are fixed",
        "compute_type": "`cache_quant` is that of the cache",
        "embeddings": "ExLlamaV3 has no embeddings for text generation models",
    },
)

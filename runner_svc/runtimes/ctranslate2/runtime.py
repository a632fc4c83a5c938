"""The runtime ctranslate2: the library in its own child process, one per model (docs/decisions/0011)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le
from typing_extensions import override

from runner_svc.environments.environment import FOLDER, EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.policy.parameters import (
    MAX_TEMPLATE_ARGUMENT_CHARS,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Number,
)
from runner_svc.runtimes.flags import Argument
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.settings import FileModelSettings
from weft.kernel.settings import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.kernel.load_parameters import LoadValue


MAX_BEAMS = 16
ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "ctranslate2",
    summary="CTranslate2 4.8.5",
    variants={
        Variant.CPU: EnvironmentVariant(locks=("cpu.lock",), installed_bytes=275_000_000, download_bytes=71_000_000),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=1_400_000_000, download_bytes=723_000_000
        ),
    },
    check="import ctranslate2, tokenizers; ctranslate2.Generator",
)


PARAMETERS = EngineParameters(
    engine="CTranslate2",
    # The arguments of generate_batch in version 4.8.
    allowed={
        "beam_size": Number(1, MAX_BEAMS, whole=True),
        "length_penalty": Number(-10, 10),
        "patience": Number(0.1, 10),
        "no_repeat_ngram_size": Number(0, 64, whole=True),
        "repetition_penalty": Number(0.01, 10),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
    },
    # Its generators have one seed for all requests.
    untaken=frozenset(
        {
            *("min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
            *("parallel_tool_calls", "reasoning_effort"),
        }
    ),
    renamed={"repeat_penalty": "repetition_penalty"},
    thinks_by_template=True,
)
BEAM_SIZE = "beam_size"
UNUSED_BY_BEAMS = ("temperature", "top_k", "top_p")
"""Parameters that a beam search leaves out: it takes the most probable answers."""


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

    slots: Annotated[int, Ge(1), Le(1024)] = 1
    """Requests it works on concurrently, each in its own threads. With more than 1, no prefix of a prompt is reused."""
    device: Annotated[Device, Argument("--device"), PUBLIC] = "auto"
    """Where it computes; `auto` takes an accelerator if there is one."""
    compute_type: Annotated[ComputeType, Argument("--compute-type"), PUBLIC] = "int8"
    """Type of the weights. One that the device does not have becomes the nearest that it has."""
    beam_size: Annotated[int, Ge(1), Le(16), Argument("--beam-size"), PUBLIC] = 1
    """Beams of an answer whose request names none (`beam_size`). With more than 1 an answer comes whole, with a
    warning: a beam search has no text until it ends."""
    sleeps_in_place: bool = False
    """Whether it hibernates, when idle, by unloading the weights in its process, which wakes in a moment. Default: its
    process is ended, as it always is where it holds memory of accelerators."""

    @override
    def weights_of(self, path: Path) -> Path:
        return path / WEIGHTS_FILE


def _load_values(model: CTranslate2Model) -> "Mapping[str, LoadValue]":
    # On a processor no layer is on a device.
    return {"gpu_layers": 0} if model.device == "cpu" else {}


RUNTIME = Runtime(
    name="ctranslate2",
    summary="CTranslate2 in a process that weft starts",
    docs="docs/engines.md",
    settings=CTranslate2Model,
    build=deferred("runner_svc.runtimes.ctranslate2.backend:build"),
    formats=frozenset({WeightFormat.CTRANSLATE2}),
    places=EnginePlaces(in_layers=False),
    parameters=PARAMETERS,
    load_values=_load_values,
    environment=ENVIRONMENT,
    advice={
        "operations": "the library's operations are fixed",
        "embeddings": "CTranslate2 gives no embeddings of generating models",
    },
)

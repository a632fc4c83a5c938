"""The runtime faster_whisper: the library in its own child process, one per model (docs/decisions/0011)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import override

from runner_svc.environments.environment import FOLDER, EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.flags import Argument
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.settings import MediaModelSettings
from weft.kernel.settings import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.kernel.load_parameters import LoadValue


ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "faster_whisper",
    summary="faster-whisper 1.2.1",
    variants={
        Variant.CPU: EnvironmentVariant(locks=("cpu.lock",), installed_bytes=464_000_000, download_bytes=81_000_000),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=1_600_000_000, download_bytes=733_000_000
        ),
    },
    check="import av, ctranslate2, faster_whisper.vad, onnxruntime; faster_whisper.WhisperModel",
)


PARAMETERS = EngineParameters(engine="faster-whisper")


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
class FasterWhisperModel(MediaModelSettings):
    """A Whisper model in the form of CTranslate2, such as the repository `Systran/faster-whisper-small`."""

    tried_by: ClassVar[str] = "weft transcribe talk.mp3"

    slots: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """Recordings it works on concurrently, each in its own threads."""
    device: Annotated[Device, Argument("--device"), PUBLIC] = "auto"
    """Where it computes; `auto` takes an accelerator if there is one."""
    compute_type: Annotated[ComputeType, Argument("--compute-type"), PUBLIC] = "int8"
    """Type of the weights. One that the device does not have becomes the nearest that it has."""
    beam_size: Annotated[int, Ge(1), Le(16), Argument("--beam-size"), PUBLIC] = 5
    """Beams of the search for the words; 1 is quicker and less exact."""
    sleeps_in_place: bool = False
    """Whether it hibernates, when idle, by unloading the weights in its process, which wakes in a moment. Default: its
    process is ended, as it always is where it holds memory of accelerators."""

    @override
    def weights_of(self, path: Path) -> Path:
        return path / WEIGHTS_FILE


def _load_values(model: FasterWhisperModel) -> "Mapping[str, LoadValue]":
    # On a processor no layer is on a device.
    return {"gpu_layers": 0} if model.device == "cpu" else {}


RUNTIME = Runtime(
    name="faster_whisper",
    summary="Whisper models in faster-whisper, in a process that weft starts",
    docs="docs/engines.md",
    settings=FasterWhisperModel,
    build=deferred("runner_svc.runtimes.faster_whisper.backend:build"),
    formats=frozenset({WeightFormat.WHISPER}),
    places=EnginePlaces(in_layers=False),
    parameters=PARAMETERS,
    load_values=_load_values,
    environment=ENVIRONMENT,
    advice={
        "operations": "it transcribes and translates recordings",
        "context_tokens": "a Whisper model processes 30 s at a time",
    },
)

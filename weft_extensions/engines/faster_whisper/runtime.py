"""The runtime faster_whisper: the library in its own child process, one per model (docs/decisions/0011)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES
from runner_svc.policy.model_sizing import EngineLocations
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.runtime_settings import Argument, CTranslate2Settings, MediaModelSettings
from weft.kernel.settings.setting_annotations import PUBLIC
from weft_extensions.engines.environments import FOLDER

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterWhisperModel(MediaModelSettings, CTranslate2Settings):
    """A Whisper model in the form of CTranslate2, such as the repository `Systran/faster-whisper-small`."""

    tried_by: ClassVar[str] = "weft media transcribe talk.mp3"

    slots: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """Maximum number of recordings processed concurrently, each in its own threads."""
    beam_size: Annotated[int, Ge(1), Le(16), Argument("--beam-size"), PUBLIC] = 5
    """Number of beams; 1 is faster and less accurate."""


RUNTIME = Runtime(
    name="faster_whisper",
    summary="Whisper models in faster-whisper, in a process that weft starts",
    docs="docs/engines.md",
    settings=FasterWhisperModel,
    build=deferred("weft_extensions.engines.faster_whisper.faster_whisper_backend:build"),
    formats=frozenset({WeightFormat.WHISPER}),
    locations=EngineLocations(in_layers=False),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, "CT2_*", "HF_*"),
    load_values=lambda model: model.device_values,
    environment=ENVIRONMENT,
    advice={
        "operations": "it transcribes and translates recordings",
        "context_tokens": "a Whisper model processes 30 s at a time",
    },
)

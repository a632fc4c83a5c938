"""The runtime faster_whisper: the library in a child process of its own, one per model (docs/decisions/0011)."""

from typing import TYPE_CHECKING

from runner_svc.environments.faster_whisper.environment import ENVIRONMENT
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.runtimes.faster_whisper.parameters import PARAMETERS
from runner_svc.runtimes.faster_whisper.settings import FasterWhisperModel
from runner_svc.runtimes.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from weft.kernel.load_parameters import LoadValue


def _load_values(model: FasterWhisperModel) -> "Mapping[str, LoadValue]":
    # On a processor no layer is on a device.
    return {"gpu_layers": 0} if model.device == "cpu" else {}


def _build(model: FasterWhisperModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.runtimes.faster_whisper.backend import ABILITIES, OPERATIONS, FasterWhisperBackend  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import media_engine  # noqa: PLC0415

    return media_engine(
        model,
        context,
        lambda: FasterWhisperBackend(model, context),
        operations=OPERATIONS,
        habits=RUNTIME.habits,
        load_values=_load_values(model),
        abilities=ABILITIES,
    )


RUNTIME = Runtime(
    name="faster_whisper",
    summary="Whisper models in faster-whisper, in a process that weft starts",
    docs="docs/engines.md",
    settings=FasterWhisperModel,
    build=_build,
    formats=frozenset({WeightFormat.WHISPER}),
    places=EnginePlaces(in_layers=False),
    parameters=PARAMETERS,
    load_values=_load_values,
    environment=ENVIRONMENT,
    advice={
        "operations": "it transcribes and translates recordings",
        "context_tokens": "a Whisper model hears 30 s at once",
    },
)

"""Backend of the runtime faster_whisper: a server program around the library, started by the runner."""

from collections.abc import Mapping

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.memory.estimate import FileForecast
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, file_engine, forecast_model
from weft.kernel.requests.capabilities import Capabilities
from weft.kernel.requests.request_values import Operation, Skill
from weft_extensions.engines.faster_whisper.runtime import (
    RUNTIME,
    FasterWhisperModel,
)
from weft_extensions.engines.library_server import MediaServer

OPERATIONS = frozenset({Operation.TRANSCRIPTION})
CAPABILITIES = Capabilities(skills=frozenset({Skill.AUDIO}), lacking=frozenset({Skill.TEXT, Skill.IMAGE, Skill.TOOLS}))


class FasterWhisperBackend(MediaServer[FasterWhisperModel]):
    """Backend of one server process."""

    runtime = RUNTIME
    operations = OPERATIONS
    capabilities = CAPABILITIES
    noun = "faster-whisper"
    missing_library = "faster-whisper and PyAV cannot be loaded; run: weft runtime install faster_whisper"

    @override
    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        # The library must not download what a folder lacks.
        return {**super().environment(order), "HF_HUB_OFFLINE": "1"}


def build(model: FasterWhisperModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    return file_engine(
        model,
        context,
        FasterWhisperBackend,
        FileForecast(forecast_model(model, RUNTIME.habits, model.device_values), context.estimator),
        operations=OPERATIONS,
        capabilities=lambda _: CAPABILITIES,
    )

"""Backend of the runtime piper: a server program around the library, started by the runner."""

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from weft_extensions.engines.piper.runtime import RUNTIME, PiperModel
from weft_extensions.engines.speech_server import SpeechServer, speech_engine


class PiperBackend(SpeechServer[PiperModel]):
    """Backend of one server process."""

    runtime = RUNTIME
    noun = "piper"
    missing_library = "piper cannot be loaded; run: weft runtime install speech"

    @override
    def own_arguments(self, order: LoadOrder) -> list[str]:
        model = self.model
        named = (f"--voice={name}={path.expanduser()}" for name, path in model.voices.items())
        return [f"--default-voice={model.default_voice or ''}", *named]


def build(model: PiperModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    for name, path in model.voices.items():
        context.require_file(f"voices.{name}", path.expanduser())
    return speech_engine(model, context, lambda: PiperBackend(model, context))

"""The backend of the runtime piper: the library in a server program that the runner starts."""

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.environments.speech.environment import ENVIRONMENT
from runner_svc.runtimes.piper.parameters import PARAMETERS
from runner_svc.runtimes.piper.settings import PiperModel
from runner_svc.runtimes.speech_server import SpeechServer


class PiperBackend(SpeechServer[PiperModel]):
    """A Backend over one server process."""

    program = "runner_svc.runtimes.piper.server"
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    noun = "piper"
    missing_library = "piper cannot be loaded; run: weft runtime install speech"

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        model = self.model
        folder = () if model.path is None else ("--folder", str(model.file))
        named = (f"--voice={name}={path.expanduser()}" for name, path in model.voices.items())
        return [
            *("--port", str(port), "--slots", str(model.slots), "--threads", str(model.engine_threads)),
            *("--max-loaded-voices", str(model.max_loaded_voices), f"--default-voice={model.default_voice or ''}"),
            *folder,
            *named,
            *model.extra_arguments,
        ]

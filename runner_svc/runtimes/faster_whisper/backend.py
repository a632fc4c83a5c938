"""The backend of the runtime faster_whisper: the library in a server program that the runner starts."""

from collections.abc import Mapping

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.environments.faster_whisper.environment import ENVIRONMENT
from runner_svc.runtimes.faster_whisper.arguments import SERVER_PROGRAM, server_arguments
from runner_svc.runtimes.faster_whisper.parameters import PARAMETERS
from runner_svc.runtimes.faster_whisper.settings import FasterWhisperModel
from runner_svc.runtimes.media_server import MediaServer
from weft.kernel.abilities import Abilities
from weft.kernel.request import Operation, Skill

OPERATIONS = frozenset({Operation.TRANSCRIPTION})
ABILITIES = Abilities(skills=frozenset({Skill.AUDIO}), lacking=frozenset({Skill.TEXT, Skill.IMAGE, Skill.TOOLS}))


class FasterWhisperBackend(MediaServer[FasterWhisperModel]):
    """A Backend over one server process."""

    program = SERVER_PROGRAM
    always = OPERATIONS
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    noun = "faster-whisper"
    missing_library = "faster-whisper and PyAV cannot be loaded; run: weft runtime install faster_whisper"

    @override
    def sleeps_in_place(self, order: LoadOrder) -> bool:
        # With a lease its memory is given back now, and a process keeps some of a device for as long as it runs.
        return self.model.sleeps_in_place and not order.shares

    @override
    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        # The library never looks for what a folder lacks on the internet.
        return {**super().environment(order), "HF_HUB_OFFLINE": "1"}

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        return server_arguments(self.model, order, port)

    @property
    @override
    def abilities(self) -> Abilities:
        return ABILITIES

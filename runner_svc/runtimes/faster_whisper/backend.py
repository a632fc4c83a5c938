"""The backend of the runtime faster_whisper: the library in a host process that the runner starts."""

from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.environments.faster_whisper.environment import ENVIRONMENT
from runner_svc.runtimes.faster_whisper.arguments import HOST_PROGRAM, host_arguments
from runner_svc.runtimes.faster_whisper.parameters import PARAMETERS
from runner_svc.runtimes.faster_whisper.settings import FasterWhisperModel
from runner_svc.runtimes.media_backend import MediaBackend
from weft.kernel.abilities import Abilities
from weft.kernel.request import Operation, Skill

OPERATIONS = frozenset({Operation.TRANSCRIPTION})
ABILITIES = Abilities(skills=frozenset({Skill.AUDIO}), lacking=frozenset({Skill.TEXT, Skill.IMAGE, Skill.TOOLS}))


class FasterWhisperBackend(MediaBackend[FasterWhisperModel]):
    """A Backend over one host process."""

    program = HOST_PROGRAM
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
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
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        return host_arguments(self.model, socket, order)

    @override
    def operations(self) -> frozenset[Operation]:
        return OPERATIONS

    @override
    def abilities(self) -> Abilities:
        return ABILITIES

"""The backend of the runtime espeak_ng: the program of Debian, run by a host process that the runner starts."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.engine_host.messages import Speak
from runner_svc.environments.speech.environment import ENVIRONMENT
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.runtimes.espeak_ng.parameters import PARAMETERS
from runner_svc.runtimes.espeak_ng.settings import PROGRAM, EspeakModel
from runner_svc.runtimes.espeak_ng.speaker import MIN_WORDS_PER_MINUTE
from runner_svc.runtimes.library_server import program_command
from runner_svc.runtimes.speech_backend import SpeechBackend
from weft.kernel.errors import WeftError

HOST_PROGRAM = "runner_svc.runtimes.espeak_ng.host"
USUAL_VOICE = "en-gb"
MISSING = f"there is no {PROGRAM}; run: apt-get install {PROGRAM}"


class EspeakBackend(SpeechBackend[EspeakModel]):
    """A Backend over one host process, which needs the environment of speech for every format but WAV."""

    program = HOST_PROGRAM
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    missing_library = MISSING

    @property
    @override
    def usual_voice(self) -> str:
        return USUAL_VOICE

    @override
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        model = self.model
        return [
            *("--socket", str(socket), "--program", find_program(model.program), "--slots", str(model.slots)),
            *("--words-per-minute", str(model.words_per_minute), *model.extra_arguments),
        ]

    @override
    def further_warnings(self, request: Speak) -> tuple[ParameterWarning, ...]:
        slowest = MIN_WORDS_PER_MINUTE / self.model.words_per_minute
        if request.speed >= slowest:
            return ()
        message = (
            f"{PROGRAM} speaks at {MIN_WORDS_PER_MINUTE} words per minute at the slowest, a speed of {slowest:.2f}"
        )
        return (ParameterWarning(field="speed", message=message),)

    @override
    def engine_command(self) -> Sequence[str]:
        try:
            return super().engine_command()
        except WeftError:
            return program_command(self.program)  # without encoders, in weft's own environment


def find_program(configured: Path | None) -> str:
    """Returns the program's path, or its name where it is not found: the host program says what is missing."""
    return str(configured.expanduser()) if configured is not None else shutil.which(PROGRAM) or PROGRAM

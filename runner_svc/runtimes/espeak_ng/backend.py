"""Backend of the runtime espeak_ng: a server program around Debian's espeak-ng, started by the runner."""

import shutil

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.runtimes.espeak_ng.runtime import PROGRAM, RUNTIME, EspeakModel
from runner_svc.runtimes.espeak_ng.speaker import MIN_WORDS_PER_MINUTE, USUAL_WORDS_PER_MINUTE
from runner_svc.runtimes.library_server import program_command
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from runner_svc.runtimes.speech_server import SpeechServer, speech_engine
from weft.api.common.v1 import audio_pb2
from weft.kernel.errors import WeftError

MISSING = f"there is no {PROGRAM}; run: apt-get install {PROGRAM}"


class EspeakBackend(SpeechServer[EspeakModel]):
    """Backend of one server process, which needs the speech environment for every format but WAV."""

    runtime = RUNTIME
    noun = PROGRAM
    missing_library = MISSING
    usual_voice = "en-gb"

    @override
    def own_arguments(self, order: LoadOrder) -> list[str]:
        return ["--program", shutil.which(PROGRAM) or PROGRAM]  # the server program reports a missing one

    @override
    def further_warnings(self, payload: audio_pb2.SpeechPayload) -> list[ParameterWarning]:
        slowest = MIN_WORDS_PER_MINUTE / USUAL_WORDS_PER_MINUTE
        if not payload.HasField("speed") or payload.speed >= slowest:
            return []
        message = (
            f"{PROGRAM} speaks at {MIN_WORDS_PER_MINUTE} words per minute at the slowest, a speed of {slowest:.2f}"
        )
        return [ParameterWarning(field="speed", message=message)]

    @override
    async def prepare(self, order: LoadOrder) -> None:
        try:
            await super().prepare(order)
        except WeftError:
            self.command = program_command(self.program)  # without encoders, in weft's environment


def build(model: EspeakModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    return speech_engine(model, context, lambda: EspeakBackend(model, context))

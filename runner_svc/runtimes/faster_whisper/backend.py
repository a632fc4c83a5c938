"""The backend of the runtime faster_whisper: the library in a server program that the runner starts."""

from collections.abc import Mapping

from typing_extensions import override

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.port import LoadOrder
from runner_svc.environments.faster_whisper.environment import ENVIRONMENT
from runner_svc.runtimes.faster_whisper.parameters import PARAMETERS
from runner_svc.runtimes.faster_whisper.settings import FasterWhisperModel
from runner_svc.runtimes.media_server import MediaServer
from weft.kernel.abilities import Abilities
from weft.kernel.request import Operation, Skill

SERVER_PROGRAM = "runner_svc.runtimes.faster_whisper.server"
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
        model = self.model
        return [
            *("--port", str(port), "--model", str(order.model_path or model.file)),
            *("--device", "cpu" if uses_no_device(order) else model.device, "--compute-type", model.compute_type),
            *("--threads", str(model.engine_threads), "--slots", str(model.slots), "--beam-size", str(model.beam_size)),
            *(("--voice-detection",) if model.voice_detection else ()),
            *("--max-audio-seconds", str(model.max_audio_seconds), "--max-audio-bytes", str(model.max_audio_bytes)),
            *("--max-channels", str(model.max_channels)),
            *("--min-sample-rate-hz", str(model.min_sample_rate_hz)),
            *("--max-sample-rate-hz", str(model.max_sample_rate_hz)),
            *model.extra_arguments,
        ]

    @property
    @override
    def abilities(self) -> Abilities:
        return ABILITIES

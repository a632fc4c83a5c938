"""The command line of the program that hosts faster-whisper: from a model's settings and a load's order."""

from pathlib import Path

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.port import LoadOrder
from runner_svc.runtimes.faster_whisper.settings import FasterWhisperModel

HOST_PROGRAM = "runner_svc.runtimes.faster_whisper.host"


def host_arguments(model: FasterWhisperModel, socket: Path, order: LoadOrder | None = None) -> list[str]:
    """Returns the command line of the host program after its command."""
    order = order or LoadOrder()
    return [
        *("--socket", str(socket), "--model", str(order.model_path or model.file)),
        *("--device", "cpu" if uses_no_device(order) else model.device, "--compute-type", model.compute_type),
        *("--threads", str(model.engine_threads), "--slots", str(model.slots), "--beam-size", str(model.beam_size)),
        *(("--voice-detection",) if model.voice_detection else ()),
        *("--max-audio-seconds", str(model.max_audio_seconds), "--max-audio-bytes", str(model.max_audio_bytes)),
        *("--max-channels", str(model.max_channels)),
        *("--min-sample-rate-hz", str(model.min_sample_rate_hz)),
        *("--max-sample-rate-hz", str(model.max_sample_rate_hz)),
        *model.extra_arguments,
    ]

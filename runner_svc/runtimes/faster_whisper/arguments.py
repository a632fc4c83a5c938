"""The command line of the server program of faster-whisper: from a model's settings and a load's order."""

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.port import LoadOrder
from runner_svc.runtimes.faster_whisper.settings import FasterWhisperModel

SERVER_PROGRAM = "runner_svc.runtimes.faster_whisper.server"


def server_arguments(model: FasterWhisperModel, order: LoadOrder, port: int) -> list[str]:
    """Returns the command line after the program."""
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

"""The server program of faster-whisper.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.faster_whisper.server --model FOLDER
"""

import argparse
import sys
from pathlib import Path

from runner_svc.engine_host.cuda_libraries import load_cuda_libraries
from runner_svc.engine_host.http_server import import_library, serve
from runner_svc.runtimes.faster_whisper.engine import WhisperEngine
from runner_svc.runtimes.faster_whisper.listening import Library


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="faster_whisper_server", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="folder of the converted model")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto")
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--threads", type=int, default=1, help="threads per request")
    parser.add_argument("--slots", type=int, default=1, help="requests at once")
    parser.add_argument("--beam-size", type=int, default=5)
    parser.add_argument("--voice-detection", action="store_true", help="leave out parts without a voice")
    parser.add_argument("--max-audio-seconds", type=float, required=True)
    parser.add_argument("--max-audio-bytes", type=int, required=True)
    parser.add_argument("--max-channels", type=int, required=True)
    parser.add_argument("--min-sample-rate-hz", type=int, required=True)
    parser.add_argument("--max-sample-rate-hz", type=int, required=True)
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> WhisperEngine:
    """Loads the model. Raises ImportError, RefusedError."""
    if options.device != "cpu":
        load_cuda_libraries(Path(sys.prefix))
    library = Library(
        whisper=import_library("faster_whisper"),
        vad=import_library("faster_whisper.vad"),
        av=import_library("av"),
        numpy=import_library("numpy"),
    )
    return WhisperEngine(library, options)


def main() -> None:
    """Load the model, then work on requests."""
    options = parse_arguments()
    serve(lambda: load(options), options.port)


if __name__ == "__main__":
    main()

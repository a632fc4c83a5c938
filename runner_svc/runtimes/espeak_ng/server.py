"""The server program of espeak-ng.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.espeak_ng.server --program espeak-ng
"""

import argparse
from typing import Any

from runner_svc.engine_host.http_server import import_library, program_parser, serve
from runner_svc.engine_host.speech import SpeechEngine
from runner_svc.runtimes.espeak_ng.speaker import EspeakSpeaker


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = program_parser("espeak_ng_server", __doc__, needs_model=False)
    parser.add_argument("--program", default="espeak-ng")
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> SpeechEngine:
    """Lists the voices. Raises ImportError, RefusedError."""
    return SpeechEngine(EspeakSpeaker(options.program), _encoders(), options.slots)


def _encoders() -> Any | None:
    """Returns PyAV; None: it is not installed, so only WAV is available."""
    try:
        return import_library("av")
    except ImportError:
        return None


def main() -> None:
    """Lists the voices and serves requests."""
    serve(load, parse_arguments())


if __name__ == "__main__":
    main()

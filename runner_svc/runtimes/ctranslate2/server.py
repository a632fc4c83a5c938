"""The server program of CTranslate2.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.ctranslate2.server --model FOLDER
"""

import argparse
import sys
from pathlib import Path

from runner_svc.engine_host.cuda_libraries import load_cuda_libraries
from runner_svc.engine_host.http_server import import_library, serve
from runner_svc.runtimes.ctranslate2.engine import CTranslate2Engine


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="ctranslate2_server", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="folder of the converted model")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--context-tokens", type=int, default=2048)
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto")
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--threads", type=int, default=1, help="threads per request")
    parser.add_argument("--slots", type=int, default=1, help="requests at once")
    parser.add_argument("--beam-size", type=int, default=1)
    parser.add_argument("--prefix-cache-tokens", type=int, default=0, help="of kept prompts together; 0: none is kept")
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> CTranslate2Engine:
    """Loads the model. Raises ImportError, RefusedError."""
    if options.device != "cpu":
        load_cuda_libraries(Path(sys.prefix))
    return CTranslate2Engine(import_library("ctranslate2"), import_library("tokenizers"), options)


def main() -> None:
    """Load the model, then work on requests."""
    options = parse_arguments()
    serve(lambda: load(options), options.port)


if __name__ == "__main__":
    main()

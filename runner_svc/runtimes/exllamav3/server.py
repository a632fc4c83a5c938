"""The server program of ExLlamaV3.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.exllamav3.server --model FOLDER
"""

import argparse
from pathlib import Path

from runner_svc.engine_host.http_server import import_library, serve
from runner_svc.runtimes.exllamav3.engine import FULL_BITS, ExllamaV3Engine, Libraries


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="exllamav3_server", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="folder of the model")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--context-tokens", type=int, default=2048)
    parser.add_argument("--cache-tokens", type=int, default=2304, help="tokens of the cache for all requests")
    parser.add_argument("--key-bits", type=int, default=FULL_BITS)
    parser.add_argument("--value-bits", type=int, default=FULL_BITS)
    parser.add_argument("--gpu-split", type=_shares, default=(), help="GiB on each device, separated by commas")
    parser.add_argument("--tensor-parallel", action="store_true")
    parser.add_argument("--tp-backend", choices=["native", "nccl"], default="native")
    parser.add_argument("--slots", type=int, default=1, help="requests at once")
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--step-tokens", type=int, default=8)
    parser.add_argument("--requeue-tokens", type=int, default=0, help="0: none are queued again")
    parser.add_argument("--loop-tokens", type=int, default=0, help="0: repeats are not looked for")
    parser.add_argument("--loop-repeats", type=int, default=16)
    parser.add_argument("--shared-cache", action="store_true")
    return parser.parse_args(argv)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def load(options: argparse.Namespace) -> ExllamaV3Engine:
    """Loads the model. Raises ImportError, RefusedError."""
    torch, library = import_library("torch"), import_library("exllamav3")
    if not torch.cuda.is_available():
        raise ImportError("no CUDA device is visible to this program")
    return ExllamaV3Engine(Libraries(library, torch), options)


def main() -> None:
    """Load the model, then work on requests."""
    options = parse_arguments()
    serve(lambda: load(options), options.port)


if __name__ == "__main__":
    main()

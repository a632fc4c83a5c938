"""The host program of ExLlamaV3.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.exllamav3.host --socket PATH --model FOLDER
"""

import argparse
from pathlib import Path

from runner_svc.engine_host.engine import LibraryMissingError, Send, import_library
from runner_svc.engine_host.host import serve
from runner_svc.runtimes.exllamav3.engine import EngineOptions, ExllamaV3Engine, Libraries

LIBRARY = "exllamav3"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="exllamav3_host", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket on which the runner listens")
    parser.add_argument("--model", required=True, type=Path, help="folder of the model")
    parser.add_argument("--context-tokens", type=int, default=2048)
    parser.add_argument("--cache-tokens", type=int, default=2304, help="tokens of the cache for all requests")
    parser.add_argument("--key-bits", type=int, default=16)
    parser.add_argument("--value-bits", type=int, default=16)
    parser.add_argument("--gpu-split", default="", help="GiB on each device, separated by commas")
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


def load(options: argparse.Namespace, send: Send) -> ExllamaV3Engine:
    """Loads the model. Raises LibraryMissingError, RefusedError."""
    torch = import_library("torch")
    library = import_library(LIBRARY)
    if not torch.cuda.is_available():
        raise LibraryMissingError(LIBRARY, RuntimeError("no CUDA device is visible to this program"))
    return ExllamaV3Engine(
        Libraries(library, torch),
        EngineOptions(
            model_path=options.model,
            context_tokens=options.context_tokens,
            cache_tokens=options.cache_tokens,
            key_bits=options.key_bits,
            value_bits=options.value_bits,
            gpu_split=tuple(float(share) for share in options.gpu_split.split(",") if share),
            tensor_parallel=options.tensor_parallel,
            tp_backend=options.tp_backend,
            slots=options.slots,
            chunk_tokens=options.chunk_tokens,
            step_tokens=options.step_tokens,
            requeue_tokens=options.requeue_tokens or None,
            loop=(options.loop_tokens, options.loop_repeats) if options.loop_tokens else None,
            shared_cache=options.shared_cache,
        ),
        send,
    )


def main() -> None:
    """Load the model, then work on requests."""
    options = parse_arguments()
    serve(options.socket, lambda send: load(options, send))


if __name__ == "__main__":
    main()

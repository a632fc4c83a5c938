"""The host program of llama-cpp-python.

python .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.llama_cpp_python.host --socket PATH --model FILE
"""

import argparse

from runner_svc.engine_host.engine import Send, import_library
from runner_svc.engine_host.host import serve
from runner_svc.runtimes.llama_cpp_python.engine import CACHE_TYPES, EngineOptions, LlamaCppEngine


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="llama_cpp_host", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket on which the runner listens")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--context-tokens", type=int, default=2048, help="0: what the model was made for")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu-layers", type=int, default=-1, help="-1: all, where the library was built for a GPU")
    parser.add_argument("--batch-tokens", type=int, default=512, help="tokens per step of prefill")
    parser.add_argument("--flash-attention", choices=["on", "off"], default="off")
    parser.add_argument("--cache-type-k", choices=list(CACHE_TYPES), help="default: f16")
    parser.add_argument("--cache-type-v", choices=list(CACHE_TYPES), help="default: f16")
    parser.add_argument("--tensor-split", type=_parts, default=(), help="parts of the model for each device: 3,1")
    parser.add_argument("--embeddings", action="store_true")
    return parser.parse_args(argv)


def _parts(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def load(options: argparse.Namespace, send: Send) -> LlamaCppEngine:
    """Loads the model. Raises LibraryMissingError."""
    return LlamaCppEngine(
        import_library("llama_cpp"),
        EngineOptions(
            model_path=options.model,
            context_tokens=options.context_tokens,
            threads=options.threads,
            gpu_layers=options.gpu_layers,
            batch_tokens=options.batch_tokens,
            embeddings=options.embeddings,
            flash_attention=options.flash_attention == "on",
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            tensor_split=options.tensor_split,
        ),
        send,
    )


def main() -> None:
    """Load the model, then work on one request after the other."""
    options = parse_arguments()
    serve(options.socket, lambda send: load(options, send))


if __name__ == "__main__":
    main()

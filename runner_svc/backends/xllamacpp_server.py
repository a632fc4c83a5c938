"""llama.cpp's own HTTP server from the `xllamacpp` wheel, as a program that takes llama-server's flags.

    python -m runner_svc.backends.xllamacpp_server --model FILE --port 0 --parallel 4 --ctx-size 8192

No compiler is needed, and to whoever starts it, it is a llama-server: the same routes, the same answers, the key in
LLAMA_API_KEY, and a line that says where it listens.
"""

import argparse
import os
import signal
from pathlib import Path


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of llama-server that weft uses."""
    parser = argparse.ArgumentParser(prog="xllamacpp_server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--alias", default="", help="name under /v1/models")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0: a free one")
    parser.add_argument("--parallel", type=int, default=1, help="slots")
    parser.add_argument("--ctx-size", type=int, default=0, help="tokens over all slots; 0: what the model was made for")
    parser.add_argument("--batch-size", type=int, default=2048, help="tokens per prefill step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--n-gpu-layers", type=int, default=-1, help="-1: as many as fit")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("--jinja", action="store_true")
    parser.add_argument("--chat-template-file", type=Path, help="use this template, not the model file's own")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--pooling", choices=["none", "mean", "cls", "last"], default="mean")
    return parser.parse_args(argv)


def main() -> None:
    """Serve until a signal comes."""
    options = parse_arguments()
    import xllamacpp  # noqa: PLC0415 - heavy, and only this process may load it

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx_size
    params.n_batch = options.batch_size
    params.n_gpu_layers = options.n_gpu_layers
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = options.metrics
    params.endpoint_slots = options.slots
    params.endpoint_props = True
    params.use_jinja = options.jinja
    if options.chat_template_file is not None:
        params.chat_template = options.chat_template_file.read_text(encoding="utf-8")
    if options.alias:
        params.model_alias = {options.alias}
    if key := os.environ.get("LLAMA_API_KEY"):
        params.api_keys = [key]
    if options.embeddings:
        params.embedding = True
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{options.pooling.upper()}")
    # Python's own SIGINT handler would wait for native code to return; the default action ends a load at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201 - the line the supervisor waits for
    while True:
        signal.pause()


if __name__ == "__main__":
    main()

"""The server program of diffusers.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.diffusers.server --model FOLDER
"""

import argparse
import os
from pathlib import Path
from typing import Any

from runner_svc.engine_host.http_server import LoadReports, import_library, say, serve
from runner_svc.runtimes.diffusers.engine import DiffusersEngine
from runner_svc.runtimes.diffusers.pictures import PictureFiles
from runner_svc.runtimes.diffusers.pipelines import Pipelines, read_folder
from runner_svc.runtimes.diffusers.previews import PreviewDecoder

TORCH_SHARE = 0.1
"""Share of a load after the import of PyTorch, and so on."""
LIBRARY_SHARE = 0.25
WEIGHTS_SHARE = 0.95
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="diffusers_server", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="folder of the pipeline")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--threads", type=int, default=1)
    for name in ("family", "device", "dtype"):
        parser.add_argument(f"--{name}", default="auto")
    for name in ("device-map", "cpu-offload", "quantization"):
        parser.add_argument(f"--{name}", default="none")
    parser.add_argument("--variant", help="variant of the weights, such as fp16; default: the one that there is")
    for name in ("vae-tiling", "attention-slicing", "no-safety-checker"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--strength", type=float)
    parser.add_argument("--size-multiple", type=int)
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--max-pixels", type=int, default=2048 * 2048)
    parser.add_argument("--max-source-bytes", type=int, default=32 * 1024 * 1024)
    parser.add_argument("--max-source-pixels", type=int, default=33_554_432)
    parser.add_argument("--preview-side-pixels", type=int, default=384)
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> DiffusersEngine:
    """Loads the model. Raises ImportError, RefusedError."""
    read_folder(options)  # before the slow imports
    # Nothing is looked up on the network: what is not in the folder is not there.
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    reports = LoadReports()
    say("importing PyTorch")
    torch = import_library("torch")
    reports.report(TORCH_SHARE)
    torch.set_num_threads(options.threads)
    files = PictureFiles(options.max_source_bytes, options.max_source_pixels)
    say("importing diffusers")
    _quiet(import_library("transformers"))
    diffusers = _quiet(import_library("diffusers"))
    reports.report(LIBRARY_SHARE)
    say("loading the weights")
    of_weights = WEIGHTS_SHARE - LIBRARY_SHARE
    pipelines = Pipelines(torch, diffusers, options, lambda share: reports.report(LIBRARY_SHARE + of_weights * share))
    say(f"loaded {pipelines.description}")
    previews = PreviewDecoder(pipelines=pipelines, side_pixels=options.preview_side_pixels)
    return DiffusersEngine(pipelines, files, previews, options)


def _quiet(library: Any) -> Any:
    """Turn off a library's bars and its advice to programmers."""
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


def main() -> None:
    """Load the model, then work on requests."""
    options = parse_arguments()
    serve(lambda: load(options), options.port)


if __name__ == "__main__":
    main()

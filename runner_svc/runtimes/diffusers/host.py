"""The host program of diffusers.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.diffusers.host --socket PATH --model FOLDER
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from runner_svc.engine_host.engine import Send, import_library
from runner_svc.engine_host.host import serve
from runner_svc.engine_host.messages import LoadProgress
from runner_svc.runtimes.diffusers.engine import DiffusersEngine, ImageDefaults
from runner_svc.runtimes.diffusers.pictures import PictureFiles, PictureLimits
from runner_svc.runtimes.diffusers.pipelines import PipelineOptions, Pipelines, read_folder
from runner_svc.runtimes.diffusers.previews import PreviewDecoder

TORCH_SHARE = 0.1
"""Share of a load after the import of PyTorch, and so on."""
LIBRARY_SHARE = 0.25
WEIGHTS_SHARE = 0.95
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="diffusers_host", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket on which the runner listens")
    parser.add_argument("--model", required=True, type=Path, help="folder of the pipeline")
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


def load(options: argparse.Namespace, send: Send) -> DiffusersEngine:
    """Loads the model. Raises LibraryMissingError, RefusedError."""
    chosen = PipelineOptions(
        folder=options.model,
        family=options.family,
        variant=options.variant,
        device=options.device,
        dtype=options.dtype,
        device_map=options.device_map,
        cpu_offload=options.cpu_offload,
        quantization=options.quantization,
        vae_tiling=options.vae_tiling,
        attention_slicing=options.attention_slicing,
        safety_checker=not options.no_safety_checker,
    )
    read_folder(chosen)  # before the slow imports
    # Nothing is looked up on the network: what is not in the folder is not there.
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    _say("importing PyTorch")
    torch = import_library("torch")
    send(LoadProgress(share=TORCH_SHARE))
    torch.set_num_threads(options.threads)
    files = PictureFiles(PictureLimits(max_file_bytes=options.max_source_bytes, max_pixels=options.max_source_pixels))
    _say("importing diffusers")
    _quiet(import_library("transformers"))
    diffusers = _quiet(import_library("diffusers"))
    send(LoadProgress(share=LIBRARY_SHARE))
    _say("loading the weights")
    of_weights = WEIGHTS_SHARE - LIBRARY_SHARE
    pipelines = Pipelines(
        torch, diffusers, chosen, lambda share: send(LoadProgress(share=LIBRARY_SHARE + of_weights * share))
    )
    _say(f"loaded {pipelines.description}")
    return DiffusersEngine(
        pipelines,
        files,
        PreviewDecoder(pipelines=pipelines, side_pixels=options.preview_side_pixels),
        ImageDefaults(
            steps=options.steps,
            guidance=options.guidance,
            strength=options.strength,
            size_multiple=options.size_multiple,
            max_steps=options.max_steps,
            max_pixels=options.max_pixels,
        ),
    )


def _quiet(library: Any) -> Any:
    """Turn off a library's bars and its advice to programmers."""
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def main() -> None:
    """Load the model, then work on requests."""
    options = parse_arguments()
    serve(options.socket, lambda send: load(options, send))


if __name__ == "__main__":
    main()

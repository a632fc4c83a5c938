"""The server program of diffusers.

PYTHON .../weft_extensions/engines/engine_host/bootstrap.py weft_extensions.engines.diffusers.server --model FOLDER
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from weft_extensions.engines.diffusers.pictures import PictureFiles
from weft_extensions.engines.diffusers.pipelines import Pipelines, read_folder
from weft_extensions.engines.diffusers.plan import SEEDS, Plan, Planner
from weft_extensions.engines.engine_host.http_server import (
    OUT_OF_MEMORY,
    Caller,
    FieldRefusedError,
    LoadReports,
    RefusedError,
    import_library,
    positive,
    program_parser,
    say,
    serve,
)
from weft_extensions.engines.engine_host.media_routes import (
    ImageEngine,
    ImageRequest,
    send_image,
    send_preview,
    send_progress,
)

MAX_WORDS_OF_ERROR = 300


def preview_steps(step_count: int, preview_count: int) -> list[int]:
    """Returns the steps, counted from 1, that are followed by a preview: evenly spaced, without the last step."""
    wanted = {round(number * step_count / (preview_count + 1)) for number in range(1, preview_count + 1)}
    return sorted(step for step in wanted if 0 < step < step_count)


@dataclass(slots=True)
class _Progress:
    total: int
    done: int = 0
    previews: list[int] = field(default_factory=list)
    """Steps of the current image that are followed by a preview."""


class DiffusersEngine(ImageEngine):
    """A loaded model."""

    def __init__(self, pipelines: Pipelines, files: PictureFiles, options: argparse.Namespace) -> None:
        self._pipelines = pipelines
        self._files = files
        self._planner = Planner(pipelines, files, options)

    def make(self, request: ImageRequest, caller: Caller) -> None:
        """See ImageEngine.make."""
        memory_error = ""
        ended_early = True
        try:
            self._make(request, caller)
            ended_early = False
        except Exception as error:
            if not self._pipelines.is_out_of_memory(error):
                raise
            memory_error = str(error)
        finally:
            if ended_early:
                self._pipelines.release()
        # Outside of `except`, since the traceback references the memory to be freed.
        if memory_error:
            self._pipelines.release()
            advice = "ask for a smaller size or fewer images"
            configured = "let the operator set cpu_offload, vae_tiling, attention_slicing or a quantization"
            shown = memory_error.splitlines()[0][:MAX_WORDS_OF_ERROR]
            message = f"the memory of the device ran out; {advice}, or {configured}. {shown}"
            raise RefusedError(message, OUT_OF_MEMORY)

    def _make(self, request: ImageRequest, caller: Caller) -> None:
        began = time.monotonic()
        plan = self._planner.plan(request)
        progress = _Progress(total=plan.count * plan.steps)
        send_progress(caller, 0, progress.total, "reading the prompt")
        for index in range(plan.count):
            caller.raise_if_gone()
            before, seed = progress.done, (request.seed + index) % SEEDS
            image = self._image(request, caller, plan, progress, index)
            data = self._files.written(image, request.output_format, plan.quality)
            usage = {"image_steps": progress.done - before, "image_pixels": plan.width * plan.height}
            ended = time.monotonic()
            send_image(caller, index, data, seed, usage, ended - began)
            began = ended

    def _image(self, request: ImageRequest, caller: Caller, plan: Plan, progress: _Progress, index: int) -> Any:
        """Generates one image. Raises GoneError at the step in which the caller disconnects."""
        partial = 0

        def after_step(pipeline: Any, step: int, _: Any, given: dict[str, Any]) -> dict[str, Any]:
            nonlocal partial
            if step == 0:
                # A scheduler may use two steps for one, and a source image reduces them.
                steps = getattr(pipeline, "num_timesteps", None) or plan.steps
                progress.total = steps * plan.count
                progress.previews = preview_steps(steps, request.partial_images)
            progress.done += 1
            # Unlike the library's interrupt flag, this skips decoding.
            caller.raise_if_gone()
            last = (
                "" if progress.done % (progress.total // plan.count) else f"decoding image {index + 1} of {plan.count}"
            )
            send_progress(caller, progress.done, progress.total, last)
            if step + 1 in progress.previews:
                preview = self._preview(pipeline, given["latents"], plan)
                if preview is not None:
                    send_preview(caller, index, partial, self._files.written(preview, request.output_format))
                    partial += 1
            return {}

        made = plan.pipeline(
            generator=self._pipelines.generator((request.seed + index) % SEEDS),
            callback_on_step_end=after_step,
            **plan.arguments,
        )
        if any(getattr(made, "nsfw_content_detected", None) or ()):
            message = "the model's own safety checker withheld the image; change the prompt or the seed"
            raise FieldRefusedError("prompt", message)
        return made.images[0]

    def _preview(self, pipeline: Any, latents: Any, plan: Plan) -> Any:
        """Returns a preview; None if it fails, which does not affect the image."""
        try:
            return self._pipelines.preview(pipeline, latents, plan.width, plan.height)
        except Exception as error:  # noqa: BLE001 - the image itself is unaffected
            sys.stderr.write(f"no preview: {type(error).__name__}: {error}\n")
            return None


TORCH_SHARE = 0.1
"""Loaded share after the import of PyTorch; likewise for the next two."""
LIBRARY_SHARE = 0.25
WEIGHTS_SHARE = 0.95
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = program_parser("diffusers_server", __doc__)
    for name in ("device", "dtype"):
        parser.add_argument(f"--{name}", default="auto")
    for name in ("device-map", "cpu-offload", "quantization"):
        parser.add_argument(f"--{name}", default="none")
    parser.add_argument("--variant", help="variant of the weights, such as fp16; default: the one that there is")
    for name in ("vae-tiling", "attention-slicing", "no-safety-checker"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--steps", type=positive)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--strength", type=float)
    parser.add_argument("--size-multiple", type=positive)
    parser.add_argument("--max-steps", type=positive, default=150)
    parser.add_argument("--max-pixels", type=positive, default=2048 * 2048)
    parser.add_argument("--max-source-bytes", type=positive, default=32 * 1024 * 1024)
    parser.add_argument("--max-source-pixels", type=positive, default=33_554_432)
    parser.add_argument("--preview-side-pixels", type=positive, default=384)
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> DiffusersEngine:
    """Loads the model. Raises ImportError, RefusedError."""
    read_folder(options)  # before the slow imports
    # Never download missing files.
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
    return DiffusersEngine(pipelines, files, options)


def _quiet(library: Any) -> Any:
    """Disables a library's progress bars and advice to programmers."""
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


def main() -> None:
    """Loads the model and serves requests."""
    serve(load, parse_arguments())


if __name__ == "__main__":
    main()

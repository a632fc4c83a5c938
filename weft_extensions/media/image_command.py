"""`weft media image`: images from words, or from words and images, as files."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from weft.api.common.v1 import event_pb2, image_pb2, receipt_pb2
from weft.client import ImageOptions, connect
from weft.client._media_messages import image_request
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.media_types import suffix_of
from weft_app.cli.options import DEFAULT_HOME, AllowRemoteOption, HomeOption, OutputFormat, naming_fields, parameter_of
from weft_app.cli.output import document_text
from weft_app.cli.terminal import note, say, say_bytes
from weft_extensions.media.media_commands import (
    IMAGES,
    OUTPUT_OPTION,
    STANDARD,
    DetachOption,
    FetchOption,
    ModelOption,
    TimeoutOption,
    chosen_model,
    fetched,
    free_paths,
    given_options,
    numbered,
    read_media,
    require_writable,
    shown_work,
    slug,
    stopped,
    submit,
    work_facts,
    written,
)

MAX_COUNT = 10
PREVIEWS = 4
"""Number of previews with --preview."""
_FORMATS = MappingProxyType({".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"})
_DOCUMENTS = (OutputFormat.JSON, OutputFormat.YAML)


def image(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to show.", show_default=False)] = "",
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|json|yaml",
            help="File to write: .png, .jpg or .webp; - for stdout. Several images "
            "get -1, -2 ... json, yaml: one document.",
        ),
    ] = "",
    *,
    model: ModelOption = "",
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=MAX_COUNT, help="How many images.")] = 1,
    size: Annotated[str, typer.Option(help="Size as WIDTHxHEIGHT in pixels. Default: the model's.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, max=1000, help="Denoising steps per image.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed makes the same image.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, max=100, help="Guidance scale.")] = None,
    negative: Annotated[str, typer.Option(help="What the image must not show.")] = "",
    quality: Annotated[str, typer.Option(help="Quality, by the model's own names.")] = "",
    source: Annotated[list[Path] | None, typer.Option("--from", help="Source image; repeatable.")] = None,
    mask: Annotated[Path | None, typer.Option(help="Mask: where the source image may be changed.")] = None,
    strength: Annotated[
        float | None, typer.Option(min=0, max=1, help="How much of the source image is changed, 0 to 1.")
    ] = None,
    preview: Annotated[Path | None, typer.Option(help="File for the latest preview of the first image.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
    detach: DetachOption = False,
    fetch: FetchOption = "",
    allow_remote: AllowRemoteOption = False,
    timeout: TimeoutOption = 3600.0,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Make images from a description, or from images, as files. Progress goes to stderr; Ctrl-C cancels.

    Files are never overwritten without --force; their names go to stdout, the seeds that reproduce them to stderr.

    Example: weft media image "a lighthouse at night" -o lighthouse.png --seed 7
    """
    target = ImageTarget(output=output, prompt=prompt, count=count, force=force)
    if fetch:
        _fetch(fetch, target, home)
        return
    if not prompt.strip():
        raise invalid_field("PROMPT", "describe the image, or use --fetch TASK")
    target.require_writable()
    options: ImageOptions = given_options(
        {
            "count": count,
            "size": size,
            "steps": steps,
            "seed": seed,
            "guidance": guidance,
            "negative_prompt": negative,
            "quality": quality,
            "strength": strength,
            "output_format": target.format,
            "allow_remote": allow_remote,
            "partial_images": PREVIEWS if preview is not None else None,
        }
    )
    if mask is not None and not source:
        raise invalid_field("--mask", "needs --from, the source image of the mask")
    if source:
        options["images"] = [read_media(path, "--from") for path in source]
    if mask is not None:
        options["mask"] = read_media(mask, "--mask")
    name = chosen_model(model, IMAGES, home)
    with naming_fields(parameter_of):
        if detach:
            submit(image_request(name, prompt, options), "image", "image", home)
            return
        with connect(home=home) as mesh:
            _make(mesh.stream_images(name, prompt, timeout=timeout, **options), target, preview)
    target.finish(name)


def _fetch(task_id: str, target: "ImageTarget", home: Path) -> None:
    """Writes the images of a task. Default file names come from the prompt."""
    events, spec = fetched(task_id, "image", home)
    target.count = sum(event.HasField("image") for event in events)
    target.prompt = spec.image.prompt
    target.require_writable()
    _make(events, target, None)
    target.finish(spec.model)


def _make(events: Iterable[event_pb2.InferenceEvent], target: "ImageTarget", preview: Path | None) -> None:
    try:
        with shown_work() as show:
            for event in events:
                show(event)
                if event.HasField("image"):
                    target.add(event.image)
                elif event.HasField("partial_image") and preview is not None and not event.partial_image.index:
                    with written(preview, force=True) as file:
                        file.write(event.partial_image.image.data)
                elif event.HasField("finished"):
                    target.receipt.CopyFrom(event.finished.receipt)
    except KeyboardInterrupt:
        stopped(f"saved {', '.join(target.saved)}" if target.saved else "no image was saved")


@dataclass(slots=True, kw_only=True)
class ImageTarget:
    """The destination of images: files, standard output, or a document."""

    output: str
    prompt: str
    count: int
    force: bool
    receipt: receipt_pb2.Receipt = field(default_factory=receipt_pb2.Receipt)
    _images: list[image_pb2.GeneratedImage] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)

    @property
    def format(self) -> str:
        """The format in the file's name; empty if it has none. Raises INVALID_ARGUMENT naming --output."""
        if self._is_document or self.output in ("", STANDARD):
            return ""
        suffix = Path(self.output).suffix.lower()
        if suffix not in _FORMATS:
            raise invalid_field(OUTPUT_OPTION, f"{self.output} must end with {', '.join(_FORMATS)}")
        return _FORMATS[suffix]

    @property
    def _is_document(self) -> bool:
        return self.output in _DOCUMENTS

    def require_writable(self) -> None:
        """Checks files before the request, see `weft_extensions.media.media_commands.require_writable`."""
        if self.output == STANDARD and self.count > 1:
            raise invalid_field("--count", "cannot be standard output for several images; name a file")
        if self.format:
            require_writable(numbered(Path(self.output), self.count), force=self.force)

    def add(self, made: image_pb2.GeneratedImage) -> None:
        """Adds a complete image; a file is written immediately."""
        if self._is_document:
            self._images.append(made)
            return
        if self.output == STANDARD:
            say_bytes([made.image.data])
            return
        path = self._path(made)
        with written(path, force=self.force) as file:
            file.write(made.image.data)
        self.saved.append(str(path))
        say(f"{path}\n")
        if made.HasField("seed"):
            note(f"{path}: seed {made.seed}")

    def _path(self, made: image_pb2.GeneratedImage) -> Path:
        if not self.output:
            # The first image determines the file names.
            suffix = suffix_of(made.image.media_type)
            self.output = str(free_paths(slug(self.prompt), suffix, self.count)[0])
            if self.count > 1:
                self.output = f"{self.output.removesuffix(f'-1.{suffix}')}.{suffix}"
        # Workflows may make more images than were asked for.
        return numbered(Path(self.output), max(self.count, made.index + 1))[made.index]

    def finish(self, model: str) -> None:
        """Prints the document, and the work of the request."""
        if self._is_document:
            images = [_image_document(made) for made in sorted(self._images, key=lambda made: made.index)]
            document = {"kind": "Images", "model": model, "images": images, "receipt": document_of(self.receipt)}
            say(document_text(document, OutputFormat(self.output)))
        note(work_facts(self.receipt))


def _image_document(made: image_pb2.GeneratedImage) -> dict[str, object]:
    document: dict[str, object] = {"index": made.index, "mediaType": made.image.media_type}
    if made.HasField("seed"):
        document["seed"] = made.seed
    if made.revised_prompt:
        document["revisedPrompt"] = made.revised_prompt
    return {**document, "data": base64.b64encode(made.image.data).decode("ascii")}

"""Images as files: reading those of a request within limits, and writing those that were made.

A request's files are hostile input: only three formats are read, the size of an image is checked before its pixels are
decoded, and every failure refuses the request by the name of its field.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runner_svc.engine_host.engine import RefusedError, import_library
from runner_svc.engine_host.messages import MAX_MESSAGE_BYTES

READ_FORMATS = ("PNG", "JPEG", "WEBP")
MEDIA_TYPES: Mapping[str, str] = MappingProxyType({"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"})
"""The formats that are written."""
DEFAULT_QUALITY = 90
"""Of JPEG and WebP."""
LOSSLESS_QUALITY = 100
MAX_SIDE_PIXELS = 16_384
ENCODED_SHARE = 3 / 4
"""Bytes of a file per byte of the message that carries it."""
MESSAGE_RESERVE_BYTES = 4096
OPAQUE = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLimits:
    """The limits of the images in a request."""

    max_file_bytes: int
    max_pixels: int


class PictureFiles:
    """Reads and writes image files with Pillow."""

    def __init__(self, limits: PictureLimits) -> None:
        """Raises LibraryMissingError."""
        self._image = import_library("PIL.Image")
        self._operations = import_library("PIL.ImageOps")
        self._limits = limits
        # Pillow's own limit, as a second one: above twice this number it raises an error by itself.
        self._image.MAX_IMAGE_PIXELS = MAX_SIDE_PIXELS**2

    def read_source(self, path: Path, field: str) -> Any:
        """Returns a source image in RGB; what is transparent is white. Raises RefusedError."""
        image = self._decode(path, field)
        if not _has_alpha(image):
            return image.convert("RGB")
        image = image.convert("RGBA")
        ground = self._image.new("RGBA", image.size, (255, 255, 255, 255))
        ground.alpha_composite(image)
        return ground.convert("RGB")

    def read_mask(self, path: Path, field: str) -> Any:
        """Returns a mask in grey, white where the image may be changed. Raises RefusedError.

        A mask with transparent places says so by them, as in OpenAI's API; another one by white.
        """
        image = self._decode(path, field)
        if _has_alpha(image):
            alpha = image.convert("RGBA").getchannel("A")
            if alpha.getextrema()[0] < OPAQUE:
                return alpha.point(lambda value: OPAQUE - value)
        return image.convert("L")

    def resized(self, image: Any, width: int, height: int) -> Any:
        """Returns an image of this size."""
        return image if image.size == (width, height) else image.resize((width, height))

    def written(self, image: Any, output_format: str, quality: int | None = None) -> bytes:
        """Returns an image as a file. Raises RefusedError where it is too long for a message."""
        target = io.BytesIO()
        if output_format == "png":
            image.save(target, format="PNG")
        else:
            image.save(target, format=output_format.upper(), quality=DEFAULT_QUALITY if quality is None else quality)
        data = target.getvalue()
        most = int(MAX_MESSAGE_BYTES * ENCODED_SHARE) - MESSAGE_RESERVE_BYTES
        if len(data) > most:
            message = (
                f"output_format: the image has {len(data)} bytes as {output_format}, above {most}; use jpeg or webp"
            )
            raise RefusedError("INVALID_ARGUMENT", message)
        return data

    def _decode(self, path: Path, field: str) -> Any:
        """Returns an image with all its pixels, upright. Raises RefusedError."""
        size = path.stat().st_size
        if size > self._limits.max_file_bytes:
            raise _refused(field, f"has {size} bytes, and at most {self._limits.max_file_bytes} are taken")
        try:
            with self._image.open(path, formats=READ_FORMATS) as image:
                self._check_size(image.size, field)
                image.verify()
            # After `verify` an image must be opened again.
            with self._image.open(path, formats=READ_FORMATS) as image:
                image.load()
                return self._operations.exif_transpose(image)
        except RefusedError:
            raise
        except MemoryError:
            raise _refused(field, "does not fit into memory when it is decoded") from None
        except Exception as error:  # noqa: BLE001 - broken files make decoders raise errors of many kinds
            names = ", ".join(READ_FORMATS)
            raise _refused(field, f"cannot be read as one of {names}: {_first_line(error)}") from None

    def _check_size(self, size: tuple[int, int], field: str) -> None:
        width, height = size
        if width * height > self._limits.max_pixels or max(size) > MAX_SIDE_PIXELS:
            limits = f"{self._limits.max_pixels} pixels and {MAX_SIDE_PIXELS} on each side"
            raise _refused(field, f"has {width}x{height} pixels, and at most {limits} are taken")


def _has_alpha(image: Any) -> bool:
    return "A" in image.getbands() or "transparency" in image.info


def _refused(field: str, message: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", f"{field}: {message}")


def _first_line(error: BaseException) -> str:
    # Pillow's errors name the private file of the request.
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "the file is no such image" if "cannot identify" in text else text[:200]

"""Images as files: reading those of a request within limits, and writing those that were made.

A request's files are hostile input: only three formats are read, the size of an image is checked before its pixels are
decoded, and every failure refuses the request by the name of its field.
"""

import io
from typing import Any

from runner_svc.engine_host.http_server import FieldRefusedError, RefusedError, import_library
from runner_svc.engine_host.media_routes import MAX_SIDE_PIXELS

READ_FORMATS = ("PNG", "JPEG", "WEBP")
FORMATS = ("png", "jpeg", "webp")
"""The formats that are written."""
DEFAULT_QUALITY = 90
"""Of JPEG and WebP."""
LOSSLESS_QUALITY = 100
MAX_FILE_BYTES = 24 * 1024 * 1024
"""Largest file of an image that is made; a message of the mesh with several has at most 64 MiB."""
OPAQUE = 255


class PictureFiles:
    """Reads and writes image files with Pillow."""

    def __init__(self, max_bytes: int, max_pixels: int) -> None:
        """The limits are those of images in requests. Raises ImportError."""
        self._image = import_library("PIL.Image")
        self._operations = import_library("PIL.ImageOps")
        self._max_bytes, self._max_pixels = max_bytes, max_pixels
        # Pillow's own limit, as a second one: above twice this number it raises an error by itself.
        self._image.MAX_IMAGE_PIXELS = MAX_SIDE_PIXELS**2

    def read_source(self, data: bytes, field: str) -> Any:
        """Returns a source image in RGB; what is transparent is white. Raises RefusedError."""
        image = self._decode(data, field)
        if not _has_alpha(image):
            return image.convert("RGB")
        image = image.convert("RGBA")
        ground = self._image.new("RGBA", image.size, (255, 255, 255, 255))
        ground.alpha_composite(image)
        return ground.convert("RGB")

    def read_mask(self, data: bytes, field: str) -> Any:
        """Returns a mask in grey, white where the image may be changed. Raises RefusedError.

        A mask with transparent places says so by them, as in OpenAI's API; another one by white.
        """
        image = self._decode(data, field)
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
        if len(data) > MAX_FILE_BYTES:
            message = f"the image has {len(data)} bytes as {output_format}, above {MAX_FILE_BYTES}; use jpeg or webp"
            raise FieldRefusedError("output_format", message)
        return data

    def _decode(self, data: bytes, field: str) -> Any:
        """Returns an image with all its pixels, upright. Raises RefusedError."""
        if len(data) > self._max_bytes:
            message = f"has {len(data)} bytes, and at most {self._max_bytes} are taken"
            raise FieldRefusedError(field, message)
        try:
            with self._image.open(io.BytesIO(data), formats=READ_FORMATS) as image:
                self._check_size(image.size, field)
                image.verify()
            # After `verify` an image must be opened again.
            with self._image.open(io.BytesIO(data), formats=READ_FORMATS) as image:
                image.load()
                return self._operations.exif_transpose(image)
        except RefusedError:
            raise
        except MemoryError:
            raise FieldRefusedError(field, "does not fit into memory when it is decoded") from None
        except Exception as error:  # noqa: BLE001 - broken files make decoders raise errors of many kinds
            names = ", ".join(READ_FORMATS)
            raise FieldRefusedError(field, f"cannot be read as one of {names}: {_first_line(error)}") from None

    def _check_size(self, size: tuple[int, int], field: str) -> None:
        width, height = size
        if width * height > self._max_pixels or max(size) > MAX_SIDE_PIXELS:
            limits = f"{self._max_pixels} pixels and {MAX_SIDE_PIXELS} on each side"
            raise FieldRefusedError(field, f"has {width}x{height} pixels, and at most {limits} are taken")


def _has_alpha(image: Any) -> bool:
    return "A" in image.getbands() or "transparency" in image.info


def _first_line(error: BaseException) -> str:
    # Pillow's error names an object of Python.
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "the file is no such image" if "cannot identify" in text else text[:200]

"""Reads source images within limits, and writes generated images.

Source images are untrusted: only three formats are read, dimensions are checked before decoding, and every failure
rejects the request naming the field.
"""

import io
from typing import Any

from weft_extensions.engines.engine_host.http_server import FieldRefusedError, RefusedError, import_library
from weft_extensions.engines.engine_host.media_routes import MAX_SIDE_PIXELS

READ_FORMATS = ("PNG", "JPEG", "WEBP")
FORMATS = ("png", "jpeg", "webp")
"""Output formats."""
DEFAULT_QUALITY = 90
"""For JPEG and WebP."""
LOSSLESS_QUALITY = 100
MAX_FILE_BYTES = 24 * 1024 * 1024
"""Maximum size of a generated file; a message of the mesh with several files has at most 64 MiB."""
OPAQUE = 255


class PictureFiles:
    """Reads and writes image files with Pillow."""

    def __init__(self, max_bytes: int, max_pixels: int) -> None:
        """The limits apply to source images. Raises ImportError."""
        self._image = import_library("PIL.Image")
        self._operations = import_library("PIL.ImageOps")
        self._max_bytes, self._max_pixels = max_bytes, max_pixels
        # Pillow's own limit as a second check: it raises an error above twice this number.
        self._image.MAX_IMAGE_PIXELS = MAX_SIDE_PIXELS**2

    def read_source(self, data: bytes, field: str) -> Any:
        """Returns a source image in RGB with transparency replaced by white. Raises RefusedError."""
        image = self._decode(data, field)
        if not _has_alpha(image):
            return image.convert("RGB")
        image = image.convert("RGBA")
        ground = self._image.new("RGBA", image.size, (255, 255, 255, 255))
        ground.alpha_composite(image)
        return ground.convert("RGB")

    def read_mask(self, data: bytes, field: str) -> Any:
        """Returns a grayscale mask, white where the image may be changed. Raises RefusedError.

        Transparent areas are changed, as in OpenAI's API; in a mask without transparency white ones are.
        """
        image = self._decode(data, field)
        if _has_alpha(image):
            alpha = image.convert("RGBA").getchannel("A")
            if alpha.getextrema()[0] < OPAQUE:
                return alpha.point(lambda value: OPAQUE - value)
        return image.convert("L")

    def resized(self, image: Any, width: int, height: int) -> Any:
        """Resizes an image."""
        return image if image.size == (width, height) else image.resize((width, height))

    def written(self, image: Any, output_format: str, quality: int | None = None) -> bytes:
        """Encodes an image. Raises RefusedError if the file is too large for a message."""
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
        """Decodes an image completely and rotates it upright. Raises RefusedError."""
        if len(data) > self._max_bytes:
            message = f"has {len(data)} bytes, and at most {self._max_bytes} are accepted"
            raise FieldRefusedError(field, message)
        try:
            with self._image.open(io.BytesIO(data), formats=READ_FORMATS) as image:
                self._check_size(image.size, field)
                image.verify()
            # `verify` makes an image unusable, so it is opened again.
            with self._image.open(io.BytesIO(data), formats=READ_FORMATS) as image:
                image.load()
                return self._operations.exif_transpose(image)
        except RefusedError:
            raise
        except MemoryError:
            raise FieldRefusedError(field, "does not fit into memory when it is decoded") from None
        except Exception as error:  # noqa: BLE001 - decoders raise many kinds of errors for corrupt files
            names = ", ".join(READ_FORMATS)
            raise FieldRefusedError(field, f"cannot be read as one of {names}: {_first_line(error)}") from None

    def _check_size(self, size: tuple[int, int], field: str) -> None:
        width, height = size
        if width * height > self._max_pixels or max(size) > MAX_SIDE_PIXELS:
            limits = f"{self._max_pixels} pixels and {MAX_SIDE_PIXELS} on each side"
            raise FieldRefusedError(field, f"has {width}x{height} pixels, and at most {limits} are accepted")


def _has_alpha(image: Any) -> bool:
    return "A" in image.getbands() or "transparency" in image.info


def _first_line(error: BaseException) -> str:
    # Pillow's message contains the repr of a Python object.
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "the file is not such an image" if "cannot identify" in text else text[:200]

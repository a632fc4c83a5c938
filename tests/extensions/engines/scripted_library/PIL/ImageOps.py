"""The one operation that is used."""

from PIL.Image import Image


def exif_transpose(image: Image) -> Image:
    return image

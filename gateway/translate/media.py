"""Media inside a request: data: URLs and base64, decoded. Addresses are refused; fetching is not this part's job."""

import base64
import binascii
import re

from gateway.schemas.chat import ImageUrl, InputAudio
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import invalid_field

_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]{1,40});base64,", re.IGNORECASE)
_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"})
_AUDIO_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg"}


def to_image(image: ImageUrl, field: str) -> chat_pb2.MediaPart:
    """The image of a data: URL. Raises INVALID_ARGUMENT naming `field`.url for anything else."""
    prefix = _DATA_URL.match(image.url)
    if prefix is None:
        raise invalid_field(
            f"{field}.url", "must be a data: URL such as data:image/png;base64,...; addresses are not fetched"
        )
    media_type = prefix.group(1).lower()
    if media_type not in _IMAGE_TYPES:
        raise invalid_field(f"{field}.url", f"must be one of {', '.join(sorted(_IMAGE_TYPES))}")
    data = _decoded(image.url[prefix.end() :], f"{field}.url")
    return chat_pb2.MediaPart(data=data, media_type=media_type, detail=image.detail or "")


def to_audio(audio: InputAudio, field: str) -> chat_pb2.MediaPart:
    """A recording. Raises INVALID_ARGUMENT naming `field`.data if it is not base64."""
    return chat_pb2.MediaPart(data=_decoded(audio.data, f"{field}.data"), media_type=_AUDIO_TYPES[audio.format])


def _decoded(text: str, field: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_field(field, "must be base64 without white space") from None
    if not data:
        raise invalid_field(field, "must not be empty")
    return data

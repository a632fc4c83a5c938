"""Images that a server sends in base64."""

import base64
import binascii

from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import WeftError
from weft.kernel.media_types import UNKNOWN_TYPE, image_type_of
from weft.kernel.reasons import Reason


def image_part(text: str) -> chat_pb2.MediaPart:
    """Returns an image with the type that its first bytes say. Raises BACKEND_PROTOCOL_ERROR for no base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine sent an image that is no base64") from None
    return chat_pb2.MediaPart(media_type=image_type_of(data) or UNKNOWN_TYPE, data=data)

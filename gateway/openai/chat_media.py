"""Media of chat messages. What they may be is decided in `gateway.media`."""

from gateway.media import RequestMedia
from gateway.openai.chat_schema import ImageUrl, InputAudio
from weft.api.common.v1 import chat_pb2


def to_image(image: ImageUrl, field: str, media: RequestMedia) -> chat_pb2.MediaPart:
    """An image; where it is an address, a part that `gateway.media.supply` fills. Errors name `field`.url."""
    detail = image.detail or ""
    return media.image(image.url, f"{field}.url", detail="high" if detail == "original" else detail)


def to_audio(audio: InputAudio, field: str, media: RequestMedia) -> chat_pb2.MediaPart:
    """A recording. Errors name `field`.data."""
    return media.encoded_audio(audio.data, audio.format, f"{field}.data")

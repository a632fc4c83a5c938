"""Images and transcriptions as one result, from the frames of their streams. Pure."""

from collections.abc import Iterable

from weft.api.common.v1 import audio_pb2, image_pb2
from weft.dispatch.frames import Frame


def collected_images(frames: Iterable[Frame]) -> list[image_pb2.GeneratedImage]:
    """Returns the complete images, in the order of their numbers."""
    images = [event.image for frame in frames for event in frame if event.HasField("image")]
    return sorted(images, key=lambda image: image.index)


def collected_transcription(frames: Iterable[Frame]) -> audio_pb2.Transcription:
    """Returns the transcription of all pieces."""
    parts = [event.transcript for frame in frames for event in frame if event.HasField("transcript")]
    return audio_pb2.Transcription(
        text="".join(part.text for part in parts).strip(),
        language=next((part.language for part in parts if part.language), ""),
        duration_seconds=next((part.duration_seconds for part in parts if part.duration_seconds), 0.0),
        segments=[part.segment for part in parts if part.HasField("segment")],
    )

"""Images and recordings of tasks: their place in payloads and answers, and their content from the file store."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import TaskPayload
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason


def media_parts(payload: TaskPayload | None) -> list[tuple[str, chat_pb2.MediaPart]]:
    """Returns the images or the recording of a payload with their field names. Those of chats stay inline."""
    match payload:
        case image_pb2.ImagePayload():
            parts = [(f"images[{index}]", image) for index, image in enumerate(payload.images)]
            return [*parts, ("mask", payload.mask)] if payload.HasField("mask") else parts
        case audio_pb2.TranscriptionPayload():
            return [("audio", payload.audio)]
        case _:
            return []


class FileReader(Protocol):
    """Client of the file store, or the store itself."""

    def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content. Raises NOT_FOUND."""
        ...


async def content_of(files: FileReader, tenant: str, file_id: str, *, max_bytes: int) -> bytes:
    """Returns the content of a file. Raises NOT_FOUND, and REQUEST_TOO_LARGE above `max_bytes`."""
    content = bytearray()
    async with aclosing(files.read(tenant, file_id)) as pieces:
        async for piece in pieces:
            content += piece
            if len(content) > max_bytes:
                raise WeftError(Reason.REQUEST_TOO_LARGE, f"file {file_id} has more than {max_bytes} bytes")
    return bytes(content)


async def pieces_of(data: bytes, size: int) -> AsyncIterator[bytes]:
    """Yields the data in pieces of this size."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def fill_inputs(files: FileReader, tenant: str, payload: TaskPayload, *, max_bytes: int) -> None:
    """Replaces the file ids in a payload by the files' content.

    Raises NOT_FOUND for a deleted file, REQUEST_TOO_LARGE if all of them together exceed `max_bytes`.
    """
    left = max_bytes
    for field, part in media_parts(payload):
        if part.file_id:
            try:
                part.data = await content_of(files, tenant, part.file_id, max_bytes=left)
            except WeftError as error:
                raise FieldError(field, error.message, error.reason) from None
            part.ClearField("file_id")
        left -= len(part.data)


async def filled(
    files: FileReader, tenant: str, outputs: Iterable[task_pb2.TaskOutput], *, max_bytes: int
) -> Sequence[task_pb2.TaskOutput]:
    """Returns copies of stored outputs with the content of their files. Raises NOT_FOUND for expired ones."""
    whole: list[task_pb2.TaskOutput] = []
    for output in outputs:
        copy = task_pb2.TaskOutput()
        copy.CopyFrom(output)
        for event in copy.events:
            part = referring_part(event)
            if part is not None:
                part.data = await content_of(files, tenant, part.file_id, max_bytes=max_bytes)
                part.ClearField("file_id")
        whole.append(copy)
    return whole


def referring_part(event: event_pb2.InferenceEvent) -> chat_pb2.MediaPart | audio_pb2.SpeechPart | None:
    """Returns an event's image or recording that has a file id instead of data; None: there is none."""
    match event.WhichOneof("event"):
        case "image":
            part: chat_pb2.MediaPart | audio_pb2.SpeechPart = event.image.image
        case "speech":
            part = event.speech
        case _:
            return None
    return part if part.file_id else None

"""Frames of one answer on their way to the caller: each at once, or as few as the caller can do with."""

from collections.abc import Awaitable, Callable

from weft.api.common.v1 import event_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.dispatch.frames import Frame, has_content

MAX_HELD_EVENTS = 256
"""Of an answer that is sent whole: then they go, so that no message gets too large."""


class AnswerWriter:
    """Sends one answer's frames, `started` before the first one.

    Where nobody reads the answer before it is complete, pieces of it that follow the first content wait for its end:
    each message costs both ends some 60 us (measured). Whatever else happens is told at once, and them with it: the
    caller knows that the answer has begun, and hears of tools, warnings and progress, as if it were streamed.
    """

    def __init__(
        self,
        write: Callable[[generation_service_pb2.GenerateResponse], Awaitable[None]],
        started: event_pb2.InferenceEvent,
        *,
        whole: bool,
    ) -> None:
        self._write = write
        self._whole = whole
        self._held: Frame = [started]
        self._has_begun = False

    async def put(self, frame: Frame) -> None:
        """Send a frame, now or with one that follows."""
        held = self._held
        held += frame
        if self._whole and self._has_begun and len(held) < MAX_HELD_EVENTS and _only_deltas(frame):
            return
        self._held = []
        if self._whole and not self._has_begun:
            self._has_begun = has_content(held)
        await self._write(generation_service_pb2.GenerateResponse(events=held))


def _only_deltas(frame: Frame) -> bool:
    return all(event.HasField("delta") for event in frame)

"""Calls of a dispatcher to the runner of its own process: they mean what carried calls mean, and pass no transport."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from weft.api.common.v1 import link_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import start_task
from weft.link.frames import Metadata, error_of, new_status, status_of

Serve = Callable[[Any, Any], Awaitable[None]]
"""Serves one streamed method with a request and its context, as gRPC would call it."""
MAX_UNREAD_MESSAGES = 16
"""Messages of an answer that wait for their reader; then the servicer waits, as it does for a full transport."""
OK = new_status(0, "", ())


class EndedError(grpc.aio.AbortError):
    """A call was ended with a status by its servicer."""

    def __init__(self, status: link_pb2.CallEnd) -> None:
        super().__init__()
        self.status = status


class CallContext:
    """What every context of a call without a gRPC call of its own has of `grpc.aio.ServicerContext`."""

    __slots__ = ()

    def trailing_metadata(self) -> Metadata:
        """Metadata that would be sent with the status; none is set here."""
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        """End the call with a status; never returns."""
        raise EndedError(new_status(code.value[0], details, trailing_metadata))


class OwnCall(CallContext):
    """Both ends of one call: what its reader has of `CarriedCall`, and what its servicer has of a context.

    Messages are handed over as they are: neither end may change one that it has passed on.
    """

    __slots__ = ("_ends_at", "_messages", "_metadata", "_on_end", "_room", "_status", "_task", "_timer", "_unread")

    def __init__(self, metadata: Metadata, timeout_seconds: float | None) -> None:
        self._metadata = metadata
        self._messages = deque[Any]()
        self._unread: asyncio.Future[None] | None = None
        """The reader waits for a message or the end."""
        self._room: asyncio.Future[None] | None = None
        """The servicer waits for its reader."""
        self._status: link_pb2.CallEnd | None = None
        self._on_end: Callable[[Any], None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at: float | None = None
        if timeout_seconds is not None:
            self._ends_at = time.monotonic() + timeout_seconds
            self._timer = asyncio.get_running_loop().call_later(timeout_seconds, self._expire)

    def serve(self, serve: Serve, request: Any) -> asyncio.Task[None]:
        """Begin to serve the call; returns the task that serves it."""
        self._task = start_task(self._serve(serve, request), name="own-call")
        return self._task

    async def read(self) -> Any:
        """Returns the next message; `grpc.aio.EOF` after the last. Raises the WeftError that ended the call."""
        while not self._messages:
            if self._status is not None:
                if self._status.code != 0:
                    raise error_of(self._status)
                return grpc.aio.EOF
            self._unread = asyncio.get_running_loop().create_future()
            await self._unread
        _wake(self._room)
        return self._messages.popleft()

    def done(self) -> bool:
        """Whether the call has ended, read or not."""
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the call once it has ended otherwise than by `cancel`."""
        if self._status is None:
            self._on_end = callback
        else:
            asyncio.get_running_loop().call_soon(callback, self)

    def cancel(self) -> None:
        """Cancel the call unless it has ended; a reader gets CANCELLED."""
        self._on_end = None
        self.fail(WeftError(Reason.CANCELLED, "the call was cancelled"))

    def fail(self, error: WeftError) -> None:
        """End the call unless it has ended: its servicer is cancelled, and its reader gets the error."""
        if self._status is None:
            self._end(status_of(error))
            if self._task is not None:
                self._task.cancel()

    async def write(self, message: Message) -> None:
        """Hand over a message, and wait while the reader has too many to read."""
        self._messages.append(message)
        _wake(self._unread)
        while len(self._messages) >= MAX_UNREAD_MESSAGES:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def invocation_metadata(self) -> Metadata:
        """Metadata of the call."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds to the deadline of the call; None: it has none."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    async def _serve(self, serve: Serve, request: Any) -> None:
        status = OK
        try:
            await serve(request, self)
        except EndedError as end:
            status = end.status
        except asyncio.CancelledError:
            status = status_of(WeftError(Reason.CANCELLED, "the call was cancelled"))
            raise
        except BaseException:
            status = status_of(WeftError(Reason.INTERNAL, "an internal error; the service's log has the details"))
            raise
        finally:
            if self._status is None:
                self._end(status)

    def _end(self, status: link_pb2.CallEnd) -> None:
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        _wake(self._unread)
        if self._on_end is not None:
            self._on_end(self)

    def _expire(self) -> None:
        self.fail(WeftError(Reason.DEADLINE_EXCEEDED, "the deadline of the call passed"))


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)

"""A link on asyncio: calls multiplexed over a stream, for the runner's side and the relay's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from typing_extensions import override

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.channels.rpc import MAX_METADATA_BYTES, PING_TIMEOUT_MS, calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.link.flow_control import Call
from weft.link.frames import GAVE_UP, MAX_FRAMES_AT_ONCE, LinkProtocolError, Metadata, Side, error_of, status_of
from weft.link.multiplexer import CallBegan, CallEnded, CallReadable, Event, LinkLimits, Multiplexer, UnreadShare

log = get_logger("weft.link")

MAX_BATCH_BYTES = 128 * 1024
"""Bytes passed to the transport at a time. Small, so that a newly ready call waits briefly."""
SENT_CHECK_SECONDS = 0.01
MAX_UNSENT_BYTES_PER_CALL = 64 * 1024
"""Senders wait while a call has more unsent bytes."""


def link_lost() -> WeftError:
    """Returns the error of calls whose link was lost."""
    return WeftError(Reason.WORKER_LOST, "the link to the runner was lost")


class _Stream(Protocol):
    """A stream of messages with `frames`: a gRPC call on the side that opened it, a context on the other."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...


class LinkCall(Call):
    """One call on a link. At most one task may read it and one write it."""

    __slots__ = ("_mux", "_readable", "_writable")

    def __init__(self, link: "Link", *state: Any, is_own: bool) -> None:
        """`state`: as for `Call`."""
        super().__init__(*state, is_own=is_own)
        self._mux = link.mux
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        """Returns the next message; None when no more will arrive."""
        while True:
            message = self._mux.read(self)
            if message is not None or self.peer_is_done:
                return message
            self._readable = asyncio.get_running_loop().create_future()
            await self._readable

    async def send(self, message: bytes) -> None:
        """Sends a message, waiting while the peer has no room. Does nothing if the call has ended.

        Raises REQUEST_TOO_LARGE or NO_SLOT_AVAILABLE, see Multiplexer.send.
        """
        self._mux.send(self, message)
        while self.status is None and self.unsent.unsent_bytes > MAX_UNSENT_BYTES_PER_CALL:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def end(self, status: pb.CallEnd) -> None:
        """Ends a call of the peer."""
        self._mux.end(self, status)

    def fail(self, error: WeftError) -> None:
        """Cancels an own call because of a local error, which becomes its status."""
        self._mux.cancel(self, status_of(error))
        self.close()
        self.wake()

    def close(self) -> None:
        """Cancels an own call unless it has ended, and drops its unread messages. Idempotent."""
        if self.status is None:
            self._mux.cancel(self, GAVE_UP)
            self.wake()
        self._mux.release(self)

    @override
    def wake(self) -> None:
        """Wakes `read` and `send`."""
        waiter, self._readable = self._readable, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._writable is not None:
            self.note_sent()

    @override
    def note_sent(self) -> None:
        """Wakes `send`."""
        waiter, self._writable = self._writable, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


Answer = Callable[[LinkCall], Awaitable[pb.CallEnd]]
"""Answers a call of the peer and returns its status. Cancelled when the caller cancels the call."""


class Link:
    """One link. Calls may be made while `run` runs."""

    def __init__(
        self,
        side: Side,
        limits: LinkLimits,
        answer: Answer,
        share: UnreadShare | None = None,
        loss: Callable[[BaseException | None], WeftError] = lambda _: link_lost(),
    ) -> None:
        """`loss` returns the error of the calls that end with the stream, from the error that broke it."""
        self._idle: asyncio.Future[None] | None = None
        """What the writer waits for while there is nothing to send."""
        self.mux = Multiplexer(side, limits, self._note_work, share, partial(LinkCall, self))
        self._answer = answer
        self._answers: dict[Call, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._stop_error: WeftError | None = None
        self._loss = loss
        self.lost_status: pb.CallEnd | None = None
        """The status of the calls that ended with the link; None: it stands."""

    @property
    def is_lost(self) -> bool:
        """Whether the link has ended."""
        return self.lost_status is not None

    async def run(self, stream: _Stream, kind: Callable[..., Message]) -> None:
        """Carries calls until the stream ends or `stop` is called, then ends all calls.

        `kind` is the class of sent messages. Raises the error that broke the stream, such as LinkProtocolError, or the
        error passed to `stop`.
        """
        reading = asyncio.create_task(self._read_all(stream))
        writing = asyncio.create_task(self._write_all(stream, kind))
        stopping = asyncio.create_task(self._until_stopped())
        tasks = [reading, writing, stopping]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except WeftError as error:
            self.lose(error)
            raise
        finally:
            self.lose()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await stop_tasks(list(self._answers.values()))

    def stop(self, error: WeftError) -> None:
        """Ends the link; `run` raises `error`."""
        self._stop_error = self._stop_error or error
        self._stop.set()

    def call(self, method: str, metadata: Metadata = (), timeout_seconds: float | None = None) -> LinkCall:
        """Begins a call. Raises WORKER_LOST if the link has ended, NO_SLOT_AVAILABLE if it is full."""
        if self.lost_status is not None:
            raise error_of(self.lost_status)
        call = self.mux.begin(method, metadata, timeout_seconds)
        assert isinstance(call, LinkCall)
        return call

    def _note_work(self) -> None:
        if self._idle is not None:
            if not self._idle.done():
                self._idle.set_result(None)
            self._idle = None

    async def until_sent(self) -> None:
        """Waits until nothing is left to send."""
        while self._idle is None and not self.is_lost:  # noqa: ASYNC110 - once, when a process stops
            await asyncio.sleep(SENT_CHECK_SECONDS)

    async def _read_all(self, stream: _Stream) -> None:
        with _on_stream():
            while (message := await stream.read()) is not grpc.aio.EOF:
                if len(message.frames) > MAX_FRAMES_AT_ONCE:
                    raise LinkProtocolError(f"{len(message.frames)} frames in one message")
                for frame in message.frames:
                    if (event := self.mux.receive(frame)) is not None:
                        self._handle(event)

    async def _write_all(self, stream: _Stream, kind: Callable[..., Message]) -> None:
        with _on_stream():
            while True:
                frames, calls = self.mux.take_frames(MAX_BATCH_BYTES)
                if not frames:
                    self._idle = asyncio.get_running_loop().create_future()
                    await self._idle
                    continue
                await stream.write(kind(frames=frames))
                for call in calls:
                    call.note_sent()

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        if self._stop_error is not None:
            raise self._stop_error

    def _handle(self, event: Event) -> None:
        match event:
            case CallReadable(call):
                call.wake()
            case CallBegan(LinkCall() as call):
                loop = asyncio.get_running_loop()
                task = self._answers[call] = loop.create_task(self._answer_call(call), name="link-answer")
                # Not in `_answer_call`, which does not run if its task is cancelled before the first step.
                task.add_done_callback(lambda _: self._answers.pop(call, None))
            case CallEnded(call):
                self.mux.release(call)
                if (answer := self._answers.get(call)) is not None:
                    answer.cancel()

    async def _answer_call(self, call: LinkCall) -> None:
        try:
            call.end(await self._answer(call))
        except WeftError as error:
            call.end(status_of(error))
        except Exception:
            log.exception("answering a call on a link failed unexpectedly", method=call.start.method)
            call.end(status_of(WeftError(Reason.INTERNAL, "an internal error; the log has the details")))
        finally:
            self.mux.release(call)

    def lose(self, error: BaseException | None = None) -> None:
        """Ends all calls, because the stream is lost; `error` broke it. Idempotent."""
        if self.lost_status is not None:
            return
        self.lost_status = status_of(self._loss(error))
        for call in self.mux.lose(self.lost_status):
            call.wake()
            if (task := self._answers.get(call)) is not None:
                task.cancel()


LINK_KEEPALIVE_MS = 10_000
"""A lost connection is detected within this time plus the ping timeout."""
ACCEPTED_KEY = "weft-relay"
"""Initial metadata that confirms that a link was accepted."""
CLOCK_KEY = "weft-time"
"""Initial metadata with the relay's clock in milliseconds since the epoch, for runners with a wrong clock."""
MACHINE_KEY = "weft-machine"
"""Metadata in which a joining machine presents its credential."""
MAX_LINK_MESSAGE_BYTES = 1024 * 1024
"""A larger message violates the protocol; eight times MAX_BATCH_BYTES."""

_LINK_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_LINK_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_LINK_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", LINK_KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
LINK_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LINK_OPTIONS,
    # Each attempt uses a new channel with our backoff; gRPC's would be added to it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
LINK_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LINK_OPTIONS,
    # Both ends must agree, or the server ends the connection with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", LINK_KEEPALIVE_MS // 3),
    ("grpc.http2.max_ping_strikes", 4),
    ("grpc.so_reuseport", 0),
)


@contextmanager
def _on_stream() -> Iterator[None]:
    """Wraps operations on a stream: raises WeftError if it broke."""
    try:
        with calling(Reason.SERVICE_UNAVAILABLE):
            yield
    except asyncio.InvalidStateError as error:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the stream of the link has ended") from error

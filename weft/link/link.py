"""The link on asyncio: calls to await, over any transport that carries frames in order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import stop_tasks
from weft.link.codec import status_of
from weft.link.frames import CallStatus, Frame, Metadata, Side
from weft.link.multiplexer import Call, CallBegan, CallOver, CallReadable, Event, LinkLimits, Multiplexer

log = structlog.get_logger("weft.link")

MAX_BATCH_BYTES = 128 * 1024
"""How much is handed to the transport at once. Small, so that a call that has just become ready waits little."""
MAX_UNSENT_BYTES_PER_CALL = 64 * 1024
"""A sender with more than this waiting is made to wait."""


def link_lost() -> WeftError:
    """What ends the calls of a link that is gone."""
    return WeftError(Reason.WORKER_LOST, "the link to the runner was lost")


class Transport(Protocol):
    """Carries frames both ways, in order."""

    async def read(self) -> Sequence[Frame] | None:
        """The next frames; None at the end. Raises WeftError when the stream broke."""
        ...

    async def write(self, frames: Sequence[Frame]) -> None:
        """Send frames, waiting while the peer takes none. Raises WeftError when the stream broke."""
        ...


class LinkCall:
    """One call on a link. Its reader and its writer may be two tasks, and not more."""

    def __init__(self, link: "Link", call: Call) -> None:
        self._link = link
        self._call = call
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()

    @property
    def method(self) -> str:
        """Full name of the method."""
        return self._call.method

    @property
    def metadata(self) -> Metadata:
        """What the caller sent along."""
        return self._call.metadata

    @property
    def timeout_seconds(self) -> float | None:
        """Time to the deadline when the call began."""
        return self._call.timeout_seconds

    @property
    def status(self) -> CallStatus | None:
        """How it ended, once `read` has returned None on an own call."""
        return self._call.status

    async def read(self) -> bytes | None:
        """The next message; None when no more will come."""
        while True:
            message = self._link.read(self._call)
            if message is not None or self._call.peer_is_done:
                return message
            self._readable.clear()
            await self._readable.wait()

    async def send(self, message: bytes) -> None:
        """Send a message, waiting while the peer has no room. A call that is over takes it and drops it.

        Raises REQUEST_TOO_LARGE or NO_SLOT_AVAILABLE, see Multiplexer.send.
        """
        self._link.send(self._call, message)
        while self._call.status is None and self._call.send.unsent_bytes > MAX_UNSENT_BYTES_PER_CALL:
            self._writable.clear()
            await self._writable.wait()

    def half_close(self) -> None:
        """Send no more messages on an own call."""
        self._link.half_close(self._call)

    def end(self, status: CallStatus) -> None:
        """End a call of the peer."""
        self._link.end(self._call, status)

    def fail(self, error: WeftError) -> None:
        """Give an own call up because of an error of ours; whoever reads it finds that as its status."""
        self._link.fail(self._call, error)
        self.note_readable()

    def close(self) -> None:
        """Leave an own call: it is cancelled unless it is over. Idempotent."""
        self._link.leave(self._call)

    def note_readable(self) -> None:
        """For the link: `read` has something."""
        self._readable.set()

    def note_writable(self) -> None:
        """For the link: `send` may look again."""
        self._writable.set()


Answer = Callable[[LinkCall], Awaitable[CallStatus]]
"""Answers a call of the peer and says how it ended. Cancelled when the caller gives up."""


class Link:
    """One link. Life cycle: `run` until it ends; calls may be made while it runs."""

    def __init__(self, side: Side, limits: LinkLimits, answer: Answer) -> None:
        self._mux = Multiplexer(side, limits)
        self._answer = answer
        self._calls: dict[Call, LinkCall] = {}
        self._answers: dict[Call, asyncio.Task[None]] = {}
        self._work = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_error: WeftError | None = None
        self._is_lost = False

    async def run(self, transport: Transport) -> None:
        """Carry calls until the stream ends or `stop` is called; then every call ends.

        Raises what broke the stream, LinkProtocolError among it, or the error given to `stop`.
        """
        reading = asyncio.create_task(self._read_all(transport))
        writing = asyncio.create_task(self._write_all(transport))
        stopping = asyncio.create_task(self._until_stopped())
        tasks = [reading, writing, stopping]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._lose()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await stop_tasks(list(self._answers.values()))

    def stop(self, error: WeftError) -> None:
        """End the link; `run` raises `error`."""
        self._stop_error = self._stop_error or error
        self._stop.set()

    def call(self, method: str, metadata: Metadata = (), timeout_seconds: float | None = None) -> LinkCall:
        """Begin a call. Raises WORKER_LOST when the link has ended, NO_SLOT_AVAILABLE when it is full."""
        if self._is_lost:
            raise link_lost()
        return self._added(self._mux.begin(method, metadata, timeout_seconds))

    def read(self, call: Call) -> bytes | None:
        """For LinkCall."""
        message = self._mux.read(call)
        self._kick()
        return message

    def send(self, call: Call, message: bytes) -> None:
        """For LinkCall."""
        self._mux.send(call, message)
        self._kick()

    def half_close(self, call: Call) -> None:
        """For LinkCall."""
        self._mux.half_close(call)
        self._kick()

    def end(self, call: Call, status: CallStatus) -> None:
        """For LinkCall."""
        self._mux.end(call, status)
        self._kick()

    def fail(self, call: Call, error: WeftError) -> None:
        """For LinkCall."""
        self._mux.cancel(call, status_of(error))
        self._mux.release(call)
        self._kick()

    def leave(self, call: Call) -> None:
        """For LinkCall."""
        if not self._is_lost:
            self._mux.cancel(call, status_of(WeftError(Reason.CANCELLED, "the caller gave up")))
        self._mux.release(call)
        self._calls.pop(call, None)
        self._kick()

    async def _read_all(self, transport: Transport) -> None:
        while (frames := await transport.read()) is not None:
            for frame in frames:
                for event in self._mux.receive(frame):
                    self._handle(event)
            self._kick()

    async def _write_all(self, transport: Transport) -> None:
        while True:
            frames, calls = self._mux.take_frames(MAX_BATCH_BYTES)
            if not frames:
                self._work.clear()
                await self._work.wait()
                continue
            await transport.write(frames)
            for call in calls:
                if (known := self._calls.get(call)) is not None:
                    known.note_writable()

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        if self._stop_error is not None:
            raise self._stop_error

    def _handle(self, event: Event) -> None:
        match event:
            case CallReadable(call):
                if (known := self._calls.get(call)) is not None:
                    known.note_readable()
                    known.note_writable()
            case CallBegan(call):
                task = self._answers[call] = asyncio.create_task(self._answer_call(call), name="link-answer")
                # Not at its own end: a task that is cancelled before its first step never comes there.
                task.add_done_callback(lambda _: self._answers.pop(call, None))
            case CallOver(call):
                self._mux.release(call)
                if (answer := self._answers.get(call)) is not None:
                    answer.cancel()

    async def _answer_call(self, call: Call) -> None:
        link_call = self._added(call)
        try:
            link_call.end(await self._answer(link_call))
        except WeftError as error:
            link_call.end(status_of(error))
        except Exception:
            log.exception("answering a call on a link failed unexpectedly", method=link_call.method)
            link_call.end(status_of(WeftError(Reason.INTERNAL, "an internal error; the log has the details")))
        finally:
            self._mux.release(call)
            self._calls.pop(call, None)

    def _added(self, call: Call) -> LinkCall:
        link_call = self._calls[call] = LinkCall(self, call)
        return link_call

    def _kick(self) -> None:
        if self._mux.has_frames:
            self._work.set()

    def _lose(self) -> None:
        self._is_lost = True
        for call in self._mux.lose(status_of(link_lost())):
            if (known := self._calls.get(call)) is not None:
                known.note_readable()
                known.note_writable()
            if (task := self._answers.get(call)) is not None:
                task.cancel()

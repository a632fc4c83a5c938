"""The runner's end of the channel to a host program.

The channel is a Unix socket in a folder that only this user may enter, which is removed once the program has connected.
The program authenticates with a random token.
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from types import MappingProxyType

import msgspec

from runner_svc.engine_host.messages import (
    LENGTH_BYTES,
    LIBRARY_MISSING,
    LOAD_ID,
    Answer,
    Cancel,
    Done,
    Failed,
    Hello,
    LoadProgress,
    Ping,
    Pong,
    Ready,
    ToEngine,
    TooLongError,
    ToRunner,
    Work,
    Worked,
    body_length,
    encode,
)
from runner_svc.supervise.socket_folder import SocketFolder
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.runner")

MAX_UNREAD_ANSWERS = 4096
"""Maximum number of unread answers of a request; beyond it an engine with one slot waits, and the progress of another
one is left out."""
HELLO_SECONDS = 5.0
"""Timeout of the first message of a connection."""
_NAMED_FIELD = re.compile(r"([a-z_][a-z0-9_.\[\]]{0,63}): (.+)", re.DOTALL)
"""An error about a field of the request, whose name begins the message."""
_REASONS = MappingProxyType(
    {
        reason.name: reason
        for reason in (
            Reason.BACKEND_ERROR,
            Reason.BACKEND_NOT_READY,
            Reason.INVALID_ARGUMENT,
            Reason.OUT_OF_MEMORY,
            Reason.UNSUPPORTED_OPERATION,
        )
    }
)


class ChannelClosedError(Exception):
    """The channel is closed; the process's supervisor knows why."""


class UnreadAnswers:
    """The answers to one request that its caller has not read yet, at most MAX_UNREAD_ANSWERS."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    async def put(self, answer: Answer) -> None:
        """Add an answer once there is room for it. The engine's further messages are not read meanwhile."""
        while len(self._answers) >= MAX_UNREAD_ANSWERS and not self._closed:
            self._room.clear()
            await self._room.wait()
        self.put_now(answer)

    def put_now(self, answer: Answer) -> None:
        """Add an answer without waiting; progress is left out beyond the maximum."""
        if self._closed or (isinstance(answer, Worked) and len(self._answers) >= MAX_UNREAD_ANSWERS):
            return
        self._answers.append(answer)
        self._changed.set()

    async def take(self) -> list[Answer]:
        """Returns all answers once there are some. Raises ChannelClosedError when there will be none."""
        while not self._answers:
            if self._closed:
                raise ChannelClosedError
            self._changed.clear()
            await self._changed.wait()
        taken, self._answers = self._answers, []
        self._room.set()
        return taken

    def close(self) -> None:
        """Accept no further answers: the request or the channel has ended. Idempotent."""
        self._closed = True
        self._room.set()
        self._changed.set()


class EngineChannel:
    """The channel to one program, opened before the program starts."""

    def __init__(self, missing_library: str = "the engine's library cannot be loaded") -> None:
        """Raises CONNECT_FAILED when no folder for the socket can be made.

        `missing_library`: the error for a library that cannot be imported, with its remedy.
        """
        self._missing_library = missing_library
        self.token = secrets.token_urlsafe(24)
        """The token by which the program authenticates."""
        try:
            self._folder = SocketFolder("weft-engine-")
        except OSError as error:
            raise _no_socket(error) from error
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, UnreadAnswers] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._last_id = LOAD_ID
        self._mixes_requests = False
        """Whether the engine works on several requests at once: a slow reader of one must not hold up the others."""
        self._decoder = msgspec.json.Decoder(ToRunner)
        self.load_share: float | None = None
        """How much of the model is loaded, 0 to 1; None: it has not said."""

    @property
    def path(self) -> Path:
        """The socket."""
        return self._folder.path / "engine.sock"

    async def open(self) -> None:
        """Start listening. Raises CONNECT_FAILED."""
        try:
            self._server = await asyncio.start_unix_server(self._authenticate, self.path)
        except OSError as error:
            raise _no_socket(error) from error

    async def ready(self) -> Ready:
        """Return once the model is loaded. Raises the program's error, or ChannelClosedError when it ends first."""
        return await self._ready

    async def close(self) -> None:
        """Close the channel; waiting requests fail. Idempotent."""
        await self._stop_listening()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        self._fail_all()

    async def ping(self, timeout_seconds: float) -> bool:
        """Whether the program answers. Never raises."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_id += 1
        number = self._last_id
        self._pings[number] = answered
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._send(Ping(number))
                await answered
        except (TimeoutError, ChannelClosedError):
            return False
        finally:
            del self._pings[number]
        return True

    def next_id(self) -> int:
        """Returns an id for a request. Requests must be sent in the order of their ids."""
        self._last_id += 1
        return self._last_id

    async def answers_to(self, request: Work) -> AsyncGenerator[list[Answer]]:
        """Send a request; yields its answers in the groups in which they arrive, up to Done. Closing early cancels it.

        Raises the program's error, or ChannelClosedError.
        """
        unread = self._answers[request.id] = UnreadAnswers()
        ended = False
        try:
            try:
                await self._send(request)
            except TooLongError:
                ended = True
                raise WeftError(Reason.INVALID_ARGUMENT, "the request is too long for this engine") from None
            while not ended:
                try:
                    answers = await unread.take()
                except ChannelClosedError:
                    ended = True
                    raise
                failed = next((answer for answer in answers if isinstance(answer, Failed)), None)
                ended = failed is not None or isinstance(answers[-1], Done)
                if failed is not None:
                    raise self._failure(failed)
                yield answers
        finally:
            del self._answers[request.id]
            unread.close()
            if not ended:
                self._cancel(request.id)

    def _cancel(self, number: int) -> None:
        writer = self._writer
        if writer is not None and not writer.is_closing():
            writer.write(encode(Cancel(number)))

    async def _send(self, message: ToEngine) -> None:
        writer = self._writer
        if writer is None or writer.is_closing():
            raise ChannelClosedError
        writer.write(encode(message))
        try:
            await writer.drain()
        except OSError:
            raise ChannelClosedError from None

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept the connection if it is the program's, else close it and keep listening."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await self._receive(reader)
        except (TimeoutError, OSError, EOFError, TooLongError, msgspec.DecodeError):
            first = None
        genuine = isinstance(first, Hello) and hmac.compare_digest(first.token.encode(), self.token.encode())
        if not genuine or self._writer is not None or self._server is None:
            writer.close()
            return
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader), name="read-engine")
        await self._stop_listening()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                await self._handle(await self._receive(reader))
        except (OSError, EOFError, TooLongError, msgspec.DecodeError):
            self._fail_all()
        except Exception:
            # Without this, waiting requests would never end.
            log.exception("the answers of an engine could not be read")
            self._fail_all()

    async def _receive(self, reader: asyncio.StreamReader) -> ToRunner:
        length = body_length(await reader.readexactly(LENGTH_BYTES))
        message: ToRunner = self._decoder.decode(await reader.readexactly(length))
        return message

    async def _handle(self, message: ToRunner) -> None:
        match message:
            case Pong(id=number):
                if (ping := self._pings.get(number)) is not None and not ping.done():
                    ping.set_result(None)
            case LoadProgress(share=share):
                self.load_share = min(max(share, 0.0), 1.0)
            case Ready():
                self._mixes_requests = message.slots > 1
                if not self._ready.done():
                    self._ready.set_result(message)
            case Failed(id=number) if number == LOAD_ID:
                if not self._ready.done():
                    self._ready.set_exception(self._failure(message))
            case Hello():
                pass
            case answer:
                await self._deliver(answer)

    async def _deliver(self, answer: Answer) -> None:
        unread = self._answers.get(answer.id)
        if unread is not None and self._mixes_requests:
            unread.put_now(answer)
        elif unread is not None:
            await unread.put(answer)

    def _fail_all(self) -> None:
        """Fail every waiting request and ping."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for unread in self._answers.values():
            unread.close()
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(ChannelClosedError())
        if not self._ready.done():
            self._ready.set_exception(ChannelClosedError())
        if not self._ready.cancelled():
            self._ready.exception()  # retrieved, so that asyncio does not log it

    def _failure(self, failed: Failed) -> WeftError:
        if failed.reason == LIBRARY_MISSING:
            return WeftError(Reason.CONNECT_FAILED, f"{self._missing_library}. {failed.message}")
        reason = _REASONS.get(failed.reason, Reason.BACKEND_ERROR)
        named = _NAMED_FIELD.fullmatch(failed.message) if reason is Reason.INVALID_ARGUMENT else None
        return WeftError(reason, failed.message) if named is None else invalid_field(named[1], named[2])

    async def _stop_listening(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._folder.remove()


def _no_socket(error: OSError) -> WeftError:
    return WeftError(Reason.CONNECT_FAILED, f"no socket for the engine could be made: {error.strerror or error}")

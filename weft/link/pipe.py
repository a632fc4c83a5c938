"""The pipe of a link: a Unix socket beside its gRPC stream, which carries the frames in place of the stream.

A message on a gRPC stream wakes a thread and the event loop at each end, to be written and to be read. The stream still
authenticates the caller, detects a frozen peer and ends the link; without a pipe it carries the frames as well.

The end that was called listens at a random name and sends it, with a secret, in the initial metadata of the stream. The
name is in Linux's abstract namespace: a pipe needs Linux, no file, and one network namespace for both ends.
"""

import asyncio
import hmac
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from google.protobuf.message import DecodeError

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.service import start_task
from weft.link.frames import LinkProtocolError, Metadata
from weft.link.link import MAX_BATCH_BYTES, MAX_LINK_MESSAGE_BYTES, Link, link_lost

NAME_KEY = "weft-pipe-name"
"""Initial metadata: the name of the socket in Linux's abstract namespace, without its leading zero byte."""
SECRET_KEY = "weft-pipe-secret"  # noqa: S105 - a key of metadata
"""Initial metadata: what the caller sends first."""
OFFER_SECONDS = 5.0
"""How long a pipe is offered; a caller that has not connected by then uses the stream."""
END_SECONDS = 1.0
"""How long the end of a link waits for the other end of its pipe, which in order closes it at once."""
MAX_GUESTS = 4
"""Connections to one offer that have not sent the secret yet: every program on the machine can read the name."""
_SECRET_BYTES = 32
_LENGTH_BYTES = 4

log = get_logger("weft.link")


class FramePipe(asyncio.Protocol):
    """One end of a pipe: frames, each behind its length in four bytes."""

    def __init__(
        self, link: Link, awaited: bytes = b"", on_secret: "Callable[[FramePipe], None]" = lambda _: None
    ) -> None:
        """`awaited`: the secret that must come first; then `on_secret` is called."""
        self._link = link
        self._awaited = awaited
        self._on_secret = on_secret
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._is_due = False
        """Whether `_flush` will run in this turn of the event loop."""
        self._is_ending = False
        """Whether nothing more is sent, and what comes is dropped."""
        self._is_closed = False
        """Whether `close` was called, which may be before there is a transport."""
        self._ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        if self._is_closed:
            transport.close()
            return
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports inherit from none of asyncio's
        if not self._awaited:
            self._link.attach(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it makes no difference
        """See asyncio.Protocol."""
        self._transport = None
        self._ended.set()
        if not self._awaited:
            self._link.stop(link_lost())

    def pause_writing(self) -> None:
        """See asyncio.Protocol. The calls of the link wait meanwhile."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_paused = False
        self.wake()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_ending:
            return
        data = self._rest + data if self._rest else data
        if self._awaited:
            if len(data) < _SECRET_BYTES:
                self._rest = data
                return
            if not hmac.compare_digest(data[:_SECRET_BYTES], self._awaited):
                self.close()
                return
            self._awaited, data = b"", data[_SECRET_BYTES:]
            self._link.attach(self)
            self._on_secret(self)
        try:
            self._rest = self._take(data)
        except WeftError as error:
            self._link.stop(error)
            self.close()

    def send_first(self, secret: bytes) -> None:
        """Send the secret by which the other end knows its caller."""
        assert self._transport is not None, "it is connected"
        self._transport.write(secret)

    def wake(self) -> None:
        """Send what the link has to send, all that becomes ready in this turn of the event loop together."""
        if not self._is_due and not self._is_paused:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def end(self, *, reads_on: bool) -> None:
        """End the pipe of a link that ends: read what the peer sent before it ended the stream, or send what is ready.

        The stream may be faster than the pipe, and a peer that writes to a closed socket reads no more of it: without
        this the last frames of calls would be lost.
        """
        if not reads_on:
            self._flush()
            self._is_ending = True
            if self._transport is None or self._transport.is_closing():
                return
            self._transport.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._ended.wait()

    def close(self) -> None:
        """Close the pipe once everything is sent. Idempotent."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    def _take(self, data: bytes) -> bytes:
        """Process the complete frames of `data`; returns the rest. Raises LinkProtocolError."""
        at, size = 0, len(data)
        while size - at >= _LENGTH_BYTES:
            begin = at + _LENGTH_BYTES
            length = int.from_bytes(data[at:begin], "big")
            if length > MAX_LINK_MESSAGE_BYTES:
                raise LinkProtocolError(f"a frame of {length} bytes")
            if begin + length > size:
                break
            at = begin + length
            try:
                frame = pb.LinkFrame.FromString(data[begin:at])
            except DecodeError:
                raise LinkProtocolError("a frame that cannot be read") from None
            self._link.take(frame)
        return data[at:]

    def _flush(self) -> None:
        self._is_due = False
        while not (self._is_paused or self._is_ending) and self._transport is not None:
            frames, sent = self._link.next_frames(MAX_BATCH_BYTES)
            if not frames:
                return
            whole = bytearray()
            for frame in frames:
                data = frame.SerializeToString()
                whole += len(data).to_bytes(_LENGTH_BYTES, "big")
                whole += data
            self._transport.write(whole)
            self._link.note_sent(sent)


class PipeOffer:
    """The offer of a pipe to the caller of one link, until it is taken or OFFER_SECONDS have passed.

    Life cycle: start, stop.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._accepting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._guests: list[FramePipe] = []
        """Connections without the secret, as far as is known."""
        self._pipe: FramePipe | None = None

    def start(self) -> Metadata:
        """Listen; returns the metadata that the caller needs, none where this system has no such sockets."""
        if sys.platform != "linux":
            return ()
        name = f"weft-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(f"\0{name}")
            listener.listen(MAX_GUESTS)
        except OSError as error:
            listener.close()
            log.debug("no pipe is offered", error=str(error))
            return ()
        self._accepting = start_task(self._accept(listener), name="link-pipe")
        # Not in `_accept`: a task that is cancelled before its first step never runs it.
        self._accepting.add_done_callback(lambda _: listener.close())
        self._timer = asyncio.get_running_loop().call_later(OFFER_SECONDS, self._withdraw)
        return (NAME_KEY, name), (SECRET_KEY, self._secret.hex())

    def stop(self) -> None:
        """End the offer, and the pipe. Idempotent."""
        self._withdraw()
        if self._pipe is not None:
            self._pipe.close()

    async def _accept(self, listener: socket.socket) -> None:
        # Not `create_unix_server`: asyncio's fails on a connection that arrives while it is closed.
        loop = asyncio.get_running_loop()
        for _ in range(MAX_GUESTS):
            accepted, _ = await loop.sock_accept(listener)
            # A task of its own: the secret may be read before it is done, and its cancellation would close the pipe.
            start_task(self._connect(accepted), name="link-pipe-guest")

    async def _connect(self, accepted: socket.socket) -> None:
        if self._accepting is None:
            accepted.close()
            return
        guest = FramePipe(self._link, self._secret, self._take)
        self._guests.append(guest)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: guest, accepted)

    def _take(self, pipe: FramePipe) -> None:
        self._pipe = pipe
        self._guests.remove(pipe)
        self._withdraw()

    def _withdraw(self) -> None:
        """End the offer: no connection becomes the pipe any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        while self._guests:
            self._guests.pop().close()


async def connect_pipe(link: Link, offered: Mapping[str, str | bytes]) -> FramePipe | None:
    """Returns the pipe that the initial metadata of a link's stream offers; None: none is offered, or in reach."""
    name, secret = offered.get(NAME_KEY), offered.get(SECRET_KEY)
    if not isinstance(name, str) or not isinstance(secret, str) or sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        token = bytes.fromhex(secret)
        sock.connect(f"\0{name}")
        _, pipe = await asyncio.get_running_loop().create_unix_connection(partial(FramePipe, link), sock=sock)
    except (OSError, ValueError) as error:
        sock.close()
        log.debug("the pipe of a link is out of reach", error=str(error))
        return None
    pipe.send_first(token)
    return pipe

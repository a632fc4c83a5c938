"""One connection of HTTP/2 as gRPC uses it, the server's end: bytes to messages of calls, and the way back. Pure.

Flow control: what arrives is acknowledged at once; who reads the calls bounds what is left unread. What is sent waits
for the peer's windows.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from weft.kernel.rpc_server.hpack import HeaderDecoder, Headers, HpackError, literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16_384
"""Of one frame: the protocol's default, which this end does not change."""
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
STREAM_WINDOW_BYTES = 1024 * 1024
MAX_BLOCK_FRAMES_BYTES = 64 * 1024
"""Of the headers of one call, compressed."""
MAX_PAUSED_BYTES = 1024 * 1024
"""What a call may have written that the peer does not take, before its writes wait."""
_DEFAULT_WINDOW = 65_535
_MAX_WINDOW = (1 << 31) - 1
_HEAD = 9
_PREFIX = 5

_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _HAS_PRIORITY = 0x4, 0x8, 0x20
_SET_STREAMS, _SET_WINDOW, _SET_FRAME, _SET_HEADERS = 3, 4, 5, 6
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_ERROR, _SIZE_ERROR = 0x0, 0x1, 0x3, 0x6
_REFUSED, _CANCEL, _COMPRESSION_ERROR, _CALM = 0x7, 0x8, 0x9, 0xB

RESPONSE = b"\x88" + literal(b"content-type", b"application/grpc")
"""Headers of every answer: status 200."""


class BrokenConnectionError(Exception):
    """The peer breaks the protocol, or a limit; the connection ends once `Connection.take_output` is sent."""


class Calls(Protocol):
    """What hears of the calls of a connection."""

    def opened(self, stream: int, headers: Headers) -> None:
        """A call has begun."""
        ...

    def message(self, stream: int, payload: bytes) -> None:
        """A message of a call is complete."""
        ...

    def half_closed(self, stream: int) -> None:
        """The caller sends no more."""
        ...

    def reset(self, stream: int) -> None:
        """The caller has left."""
        ...

    def resumed(self, stream: int) -> None:
        """What a call has written is on its way."""
        ...


@dataclass(slots=True)
class _Stream:
    window: int
    """Bytes that may be sent."""
    received: bytearray = field(default_factory=bytearray)
    """The beginning of a message."""
    unacknowledged: int = 0
    waiting: bytearray = field(default_factory=bytearray)
    """Bytes that wait for a window."""
    trailers: bytes | None = None
    """What ends the stream after them; None: it goes on."""
    is_paused: bool = False
    has_headers: bool = False
    is_half_closed: bool = False


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


class Connection:
    """The state of one connection."""

    def __init__(self, calls: Calls, *, max_streams: int, max_message_bytes: int, max_header_bytes: int) -> None:
        """`max_streams`: calls at once; one more is refused. The other limits end the connection, or its call."""
        self._calls = calls
        self._max_streams = max_streams
        self._max_message_bytes = max_message_bytes
        self._decoder = HeaderDecoder(max_header_bytes)
        self._streams: dict[int, _Stream] = {}
        self._buffer = b""
        self._has_begun = False
        self._last = 0
        self._block: tuple[int, int, bytearray] | None = None
        """Stream, flags and bytes of headers that go on in the next frame."""
        self._unacknowledged = 0
        self._window = self._peer_window = _DEFAULT_WINDOW
        self._peer_frame = MAX_FRAME_BYTES
        self._blocked: dict[int, None] = {}
        """Streams with bytes that wait for a window, in order."""
        self._is_leaving = False
        self._takers: Mapping[int, Callable[[int, int, bytes], None]] = {
            _DATA: self._take_data,
            _HEADERS: self._take_headers,
            _RST: self._take_reset,
            _SETTINGS: self._take_settings,
            _PUSH: self._take_push,
            _PING: self._take_ping,
            _WINDOW: self._take_window,
            _CONTINUATION: self._take_block,
        }
        settings = b"".join(
            name.to_bytes(2) + value.to_bytes(4)
            for name, value in (
                (_SET_STREAMS, max_streams),
                (_SET_WINDOW, STREAM_WINDOW_BYTES),
                (_SET_HEADERS, max_header_bytes),
            )
        )
        more = CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW
        self._output = [_frame(_SETTINGS, 0, 0, settings), _frame(_WINDOW, 0, 0, more.to_bytes(4))]

    @property
    def has_output(self) -> bool:
        """Whether there are bytes to send."""
        return bool(self._output)

    @property
    def open_count(self) -> int:
        """Number of calls under way."""
        return len(self._streams)

    def take_output(self) -> bytes:
        """Returns the bytes to send."""
        found = self._output[0] if len(self._output) == 1 else b"".join(self._output)
        self._output.clear()
        return found

    def is_open(self, stream: int) -> bool:
        """Whether a call may still be answered."""
        return stream in self._streams

    def is_paused(self, stream: int) -> bool:
        """Whether a call has written more than the peer takes; `Calls.resumed` follows."""
        found = self._streams.get(stream)
        if found is None or len(found.waiting) <= MAX_PAUSED_BYTES:
            return False
        found.is_paused = True
        return True

    # What arrives.

    def receive(self, data: bytes) -> None:
        """Takes bytes from the peer. Raises BrokenConnectionError."""
        data = self._buffer + data if self._buffer else data
        place, size = 0, len(data)
        if not self._has_begun:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise self._broken(_PROTOCOL_ERROR, "no HTTP/2")
            if size < len(PREFACE):
                self._buffer = data
                return
            place, self._has_begun = len(PREFACE), True
        while size - place >= _HEAD:
            length = data[place] << 16 | data[place + 1] << 8 | data[place + 2]
            if length > MAX_FRAME_BYTES:
                raise self._broken(_SIZE_ERROR, f"a frame is larger than {MAX_FRAME_BYTES} bytes")
            begin = place + _HEAD
            end = begin + length
            if end > size:
                break
            stream = int.from_bytes(data[place + 5 : begin]) & _MAX_WINDOW
            self._take(data[place + 3], data[place + 4], stream, data[begin:end])
            place = end
        self._buffer = data[place:] if place < size else b""

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if (self._block is not None) != (kind == _CONTINUATION):
            raise self._broken(_PROTOCOL_ERROR, "headers of a call are interrupted, or go on without a beginning")
        # Priorities, a goodbye and frames of kinds that are not known change nothing.
        take = self._takers.get(kind)
        if take is not None:
            take(flags, stream, payload)

    def _take_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) != 8:
            raise self._broken(_PROTOCOL_ERROR, "a ping that is none")
        if not flags & _ACK:
            self._output.append(_frame(_PING, _ACK, 0, payload))

    def _take_push(self, _flags: int, _stream: int, _payload: bytes) -> None:
        raise self._broken(_PROTOCOL_ERROR, "only servers push")

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._acknowledge(len(payload))
        stream = self._streams.get(number)
        if stream is None:
            if not number or number > self._last:
                raise self._broken(_PROTOCOL_ERROR, "data of no call")
            # Of a call that has ended here.
            return
        if stream.is_half_closed:
            raise self._broken(_PROTOCOL_ERROR, "data after the end of a call")
        stream.unacknowledged += len(payload)
        if stream.unacknowledged > STREAM_WINDOW_BYTES:
            raise self._broken(_FLOW_ERROR, "more data than the window")
        if flags & _PADDED:
            payload = self._without_padding(payload)
        ends = bool(flags & _END_STREAM)
        if payload:
            self._take_messages(number, stream, payload)
        if ends:
            stream.is_half_closed = True
            if number in self._streams:
                self._calls.half_closed(number)
        elif stream.unacknowledged >= STREAM_WINDOW_BYTES // 2 and number in self._streams:
            self._output.append(_frame(_WINDOW, 0, number, stream.unacknowledged.to_bytes(4)))
            stream.unacknowledged = 0

    def _take_messages(self, number: int, stream: _Stream, payload: bytes) -> None:
        if stream.received:
            stream.received += payload
            # Bytes are copied once for a message, and not with each frame.
            if len(stream.received) < _PREFIX + int.from_bytes(stream.received[1:_PREFIX]):
                self._require_size(number, stream.received)
                return
            payload = bytes(stream.received)
            stream.received.clear()
        place, size = 0, len(payload)
        while size - place >= _PREFIX:
            end = place + _PREFIX + int.from_bytes(payload[place + 1 : place + _PREFIX])
            if not self._require_size(number, payload[place : place + _PREFIX]):
                return
            if end > size:
                break
            self._calls.message(number, payload[place + _PREFIX : end])
            place = end
        if place < size and number in self._streams:
            stream.received += payload[place:]

    def _require_size(self, number: int, prefix: bytes | bytearray) -> bool:
        """Ends a call whose message is compressed or too large; returns whether it goes on."""
        if len(prefix) < _PREFIX:
            return True
        length = int.from_bytes(prefix[1:_PREFIX])
        if not prefix[0] and length <= self._max_message_bytes:
            return True
        self.reset(number, _CANCEL if prefix[0] else _CALM)
        self._calls.reset(number)
        return False

    def _take_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & _PADDED:
            payload = self._without_padding(payload)
        if flags & _HAS_PRIORITY:
            payload = payload[5:]
        self._block = (stream, flags, bytearray())
        self._take_block(flags, stream, payload)

    def _take_block(self, flags: int, continued: int, payload: bytes) -> None:
        assert self._block is not None, "headers have begun"
        number, begun, block = self._block
        if continued != number:
            raise self._broken(_PROTOCOL_ERROR, "headers of a call are interrupted")
        block += payload
        if len(block) > MAX_BLOCK_FRAMES_BYTES:
            raise self._broken(_CALM, f"headers of a call are larger than {MAX_BLOCK_FRAMES_BYTES} bytes")
        if not flags & _END_HEADERS:
            return
        self._block = None
        try:
            headers = self._decoder.decode(bytes(block))
        except HpackError as error:
            raise self._broken(_COMPRESSION_ERROR, str(error)) from None
        ends = bool(begun & _END_STREAM)
        stream = self._streams.get(number)
        if stream is not None:
            # Trailers of the caller.
            if not ends or stream.is_half_closed:
                raise self._broken(_PROTOCOL_ERROR, "headers of a call have come twice")
            stream.is_half_closed = True
            self._calls.half_closed(number)
        elif number > self._last:
            self._open(number, headers, ends=ends)
        elif not number % 2:
            raise self._broken(_PROTOCOL_ERROR, "headers of no call")

    def _open(self, number: int, headers: Headers, *, ends: bool) -> None:
        if not number % 2:
            raise self._broken(_PROTOCOL_ERROR, "a call has an even number")
        self._last = number
        if self._is_leaving or len(self._streams) >= self._max_streams:
            self._output.append(_frame(_RST, 0, number, _REFUSED.to_bytes(4)))
            return
        stream = self._streams[number] = _Stream(self._peer_window)
        self._calls.opened(number, headers)
        if ends and number in self._streams:
            stream.is_half_closed = True
            self._calls.half_closed(number)

    def _take_window(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise self._broken(_SIZE_ERROR, "a window that is none")
        more = int.from_bytes(payload) & _MAX_WINDOW
        if not number:
            self._window += more
            if not more or self._window > _MAX_WINDOW:
                raise self._broken(_FLOW_ERROR, "a window that is too large, or grows by nothing")
        elif (stream := self._streams.get(number)) is not None:
            stream.window += more
            if not more or stream.window > _MAX_WINDOW:
                raise self._broken(_FLOW_ERROR, "a window that is too large, or grows by nothing")
        if self._blocked:
            self._send_blocked()

    def _take_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % 6 or (flags & _ACK and payload):
            raise self._broken(_PROTOCOL_ERROR, "settings that are none")
        if flags & _ACK:
            return
        for place in range(0, len(payload), 6):
            name, value = int.from_bytes(payload[place : place + 2]), int.from_bytes(payload[place + 2 : place + 6])
            if name == _SET_WINDOW:
                if value > _MAX_WINDOW:
                    raise self._broken(_FLOW_ERROR, "a window that is too large")
                for each in self._streams.values():
                    each.window += value - self._peer_window
                self._peer_window = value
            elif name == _SET_FRAME:
                if not MAX_FRAME_BYTES <= value < 1 << 24:
                    raise self._broken(_PROTOCOL_ERROR, "frames of a size that the protocol does not have")
                self._peer_frame = value
        self._output.append(_frame(_SETTINGS, _ACK, 0))
        self._send_blocked()

    def _take_reset(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4 or not number or number > self._last:
            raise self._broken(_PROTOCOL_ERROR, "the end of no call")
        if self._streams.pop(number, None) is not None:
            self._blocked.pop(number, None)
            self._calls.reset(number)

    def _acknowledge(self, size: int) -> None:
        self._unacknowledged += size
        if self._unacknowledged > CONNECTION_WINDOW_BYTES:
            raise self._broken(_FLOW_ERROR, "more data than the window")
        if self._unacknowledged >= CONNECTION_WINDOW_BYTES // 2:
            self._output.append(_frame(_WINDOW, 0, 0, self._unacknowledged.to_bytes(4)))
            self._unacknowledged = 0

    def _without_padding(self, payload: bytes) -> bytes:
        if not payload or payload[0] >= len(payload):
            raise self._broken(_PROTOCOL_ERROR, "padding that is larger than its frame")
        return payload[1 : len(payload) - payload[0]]

    def _broken(self, code: int, words: str) -> BrokenConnectionError:
        self._output.append(_frame(_GOAWAY, 0, 0, self._last.to_bytes(4) + code.to_bytes(4) + words.encode()))
        return BrokenConnectionError(words)

    # What is sent.

    def send(self, number: int, payload: bytes) -> None:
        """Sends a message of a call; of one that has ended it goes nowhere."""
        stream = self._streams.get(number)
        if stream is None:
            return
        self._begin_answer(number, stream)
        framed = b"\x00" + len(payload).to_bytes(4) + payload
        size = len(framed)
        if not stream.waiting and size <= min(stream.window, self._window, self._peer_frame):
            stream.window -= size
            self._window -= size
            self._output.append(_frame(_DATA, 0, number, framed))
            return
        stream.waiting += framed
        self._blocked[number] = None
        self._send_blocked()

    def end(self, number: int, status: int, words: bytes = b"") -> None:
        """Ends a call with a status of gRPC; `words` are percent-encoded. Of one that has ended, nothing."""
        stream = self._streams.get(number)
        if stream is None:
            return
        self._begin_answer(number, stream)
        trailers = literal(b"grpc-status", b"%d" % status)
        stream.trailers = trailers + literal(b"grpc-message", words) if words else trailers
        if not stream.waiting:
            self._finish(number, stream)

    def reset(self, number: int, code: int = _CANCEL) -> None:
        """Ends a call without a status. Of one that has ended, nothing."""
        if self._streams.pop(number, None) is not None:
            self._blocked.pop(number, None)
            self._output.append(_frame(_RST, 0, number, code.to_bytes(4)))

    def leave(self) -> None:
        """Say that no further calls are taken."""
        if not self._is_leaving:
            self._is_leaving = True
            self._output.append(_frame(_GOAWAY, 0, 0, self._last.to_bytes(4) + _NO_ERROR.to_bytes(4)))

    def _begin_answer(self, number: int, stream: _Stream) -> None:
        if not stream.has_headers:
            stream.has_headers = True
            self._output.append(_frame(_HEADERS, _END_HEADERS, number, RESPONSE))

    def _finish(self, number: int, stream: _Stream) -> None:
        assert stream.trailers is not None, "the call has ended"
        self._output.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, stream.trailers))
        if not stream.is_half_closed:
            # The rest of what the caller sends is not wanted.
            self._output.append(_frame(_RST, 0, number, _NO_ERROR.to_bytes(4)))
        del self._streams[number]

    def _send_blocked(self) -> None:
        for number in list(self._blocked):
            stream = self._streams[number]
            place = 0
            while place < len(stream.waiting):
                size = min(len(stream.waiting) - place, stream.window, self._window, self._peer_frame)
                if size <= 0:
                    break
                self._output.append(_frame(_DATA, 0, number, bytes(stream.waiting[place : place + size])))
                stream.window -= size
                self._window -= size
                place += size
            del stream.waiting[:place]
            if stream.is_paused and len(stream.waiting) <= MAX_PAUSED_BYTES:
                stream.is_paused = False
                self._calls.resumed(number)
            if not stream.waiting:
                del self._blocked[number]
                if stream.trailers is not None:
                    self._finish(number, stream)

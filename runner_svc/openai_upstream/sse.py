"""Bounded decoder of server-sent events from a backend.

Existing decoders do not limit event sizes, and this code runs for every token. Each received byte is copied once, even
if a line arrives in many chunks.
"""

import codecs

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Maximum size of an event, the sum of its `data` lines."""
MAX_LINE_BYTES = 4 * 1024 * 1024
"""Maximum size of a line, including comments and ignored fields."""
_ERROR = b"error"


class ErrorPayload(bytes):
    """The data of an `error` event."""

    __slots__ = ()


class SseDecoder:
    """Decodes chunks of bytes to the `data` payloads of complete events. Comments and other fields are ignored.

    As specified by WHATWG HTML 9.2.6, lines end with LF, CR or CRLF; one space after the colon and a leading byte order
    mark are removed.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._max_line_bytes = max_line_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._is_error = False
        self._is_first_line = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the payloads that `chunk` completes. Raises BACKEND_PROTOCOL_ERROR if a limit is exceeded."""
        if b"\r" in chunk or self._after_cr:
            chunk = self._with_line_feeds(chunk)
        lines = chunk.split(b"\n")
        last = lines.pop()
        payloads: list[bytes] = []
        if lines:
            self._complete_first(lines)
            # Usual events are one line each, `data: {...}` or `data: [DONE]`.
            data = [line[6:] for line in lines[::2] if line[:6] == b"data: " and line[-1] in b"}]" and line[6] in b"{["]
            if 2 * len(data) == len(lines) and not (any(lines[1::2]) or self._data or self._is_error):
                payloads = data
            else:
                self._read(lines, payloads)
        if last:
            self._line += last
        if self._line or self._data_bytes:
            self._check_sizes(len(self._line))
        return payloads

    def _read(self, lines: list[bytes], payloads: list[bytes]) -> None:
        """Adds the payloads of the events that end in `lines`."""
        for line in lines:
            if not line:
                self._end_event(payloads)
            elif line.startswith(b"data:"):
                self._data.append(line[5:].strip(b" "))
                self._data_bytes += len(line)
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip(b" ") == _ERROR

    def _complete_first(self, lines: list[bytes]) -> None:
        """Prepends the pending part of a line to the first line."""
        if self._line:
            self._line += lines[0]
            self._check_sizes(len(self._line))
            lines[0] = bytes(self._line)
            self._line.clear()
        if self._is_first_line:
            self._is_first_line = False
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)

    def _check_sizes(self, line_bytes: int) -> None:
        if line_bytes > self._max_line_bytes:
            raise _too_large("a line", self._max_line_bytes)
        if self._data_bytes + line_bytes > self._max_event_bytes:
            raise _too_large("an event", self._max_event_bytes)

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        """Returns the chunk with all line ends as LF; drops the LF of a CRLF split between chunks."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _end_event(self, payloads: list[bytes]) -> None:
        if self._data:
            payload = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            payloads.append(ErrorPayload(payload) if self._is_error else payload)
            self._data.clear()
            self._data_bytes = 0
        self._is_error = False


def _too_large(what: str, limit_bytes: int) -> WeftError:
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the engine sent {what} of over {limit_bytes} bytes")

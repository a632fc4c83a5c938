"""Server-sent events from a backend, decoded with a bound.

A decoder of our own because the ready-made ones have no limit on an event's size, and because this runs once per token.
"""

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_EVENT_BYTES = 4 * 1024 * 1024


class SseDecoder:
    """Turns chunks of bytes into the `data` payloads of complete events. Comments and other fields are dropped."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._partial = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads completed by `chunk`. Raises BACKEND_PROTOCOL_ERROR when one event grows too large."""
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        payloads: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip(b" \r"))
                self._data_bytes += len(line)
            elif self._data and line in (b"", b"\r"):
                payloads.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        if self._data_bytes + len(self._partial) > self._max_event_bytes:
            raise WeftError(
                Reason.BACKEND_PROTOCOL_ERROR, f"the backend sent an event of over {self._max_event_bytes} bytes"
            )
        return payloads

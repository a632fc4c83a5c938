"""A bounded memory of what a process printed."""

from collections import deque

MAX_RING_BYTES = 256 * 1024
MAX_LINE_BYTES = 8 * 1024


class LogRing:
    """The last lines of a byte stream, at most `max_bytes` of them; longer lines are cut."""

    def __init__(self, *, max_bytes: int = MAX_RING_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_line_bytes = max_line_bytes
        self._lines: deque[str] = deque()
        self._held_bytes = 0
        self._partial = b""
        self.total_bytes = 0
        """Every byte ever fed: output is a sign of life while a model loads."""

    def feed(self, chunk: bytes) -> list[str]:
        """Take in output as it comes and return the lines it completed."""
        self.total_bytes += len(chunk)
        *complete, partial = (self._partial + chunk).split(b"\n")
        # A line without an end is cut as well, or a process that never prints one would fill the memory.
        self._partial = partial[: self._max_line_bytes]
        lines = [line[: self._max_line_bytes].decode("utf-8", "replace").rstrip("\r") for line in complete]
        for line in lines:
            self._append(line)
        return lines

    def note(self, line: str) -> None:
        """Add a line of our own, such as the end of a process."""
        self._append(line)

    def last(self, count: int) -> list[str]:
        """The last `count` lines, oldest first."""
        return list(self._lines)[-count:] if count > 0 else []

    def _append(self, line: str) -> None:
        self._lines.append(line)
        self._held_bytes += len(line)
        while self._held_bytes > self._max_bytes:
            self._held_bytes -= len(self._lines.popleft())

"""A bounded log of a process's output, and its followers."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_RING_BYTES = 256 * 1024
MAX_LINE_BYTES = 8 * 1024
MAX_RING_LINES = 16 * 1024
"""Maximum number of lines, because each has overhead besides its bytes."""
MAX_FOLLOWERS = 32
"""Maximum number of concurrent followers of a log."""
MAX_UNREAD_LINES = 1000
MAX_UNREAD_BYTES = 256 * 1024
"""Maximum backlog of a slow follower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBatch:
    """A batch of lines for a follower, oldest first."""

    lines: tuple[str, ...]
    lost_line_count: int = 0
    """Number of earlier lines that were dropped because the follower was too slow."""


class LogFollower:
    """A follower's bounded backlog; if it is too slow, the oldest lines are dropped and counted."""

    def __init__(self, first_lines: Iterable[str]) -> None:
        self._unread: deque[str] = deque()
        self._unread_bytes = 0
        self._lost = 0
        self._something = asyncio.Event()
        self._closed = False
        for line in first_lines:
            self.offer(line)

    def offer(self, line: str) -> None:
        """Adds a line to the backlog."""
        self._unread.append(line)
        self._unread_bytes += len(line)
        while len(self._unread) > MAX_UNREAD_LINES or self._unread_bytes > MAX_UNREAD_BYTES:
            self._unread_bytes -= len(self._unread.popleft())
            self._lost += 1
        self._something.set()

    def take(self) -> LogBatch:
        """Returns the lines since the last call."""
        batch = LogBatch(lines=tuple(self._unread), lost_line_count=self._lost)
        self._unread.clear()
        self._unread_bytes = self._lost = 0
        self._something.clear()
        return batch

    async def wait(self) -> bool:
        """Waits for lines; returns False once the log has ended."""
        if not self._closed:
            await self._something.wait()
        return not self._closed

    def close(self) -> None:
        """Ends the follower."""
        self._closed = True
        self._something.set()


class LogRing:
    """The last lines of a byte stream, at most `max_bytes`; longer lines are cut."""

    def __init__(self, *, max_bytes: int = MAX_RING_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_line_bytes = max_line_bytes
        self._lines: deque[tuple[str, int]] = deque()
        """Lines with their sizes in UTF-8."""
        self._held_bytes = 0
        self._partial = b""
        self._followers: list[LogFollower] = []
        self.total_bytes = 0
        """Total bytes fed so far: output counts as progress while a model loads."""

    def feed(self, chunk: bytes) -> list[str]:
        """Adds a chunk of output; returns the lines that it completed."""
        self.total_bytes += len(chunk)
        *complete, partial = (self._partial + chunk).split(b"\n")
        # An incomplete line is cut too, otherwise a process without line ends would fill the memory.
        self._partial = partial[: self._max_line_bytes]
        lines = [line[: self._max_line_bytes].decode("utf-8", "replace").rstrip("\r") for line in complete]
        self._append(lines)
        return lines

    def end_line(self) -> list[str]:
        """Ends the stream: text after the last newline is a line too, and is returned."""
        partial, self._partial = self._partial, b""
        lines = [partial.decode("utf-8", "replace").rstrip("\r")] if partial else []
        self._append(lines)
        return lines

    def note(self, line: str) -> None:
        """Adds a line of the runner, such as the end of a process."""
        self._append([line])

    def last(self, count: int) -> list[str]:
        """Returns the last `count` lines, oldest first."""
        return [line for line, _ in islice(self._lines, max(0, len(self._lines) - count), None)] if count > 0 else []

    @contextmanager
    def follow(self, count: int) -> Iterator[LogFollower]:
        """Follows the log starting with its last `count` lines. Raises TOO_MANY_RESOURCES beyond MAX_FOLLOWERS."""
        if len(self._followers) >= MAX_FOLLOWERS:
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"this log already has {MAX_FOLLOWERS} readers, the limit")
        follower = LogFollower(self.last(count))
        self._followers.append(follower)
        try:
            yield follower
        finally:
            self._followers.remove(follower)

    def end_followers(self) -> None:
        """Ends every follower."""
        for follower in self._followers:
            follower.close()

    def _append(self, lines: list[str]) -> None:
        for line in lines:
            for follower in self._followers:
                follower.offer(line)
            size = len(line.encode("utf-8", "replace")) + 1
            self._lines.append((line, size))
            self._held_bytes += size
        while self._held_bytes > self._max_bytes or len(self._lines) > MAX_RING_LINES:
            self._held_bytes -= self._lines.popleft()[1]

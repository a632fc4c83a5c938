"""A bounded log of a process's output, and its followers."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MAX_RING_BYTES = 256 * 1024
MAX_LINE_BYTES = 8 * 1024
MAX_RING_LINES = 16 * 1024
"""Maximum number of lines, because each has overhead besides its bytes."""
MAX_FOLLOWERS = 32
"""Maximum number of concurrent followers of a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBatch:
    """A batch of lines for a follower, oldest first."""

    lines: tuple[str, ...]
    lost_line_count: int = 0
    """Number of earlier lines that were dropped because the follower was too slow."""


class LogFollower:
    """A reader of a log. If it is too slow, the lines that the log no longer holds are counted."""

    def __init__(self, log: "LogRing", position: int) -> None:
        """`position`: the number of lines before its first one."""
        self._log = log
        self._position = position
        self.changed = asyncio.Event()
        """Set by the log when there are lines, or it has ended."""
        if log.line_count > position:
            self.changed.set()

    def take(self) -> LogBatch:
        """Returns the lines since the last call."""
        self.changed.clear()
        count = self._log.line_count - self._position
        lines = self._log.last(count)
        self._position += count
        return LogBatch(lines=tuple(lines), lost_line_count=count - len(lines))

    async def wait(self) -> bool:
        """Waits for lines; returns False once the log has ended and all its lines were taken."""
        if not self._log.is_ended:
            await self.changed.wait()
        return self._log.line_count > self._position


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
        self.line_count = 0
        """Total lines so far, also those that are not held any more."""
        self.is_ended = False
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
        follower = LogFollower(self, self.line_count - len(self.last(count)))
        self._followers.append(follower)
        try:
            yield follower
        finally:
            self._followers.remove(follower)

    def end_followers(self) -> None:
        """Ends every follower."""
        self.is_ended = True
        self._wake_followers()

    def _append(self, lines: list[str]) -> None:
        self.line_count += len(lines)
        for line in lines:
            size = len(line.encode("utf-8", "replace")) + 1
            self._lines.append((line, size))
            self._held_bytes += size
        while self._held_bytes > self._max_bytes or len(self._lines) > MAX_RING_LINES:
            self._held_bytes -= self._lines.popleft()[1]
        if lines:
            self._wake_followers()

    def _wake_followers(self) -> None:
        for follower in self._followers:
            follower.changed.set()

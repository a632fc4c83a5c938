"""A command on a terminal of an account, as a user types it: what it shows, and the keys that are pressed meanwhile."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bare_account import SECONDS, BareAccount

COLUMNS = 200
MAX_READ_BYTES = 65_536
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""What moves the cursor and sets colours."""


class Terminal:
    """A terminal in which one command runs."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._read = b""

    @property
    def text(self) -> str:
        """What it has shown so far, as text."""
        return _CONTROLS.sub("", self._read.decode("utf-8", "replace"))

    def shows(self, pattern: str) -> re.Match[str]:
        """Waits until it has shown text that matches."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"no {pattern!r} within {SECONDS:.0f} s:\n{self.text[-4_000:]}"
            assert self._take(), f"it ended without {pattern!r}:\n{self.text[-4_000:]}"
        return found

    def press(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._terminal, keys.encode())

    def end(self) -> None:
        """Ends the command as Ctrl-C does, and waits for it."""
        self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + SECONDS
        while self._take() and time.monotonic() < deadline:
            pass
        assert self.process.wait(SECONDS) == 0, self.text[-4_000:]

    def _take(self) -> bool:
        """Reads what there is, within a second; returns whether the command still runs."""
        ready, _, _ = select.select([self._terminal], [], [], 1.0)
        if not ready:
            return self.process.poll() is None
        # Linux reports the end of the other side as an error.
        with suppress(OSError):
            piece = os.read(self._terminal, MAX_READ_BYTES)
            self._read += piece
            return bool(piece)
        return False


@contextmanager
def typed(account: BareAccount, line: str) -> Iterator[Terminal]:
    """Runs a line in a terminal of the account; what is left of it at the end of the block is killed."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {line}"],
            env={**account.environment, "TERM": "xterm", "COLUMNS": str(COLUMNS)},
            cwd=account.home,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(SECONDS)
        os.close(ours)

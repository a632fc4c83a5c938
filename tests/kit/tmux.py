"""A shell in a terminal of tmux, which shows its screen as a user sees it."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="apt-get install tmux")
POLL_SECONDS = 0.05
SHOWN_SECONDS = 30.0
"""Maximum time until an awaited text is on the screen."""


class Tmux:
    """One terminal with a shell."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def ask(self, *arguments: str) -> str:
        """Runs a command of tmux and returns its output."""
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    def type(self, *keys: str) -> None:
        """Presses keys by their names in tmux, such as C-c; other texts are typed."""
        self.ask("send-keys", *keys)

    def run(self, line: str) -> None:
        """Types a line and Enter."""
        self.type(line, "Enter")

    def resize(self, columns: int, rows: int) -> None:
        """Changes the size of the terminal."""
        self.ask("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self) -> str:
        """Returns the lines on the screen."""
        return self.ask("capture-pane", "-p")

    def is_page(self) -> bool:
        """Whether a program shows a page in place of the shell's lines."""
        return self.ask("display-message", "-p", "#{alternate_on}").strip() == "1"

    def until(self, text: str, *, is_shown: bool = True) -> str:
        """Returns the screen once a text is on it, or no longer is. AssertionError with the screen otherwise."""
        deadline = time.monotonic() + SHOWN_SECONDS
        while (text in (screen := self.screen())) is not is_shown:
            assert time.monotonic() < deadline, f"{text!r} is {'not' if is_shown else 'still'} shown:\n{screen}"
            time.sleep(POLL_SECONDS)
        return screen

    def until_prompt(self) -> None:
        """Waits until the shell reads a line. A program that ends discards what was typed before."""
        deadline = time.monotonic() + SHOWN_SECONDS
        while not (screen := self.screen()).rstrip().endswith("\n$"):
            assert time.monotonic() < deadline, f"the shell does not read a line:\n{screen}"
            time.sleep(POLL_SECONDS)


@contextmanager
def shell_in_tmux(environment: Mapping[str, str], columns: int = 100) -> Iterator[Tmux]:
    """Starts a shell in a terminal, and ends both with the block."""
    # The path of a socket has about 100 characters at most.
    with TemporaryDirectory(prefix="tmux-") as folder:
        tmux = Tmux(Path(folder) / "socket")
        variables = {"PS1": "$ ", "TERM": "screen-256color", "LC_ALL": "C.UTF-8"} | dict(environment)
        own = [f"{name}={value}" for name, value in variables.items()]
        size = ("-x", str(columns), "-y", "30")
        tmux.ask("new-session", "-d", *size, "env", "-i", *own, "/bin/sh")
        try:
            yield tmux
        finally:
            tmux.ask("kill-server")

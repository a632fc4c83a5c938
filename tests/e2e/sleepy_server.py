"""A server that sleeps: the programs that wake it and put it to sleep, and what they did."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.free_port import free_port

_WAKE = """\
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "wakes").open("a") as log:
    log.write("wake\\n")
while (folder / "held").exists():
    time.sleep(0.02)
process = subprocess.Popen(sys.argv[2:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
(folder / "pid").write_text(str(process.pid))
"""
_SLEEP = """\
import os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
with (folder / "sleeps").open("a") as log:
    log.write("sleep\\n")
"""


class SleepyServer:
    """A fake backend on a port of its own that runs only while somebody has woken it."""

    def __init__(self, folder: Path, **switches: Any) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "wake.py").write_text(_WAKE)
        (folder / "sleep.py").write_text(_SLEEP)
        self.port = free_port()
        self._command = fake_backend_command("--port", str(self.port), **switches)

    @property
    def wake_argv(self) -> list[str]:
        """The program that starts it."""
        return [sys.executable, str(self._folder / "wake.py"), str(self._folder), *self._command]

    @property
    def sleep_argv(self) -> list[str]:
        """The program that ends it."""
        return [sys.executable, str(self._folder / "sleep.py"), str(self._folder)]

    @property
    def wakes(self) -> int:
        """How often somebody tried to wake it."""
        return self._count("wakes")

    @property
    def sleeps(self) -> int:
        """How often it was put to sleep."""
        return self._count("sleeps")

    def hold(self, *, held: bool) -> None:
        """Let every wake wait, or no more."""
        if held:
            (self._folder / "held").touch()
        else:
            (self._folder / "held").unlink()

    def runner(self, name: str, model: str, **changes: Any) -> dict[str, Any]:
        """A runner section that publishes it."""
        wake = {"type": "command", "argv": self.wake_argv, "max_wait_seconds": 20}
        return {
            "name": name,
            "runtime": "openai_http",
            "probe_interval_seconds": 0.2,
            "probe_failures": 2,
            "models": [{"name": model, "url": f"http://127.0.0.1:{self.port}/v1", "wake": wake, **changes}],
        }

    def end(self) -> None:
        """Kill it, if it runs."""
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self._folder / "pid").read_text()), signal.SIGKILL)

    def _count(self, name: str) -> int:
        path = self._folder / name
        return len(path.read_text().splitlines()) if path.exists() else 0

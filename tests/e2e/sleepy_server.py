"""A server that sleeps: the program that wakes it, and how often it did."""

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


class SleepyServer:
    """A fake backend on a port of its own that runs only while somebody has woken it."""

    def __init__(self, folder: Path, **switches: Any) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "wake.py").write_text(_WAKE)
        self.port = free_port()
        self._command = fake_backend_command("--port", str(self.port), **switches)

    @property
    def wake_argv(self) -> list[str]:
        """The program that starts it."""
        return [sys.executable, str(self._folder / "wake.py"), str(self._folder), *self._command]

    @property
    def wakes(self) -> int:
        """How often somebody tried to wake it."""
        path = self._folder / "wakes"
        return len(path.read_text().splitlines()) if path.exists() else 0

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

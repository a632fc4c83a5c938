"""Faults of a load that every stand-in for a library knows, by switches."""

import signal
import subprocess
import sys
import time
from typing import Any


def misbehave_at_load(switches: dict[str, Any]) -> None:
    """Do what the switches say while a model loads."""
    if switches.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if switches.get("fork_grandchild"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if flood := switches.get("stderr_flood_bytes"):
        for _ in range(flood // 1000):
            sys.stderr.write("x" * 999 + "\n")
    if "exit_at_start" in switches:
        frame = '  File "/opt/library/weights.py", line 12, in load\n    read()\n'
        sys.stderr.write(f"Traceback (most recent call last):\n{frame}ValueError: the weights are corrupt\n")
        sys.exit(switches["exit_at_start"])
    if switches.get("never_ready"):
        time.sleep(3600)

"""What the checks of command-line clients share: start the program, and read what it said."""

import os
import subprocess
from pathlib import Path

HOME = Path(os.environ["HOME"])
AGENT_TEXT = os.environ["WEFT_AGENT_TEXT"]
"""What the models `agent-...` say after they have read the notes."""
PROGRAM_SECONDS = 900.0


def start(*command: str, fails: bool = False, **environment: str) -> str:
    """Run it in the folder with the notes; what it printed, stdout and stderr together.

    Raises AssertionError unless it fails or not, as asked.
    """
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    if fails is not bool(done.returncode):
        raise AssertionError(f"{command[0]} ended with {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout.strip()

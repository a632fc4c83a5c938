"""Speech for tests of models that hear: the Debian package espeak-ng speaks a text into a file."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = "espeak-ng"
WORDS_PER_MINUTE = 120
SPEAK_SECONDS = 120.0
INSTALL_SECONDS = 300.0


def spoken(text: str, target: Path) -> Path:
    """Returns the file with a text as speech, a WAV file of one channel."""
    words = [espeak_ng(), "-s", str(WORDS_PER_MINUTE), "-w", str(target), text]
    subprocess.run(words, check=True, timeout=SPEAK_SECONDS, capture_output=True)
    return target


def espeak_ng() -> str:
    """Returns the program; root installs the package where it is missing.

    Skips the test where that cannot be done; fails it where the package cannot be had.
    """
    found = shutil.which(PROGRAM)
    if found is not None:
        return found
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        pytest.skip("there is no espeak-ng, and only root on Debian can install it: apt-get install espeak-ng")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", PROGRAM]):
        done = subprocess.run(
            ["apt-get", "-qq", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"apt-get {' '.join(words)}: {done.stdout}{done.stderr}"
    return PROGRAM

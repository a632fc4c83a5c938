"""Speech for tests of models that hear: the Debian package espeak-ng speaks a text into a file."""

import shutil
import subprocess
from pathlib import Path

from kit.debian_package import require_installed

PROGRAM = "espeak-ng"
WORDS_PER_MINUTE = 120
SPEAK_SECONDS = 120.0


def spoken(text: str, target: Path) -> Path:
    """Returns the file with a text as speech, a WAV file of one channel."""
    words = [espeak_ng(), "-s", str(WORDS_PER_MINUTE), "-w", str(target), text]
    subprocess.run(words, check=True, timeout=SPEAK_SECONDS, capture_output=True)
    return target


def espeak_ng() -> str:
    """Returns the program; root installs the package where it is missing.

    Skips the test where that cannot be done; fails it where the package cannot be had.
    """
    if shutil.which(PROGRAM) is None:
        require_installed(PROGRAM)
    return PROGRAM

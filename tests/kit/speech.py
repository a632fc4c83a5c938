"""Speech for tests of transcription, synthesized with the Debian package espeak-ng."""

import shutil
import subprocess
from pathlib import Path

from kit.debian_package import require_installed

PROGRAM = "espeak-ng"
WORDS_PER_MINUTE = 120
SPEAK_SECONDS = 120.0


def spoken(text: str, target: Path) -> Path:
    """Speaks a text into a mono WAV file; returns the file."""
    words = [espeak_ng(), "-s", str(WORDS_PER_MINUTE), "-w", str(target), text]
    subprocess.run(words, check=True, timeout=SPEAK_SECONDS, capture_output=True)
    return target


def espeak_ng() -> str:
    """Returns the program; installs its package if necessary and running as root.

    Skips the test if it cannot install, and fails it if the package is unavailable.
    """
    if shutil.which(PROGRAM) is None:
        require_installed(PROGRAM)
    return PROGRAM

"""The wheel and the source distribution of the working tree."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from bare_account import TOOLS

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Built:
    """Both distributions of one build."""

    wheel: Path
    source: Path


def build(*arguments: str | Path) -> None:
    """Builds from the repository. A wheel alone is built under another mask, which must make no difference."""
    command = [str(TOOLS / "python"), "-m", "build", "--no-isolation", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, umask=0o077 if "--wheel" in arguments else 0o022)

"""Installs lock files with pip, and reports its progress and the cause of a failure.

This file is also a program that installs a lock file for its interpreter before weft itself is installed:

    python runner_svc/environments/locked_install.py <lock file> [pip options]

It uses only the standard library.
"""

import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

CONNECT_SECONDS = 30
"""Time without data after which pip closes a connection."""
CONNECT_RETRIES = 3
MAX_KEPT_LINES = 40
MAX_LINE_CHARS = 300
BAR_CHARS = 30
PACKAGE_CHARS = 32

_REQUIREMENT = re.compile(r"^[a-zA-Z0-9][^\s=]*==", re.MULTILINE)
_BEGUN = re.compile(r"(?:Collecting|Requirement already satisfied:|Ignoring|Processing) (?:\S*/)?(?P<package>[^\s:/]+)")
_INSTALLING = "Installing collected packages"


class Failure(Enum):
    """Why pip failed, with a sentence for users."""

    WRONG_HASH = "a package differs from the lock file: its hash is wrong, or the download was incomplete"
    DISK_FULL = "the disk is full"
    NOT_FOUND = "no package index has what the lock file names for this Python and machine"
    NETWORK = (
        "a package index could not be reached, or the connection was lost; completely downloaded packages are kept"
    )
    OTHER = "pip failed"


_SIGNS = (
    (re.compile(r"DO NOT MATCH THE HASHES|hash mismatch", re.IGNORECASE), Failure.WRONG_HASH),
    (re.compile(r"No space left on device|Disk quota exceeded"), Failure.DISK_FULL),
    (
        re.compile(
            r"IncompleteRead|Connection (?:broken|reset|refused|aborted)|timed out|RemoteDisconnected|"
            r"Max retries exceeded|Failed to establish|NewConnectionError|Temporary failure in name resolution"
        ),
        Failure.NETWORK,
    ),
    (re.compile(r"No matching distribution found|Could not find a version"), Failure.NOT_FOUND),
)
"""Patterns in pip's output, the likelier cause first: an unreachable index also lacks packages."""


def pip_arguments(lock: Path, options: Sequence[str] = ()) -> list[str]:
    """Returns the arguments for Python that install a lock file."""
    return [
        *("-m", "pip", "--disable-pip-version-check", "install", "--no-input", "--progress-bar", "off"),
        *("--timeout", str(CONNECT_SECONDS), "--retries", str(CONNECT_RETRIES)),
        *("--require-hashes", *options, "-r", str(lock)),
    ]


def package_count(locks: Iterable[Path]) -> int:
    """Returns the number of packages in lock files."""
    return sum(len(_REQUIREMENT.findall(lock.read_text("utf-8"))) for lock in locks)


@dataclass(slots=True)
class PipOutput:
    """Reads the output of pip line by line."""

    total: int
    """Number of packages."""
    done: int = 0
    """Number of packages that pip has started."""
    package: str = ""
    """Current package; empty once pip installs all packages."""
    installing: bool = False
    """Whether all packages are downloaded and pip is installing them."""
    signs: set[Failure] = field(default_factory=set)
    """Possible causes of a failure; an unreachable index may not have been needed."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_LINES))

    def read(self, line: str) -> bool:
        """Processes a line; returns whether the progress changed."""
        line = line.rstrip()[:MAX_LINE_CHARS]
        if line and not line.startswith("WARNING"):
            self.last_lines.append(line)
        self.signs.update(failure for sign, failure in _SIGNS if sign.search(line))
        if found := _BEGUN.match(line):
            self.done, self.package, self.installing = min(self.done + 1, self.total), found["package"], False
            return True
        if line.startswith(_INSTALLING):
            self.installing, self.package = True, ""
            return True
        return False

    @property
    def failure(self) -> Failure:
        """Returns the cause, provided that pip failed."""
        return next((failure for _, failure in _SIGNS if failure in self.signs), Failure.OTHER)

    def explanation(self) -> str:
        """Returns the cause of the failure with pip's last lines."""
        last = "\n".join(f"  {line}" for line in self.last_lines)
        return f"{self.failure.value}; pip's last lines:\n{last}"


def _show(output: PipOutput) -> None:
    filled = output.done * BAR_CHARS // max(1, output.total)
    bar = "#" * filled + "." * (BAR_CHARS - filled)
    name = "installing" if output.installing else output.package
    sys.stdout.write(f"\r      [{bar}] {output.done}/{output.total} {name[:PACKAGE_CHARS]:<{PACKAGE_CHARS}}")
    sys.stdout.flush()


def main(lock: str, *options: str) -> int:
    """Installs a lock file for this interpreter, with a progress bar on terminals. Shows pip's output on failure."""
    shown = sys.stdout.isatty()
    output = PipOutput(package_count([Path(lock)]))
    command = [sys.executable, *pip_arguments(Path(lock), options)]
    with subprocess.Popen(  # noqa: S603 - this interpreter
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if output.read(line) and shown:
                _show(output)
    if shown:
        sys.stdout.write("\r\x1b[K")
    if process.returncode:
        sys.stderr.write(f"the installation failed: {output.explanation()}\nCheck the network, then run make again.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

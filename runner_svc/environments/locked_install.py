"""The installation of lock files with pip: its command line, its progress, and why it failed.

Also a program, for the time when weft itself is not installed yet; standard library only:

    python runner_svc/environments/locked_install.py <lock file> [pip options]

installs a lock file for the interpreter that runs it.
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
"""Time without a byte after which pip gives up a connection."""
CONNECT_RETRIES = 3
MAX_KEPT_LINES = 40
MAX_LINE_CHARS = 300
BAR_CHARS = 30
PACKAGE_CHARS = 32

_REQUIREMENT = re.compile(r"^[a-zA-Z0-9][^\s=]*==", re.MULTILINE)
_BEGUN = re.compile(r"(?:Collecting|Requirement already satisfied:|Ignoring|Processing) (?:\S*/)?(?P<package>[^\s:/]+)")
_INSTALLING = "Installing collected packages"


class Failure(Enum):
    """Why pip failed, with the sentence for users."""

    WRONG_HASH = "a package is not the one that the lock file names: its hash differs, or it was not loaded whole"
    DISK_FULL = "the disk is full"
    NOT_FOUND = "no package index has what the lock file names for this Python and machine"
    NETWORK = "a package index could not be reached, or the connection broke; packages that were loaded whole are kept"
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
"""What pip writes, the likelier cause first: an index that is not reached has no packages either."""


def pip_arguments(lock: Path, options: Sequence[str] = ()) -> list[str]:
    """Returns the arguments of Python that install a lock file."""
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
    """The output of pip, read line by line."""

    total: int
    """Number of packages."""
    done: int = 0
    """Packages that pip has begun with."""
    package: str = ""
    """The package that pip is at; empty once it installs them all."""
    installing: bool = False
    """Whether all packages were loaded, and pip installs them."""
    signs: set[Failure] = field(default_factory=set)
    """Causes of a failure that it names; an index that was not reached may not have been needed."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_LINES))

    def read(self, line: str) -> bool:
        """Reads a line; returns whether the progress changed."""
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
        """Why it failed, where it did."""
        return next((failure for _, failure in _SIGNS if failure in self.signs), Failure.OTHER)

    def explanation(self) -> str:
        """Returns why it failed, and what pip said."""
        last = "\n".join(f"  {line}" for line in self.last_lines)
        return f"{self.failure.value}; pip's last lines:\n{last}"


def _show(output: PipOutput) -> None:
    filled = output.done * BAR_CHARS // max(1, output.total)
    bar = "#" * filled + "." * (BAR_CHARS - filled)
    name = "installing" if output.installing else output.package
    sys.stdout.write(f"\r      [{bar}] {output.done}/{output.total} {name[:PACKAGE_CHARS]:<{PACKAGE_CHARS}}")
    sys.stdout.flush()


def main(lock: str, *options: str) -> int:
    """Installs a lock file for this interpreter: a bar on a terminal, pip's own words only where it fails."""
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
        sys.stderr.write(
            f"the installation failed: {output.explanation()}\nIs the network there? Then run make again.\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

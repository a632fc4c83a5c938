"""Folder in shared memory for prompts that a llama.cpp server saves when they lose their slot."""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runner_svc.memory.machine_memory import engine_memory_bytes
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.runtimes.llama_server.runtime import LAUNCHER

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder below it is private
"""In-memory file system: prompts must not be written to disk."""
MACHINE_PART = 8
"""The prompts of one engine use at most this fraction of the machine's memory (1/8) ..."""
SHARED_PART = 2
"""... and of the free shared memory when the engine starts (1/2): containers have 64 MiB of it."""
MAX_COMPARED_BYTES = 256 * 1024 * 1024
"""Maximum size of a program, adapter or template that is compared with those of other machines."""
_OF_ONE_PROCESS = frozenset({"--model", "--alias", "--port", "--threads", "--slot-save-path"})
"""Flags whose values may differ between engines that can restore each other's prompts."""
_PREFIX = "weft-prompts-"
_NAME = re.compile(rf"{_PREFIX}(\d{{1,10}})-")


class SavedPrompts:
    """The private folder of one server process."""

    def __init__(self, budget_mb: int) -> None:
        """Creates the folder, and deletes leftovers of runners that crashed."""
        self.budget_bytes = 0
        self.folder: Path | None = None
        with suppress(OSError):
            free = shutil.disk_usage(SHARED_MEMORY).free // SHARED_PART
            machine = (engine_memory_bytes() or 0) // MACHINE_PART
            self.budget_bytes = min(budget_mb * MEBIBYTE, free, machine)
            _remove_abandoned()
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
        if self.folder is None:
            self.budget_bytes = 0

    @property
    def byte_count(self) -> int:
        """Current size of the saved prompts."""
        if self.folder is None:
            return 0
        with suppress(OSError):
            return sum(entry.stat().st_size for entry in os.scandir(self.folder))
        return 0

    def delete(self, names: Sequence[str]) -> None:
        """Deletes saved prompts; missing ones are ignored."""
        if self.folder is None:
            return
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink()

    def remove(self) -> None:
        """Deletes the folder with all prompts."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def state_identity(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Returns a digest of a server's command and variables, with size and time of the files that the command names.

    llama.cpp accepts saved slots of another model with the same shape, and would answer with them.
    """
    known: list[object] = [*arguments, *sorted(variables.items())]
    with suppress(PackageNotFoundError):
        known.append(version("xllamacpp"))
    for argument in (shutil.which(arguments[0]) or "", *arguments):
        # An adapter is FILE:SCALE.
        for path in (Path(argument), Path(argument.rpartition(":")[0])):
            with suppress(OSError):
                if path.is_file():
                    stat = path.stat()
                    known.append((stat.st_size, stat.st_mtime_ns))
    return sha256(repr(known).encode()).hexdigest()


def state_kind(arguments: Sequence[str]) -> str:
    """Returns a digest of a server's build and arguments that is the same on all machines; empty: unknown.

    Files are compared by content, except the model's, which has its own digest, and the interpreter of the server in
    the wheel, which counts by the wheel's version.
    """
    known: list[object] = []
    with suppress(PackageNotFoundError):
        known.append(version("xllamacpp"))
    for number, argument in enumerate(arguments):
        if (number == 0 and LAUNCHER in arguments) or (number and arguments[number - 1] in _OF_ONE_PROCESS):
            continue
        # An adapter is FILE:SCALE.
        file = Path(shutil.which(argument) or argument if number == 0 else argument.rpartition(":")[0] or argument)
        try:
            if not file.is_file():
                known.append(argument)
            elif file.stat().st_size > MAX_COMPARED_BYTES:
                return ""
            else:
                known.append(sha256(file.read_bytes()).hexdigest())
        except OSError:
            known.append(argument)
    return sha256(repr(known).encode()).hexdigest()


def _remove_abandoned() -> None:
    for folder in SHARED_MEMORY.iterdir():
        if (found := _NAME.match(folder.name)) is not None and not Path("/proc", found[1]).exists():
            shutil.rmtree(folder, ignore_errors=True)

"""A disk that fails on demand, or records what reaches it: a library in C (`failing_disk.c`) for LD_PRELOAD.

disk = FailingDisk(tmp_path)
program = subprocess.Popen(..., env={**os.environ, **disk.environment()})

In that program, whose files under a folder are concerned:

disk = FailingDisk.of_this_process()
with disk.watching(home, fails_at=7, error=errno.ENOSPC):
    ...                             # the seventh write, sync, open for writing, rename, removal or truncation fails

`DiskImage` turns a record into what a kill or a power cut after any call would leave.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from mmap import mmap
from pathlib import Path

from weft_testing.shared_library import built_once

_SOURCE = Path(__file__).with_suffix(".c")
_VARIABLE = "FAILING_DISK_CONTROL"
_PATH_BYTES = 1024
_CONTROL = struct.Struct(f"=8q{_PATH_BYTES}s{_PATH_BYTES}s")
_SEEN = struct.Struct("=q")
_SEEN_OFFSET = 7 * 8
_ENTRY = struct.Struct("=5q")
EVERY = 1 << 40
"""More calls than a program makes."""
SECTOR_BYTES = 512
"""What a disk writes completely or not at all."""


class Call(IntFlag):
    """What a program asks of a disk. MAKE: an open for writing."""

    WRITE = 1
    SYNC = 2
    MAKE = 4
    MOVE = 8
    REMOVE = 16
    CUT = 32


ANY_CALL = Call.WRITE | Call.SYNC | Call.MAKE | Call.MOVE | Call.REMOVE | Call.CUT


class FailingDisk:
    """The control of one program's disk, in a file that both sides map."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the control file; it is not on the disk that fails."""
        self._path = folder / "disk.control"
        if not self._path.exists():
            self._path.write_bytes(bytes(_CONTROL.size))
        with self._path.open("r+b") as file:
            self._mapped = mmap(file.fileno(), _CONTROL.size)

    @classmethod
    def of_this_process(cls) -> "FailingDisk":
        """Returns the control of the disk with which this process was started."""
        return cls(Path(os.environ[_VARIABLE]).parent)

    def environment(self) -> Mapping[str, str]:
        """Returns environment variables for the program. Raises as `built_once`."""
        return {_VARIABLE: str(self._path), "LD_PRELOAD": str(built_once(_SOURCE, "failing_disk.so"))}

    @contextmanager
    def watching(  # noqa: PLR0913 - all by name
        self,
        folder: Path,
        *,
        error: int = 0,
        fails_at: int = 0,
        calls: int = 1,
        is_torn: bool = False,
        only: Call = ANY_CALL,
        pause_seconds: float = 0.0,
        record: Path | None = None,
    ) -> Iterator[None]:
        """Counts the calls for files under `folder` in the block; `calls` of them fail with `error`, from `fails_at`.

        `is_torn`: a failing write writes its first half. `pause_seconds` are added to each sync. What succeeds is
        appended to `record`.
        """
        names = (os.fsencode(folder), b"" if record is None else os.fsencode(record))
        microseconds = round(pause_seconds * 1e6)
        numbers = (1, fails_at, calls, error, int(is_torn), int(only), microseconds, 0)
        self._mapped[:] = _CONTROL.pack(*numbers, *names)
        try:
            yield
        finally:
            self._mapped[:8] = bytes(8)

    @property
    def seen(self) -> int:
        """Number of counted calls since `watching` began."""
        number: int = _SEEN.unpack_from(self._mapped, _SEEN_OFFSET)[0]
        return number


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded call. `offset`: of a write, or the length of a truncated file."""

    call: Call
    path: str
    target: str
    offset: int
    content: bytes


def entries(record: Path) -> Iterator[Entry]:
    """Yields the calls of a record."""
    content, at = record.read_bytes(), 0
    while at < len(content):
        call, offset, *sizes = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size
        parts = []
        for size in sizes:
            parts.append(content[at : at + size])
            at += size
        yield Entry(Call(call), os.fsdecode(parts[0]), os.fsdecode(parts[1]), offset, parts[2])


@dataclass(slots=True)
class _File:
    content: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes since the last sync; None: cut at this length."""
    synced: bytes = b""

    def apply(self, offset: int, content: bytes | None) -> None:
        self.unsynced.append((offset, content))
        _change(self.content, offset, content)


def _change(file: bytearray, offset: int, content: bytes | None) -> None:
    end = offset if content is None else offset + len(content)
    if len(file) < end:
        file.extend(bytes(end - len(file)))
    if content is None:
        del file[end:]
    else:
        file[offset:end] = content


class DiskImage:
    """The content of a disk after recorded calls; `begin` is that before them. File names change immediately."""

    def __init__(self, begin: Mapping[str, bytes]) -> None:
        self._files = {path: _File(bytearray(content), [], content) for path, content in begin.items()}

    def apply(self, entry: Entry) -> None:
        """Adds a call."""
        match entry.call:
            case Call.MOVE:
                if (moved := self._files.pop(entry.path, None)) is not None:
                    self._files[entry.target] = moved
            case Call.REMOVE:
                self._files.pop(entry.path, None)
            case Call.SYNC:
                # A folder is no file here.
                if (file := self._files.get(entry.path)) is not None:
                    file.synced, file.unsynced = bytes(file.content), []
            case _:
                file = self._files.setdefault(entry.path, _File())
                if entry.call is not Call.MAKE:
                    file.apply(entry.offset, None if entry.call is Call.CUT else entry.content)

    def after_a_kill(self) -> dict[str, bytes]:
        """Returns the content by path if the program is killed now, and the machine continues."""
        return {path: bytes(file.content) for path, file in self._files.items()}

    def after_a_power_cut(self, kept: float) -> dict[str, bytes]:
        """Returns the content by path if the power fails now.

        Of what was not synced, the first part is on the disk (`kept`, from 0 to 1); its last write is torn at a sector.
        """
        found = {}
        for path, file in self._files.items():
            content = bytearray(file.synced)
            count = round(kept * len(file.unsynced))
            for number, (offset, change) in enumerate(file.unsynced[:count], 1):
                is_torn = change is not None and number == count and kept < 1
                part = len(change) // 2 // SECTOR_BYTES * SECTOR_BYTES if change is not None and is_torn else None
                _change(content, offset, change if change is None or part is None else change[:part])
            found[path] = bytes(content)
        return found


def write_image(image: Mapping[str, bytes], origin: Path, target: Path) -> None:
    """Writes the files of an image, which were under `origin`, into the folder `target`."""
    for path, content in image.items():
        file = target / Path(path).relative_to(origin)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(content)

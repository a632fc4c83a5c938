"""Measured memory of earlier loads, stored across restarts of the runner in a small file."""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from runner_svc.policy.memory_estimate import MemorySettings
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.memory")

MAX_ENTRIES = 256
"""Maximum number of entries by file and settings; the least recently loaded one is evicted."""
MAX_MEASUREMENTS = 4
"""Number of last measurements kept per entry."""
MAX_FILE_BYTES = 1024 * 1024
MAX_BYTES = 2**50
"""Largest measurement that is accepted."""


def learned_file(state_folder: Path, runner: str) -> Path:
    """Returns the path of a runner's file."""
    return state_folder / f"{runner}.memory.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """Identity of a model's file, which changes when the file is replaced."""

    path: str
    bytes: int
    """Total size of all parts."""
    modified_ns: int
    companions: "tuple[FileIdentity, ...]" = ()
    """Files that are loaded with it: its projector, its draft model."""


_Key = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
_Measured = Annotated[
    tuple[Annotated[int, msgspec.Meta(gt=0, le=MAX_BYTES)], ...],
    msgspec.Meta(min_length=1, max_length=MAX_MEASUREMENTS),
]
_Entries = Annotated[dict[_Key, _Measured], msgspec.Meta(max_length=MAX_ENTRIES)]
"""Measurements by file and settings, ordered by last load, latest last."""


class LearnedMemory:
    """Measurements by file and settings. Thread-safe. Every call may read or write the file, so call it in a thread.

    If the file cannot be read or written, measurements are lost, but loads do not fail.
    """

    def __init__(self, state_file: Path) -> None:
        self._file = state_file
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[int, ...]] | None = None

    def measurements(self, identity: FileIdentity, settings: MemorySettings) -> Sequence[int]:
        """Returns the memory in bytes of the last loads of this file with these settings; empty: none."""
        with self._lock:
            return self._known().get(_key(identity, settings), ())

    def learn(self, identity: FileIdentity, settings: MemorySettings, measured_bytes: int) -> None:
        """Records the memory of a load over all devices; impossible figures are ignored."""
        if not 0 < measured_bytes <= MAX_BYTES:
            return
        with self._lock:
            entries, key = self._known(), _key(identity, settings)
            entries[key] = (*entries.pop(key, ()), measured_bytes)[-MAX_MEASUREMENTS:]
            while len(entries) > MAX_ENTRIES:
                del entries[next(iter(entries))]
            self._save(entries)

    def _known(self) -> dict[str, tuple[int, ...]]:
        if self._entries is None:
            self._entries = self._read()
        return self._entries

    def _read(self) -> dict[str, tuple[int, ...]]:
        try:
            with self._file.open("rb") as file:
                # A larger file is truncated here, and then is not valid JSON.
                return dict(msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_Entries))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning(
                "learned memory of loads cannot be read; learning starts again", file=self._file.name, error=str(error)
            )
            return {}

    def _save(self, entries: dict[str, tuple[int, ...]]) -> None:
        try:
            replace_file(self._file, msgspec.json.encode(entries))
        except OSError as error:
            log.warning("learned memory of loads cannot be written", file=self._file.name, error=str(error))


def _key(identity: FileIdentity, settings: MemorySettings) -> str:
    taken_for = [getattr(settings, name) for name in settings.__slots__]
    own: list[object] = [*_words(identity), taken_for, *map(_words, identity.companions)]
    return hashlib.sha256(msgspec.json.encode(own)).hexdigest()


def _words(file: FileIdentity) -> list[object]:
    # A link may lead to a name that is not UTF-8.
    return [file.path.encode(errors="backslashreplace").decode(), file.bytes, file.modified_ns]

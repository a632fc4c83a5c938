"""The witness of issue times: a small file beside the database, which a restored database cannot take back in time."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from registry_svc.operations.policy.governance_marks import Marks

MAX_FILE_BYTES = 4096


class Witness(Protocol):
    """Keeps marks over restarts, apart from the database."""

    def read(self) -> Marks | None:
        """What was kept; None: nothing, or nothing that can be read."""
        ...

    def write(self, marks: Marks) -> None:
        """Keep `marks` instead. Raises OSError."""
        ...


class NoWitness:
    """Keeps nothing."""

    def read(self) -> None:
        """See Witness.read."""

    def write(self, marks: Marks) -> None:
        """See Witness.write."""


class WitnessFile:
    """See Witness. It is written without waiting for the disk.

    A file that a power cut spoilt counts as lost, and a lost one makes the gate stricter, never laxer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Marks | None:
        """See Witness.read."""
        try:
            with self._path.open("rb") as file:
                found: Any = json.loads(file.read(MAX_FILE_BYTES))
            newest, floor = int(found["newest_microseconds"]), float(found["refused_before"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        if newest < 0 or not math.isfinite(floor):
            return None
        return Marks(newest_microseconds=newest, floor=floor)

    def write(self, marks: Marks) -> None:
        """See Witness.write."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        text = json.dumps({"newest_microseconds": marks.newest_microseconds, "refused_before": marks.floor})
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            fresh.replace(self._path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()
            raise

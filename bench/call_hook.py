"""Counts the calls of a process's main thread. Copied as `sitecustomize.py` into the import path of any tree of weft.

TOGGLE begins to count, and the next one ends it and writes `$WEFT_BENCH_CALLS/<pid>.json`.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER_VARIABLE = "WEFT_BENCH_CALLS"
C_CALL = "c_call"
TOGGLE = signal.SIGRTMIN + 3
"""No part of weft uses it; SIGUSR2 makes a host start again."""


class CallCounter:
    """Counts calls by file and function; calls of C functions by the C function and the file that calls it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._counts: Counter[tuple[Any, Any]] = Counter()
        self._is_counting = False

    def toggle(self, _number: int, _frame: FrameType | None) -> None:
        """Handles the signal."""
        sys.setprofile(None if self._is_counting else self._count)
        if self._is_counting:
            self._write()
        self._is_counting = not self._is_counting

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._counts[frame.f_code, None] += 1
        elif event == C_CALL:
            self._counts[frame.f_code, getattr(argument, "__qualname__", repr(type(argument)))] += 1

    def _write(self) -> None:
        found = [
            [code.co_filename, code.co_qualname if called is None else called, called is None, number]
            for (code, called), number in self._counts.items()
        ]
        self._counts.clear()
        written = self._folder / f"{os.getpid()}.json"
        partial = written.with_suffix(".part")
        partial.write_text(json.dumps(found))
        partial.rename(written)


if __name__ == "sitecustomize" and FOLDER_VARIABLE in os.environ:
    signal.signal(TOGGLE, CallCounter(os.environ[FOLDER_VARIABLE]).toggle)

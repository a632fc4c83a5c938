"""What a program has started, and what of it still runs."""

import threading

from weft.gpu.process import is_alive, tree_of
from weft.gpu.snapshot import ProcessId

MAX_SEEN_PROCESSES = 4_096
"""Processes of one tree that are kept in mind; the oldest numbers first."""


class ProcessTree:
    """A process and everything that it has started and that still runs, also what has lost its parents since.

    What was started and lost its parents between two looks is not found. For several threads.
    """

    def __init__(self, root: ProcessId | None = None) -> None:
        self._lock = threading.Lock()
        self._root = root
        self._seen: set[ProcessId] = set()

    def begin(self, root: ProcessId) -> None:
        """Look at this process from now on."""
        with self._lock:
            self._root = root
            self._seen.add(root)

    def living(self) -> tuple[ProcessId, ...]:
        """Those that run now, the root first."""
        with self._lock:
            found = set(tree_of(self._root)) if self._root is not None else set()
            for process in sorted(self._seen - found):
                if is_alive(process):
                    found.update(tree_of(process))
            self._seen = set(sorted(found)[:MAX_SEEN_PROCESSES])
            return tuple(sorted(self._seen, key=lambda process: (process != self._root, process)))

"""Processor time of a process and of everything it started."""

from collections.abc import Collection
from contextlib import suppress

import psutil


class TreeTime:
    """Adds up the processor time of a tree whose members come and go; the sum never falls while the root lives."""

    def __init__(self) -> None:
        self._root: int | None = None
        self._spent: dict[psutil.Process, float] = {}
        self._ended_seconds = 0.0

    def seconds(self, root: int, members: Collection[int]) -> float:
        """User and system time so far of process `root` and of the processes `members`.

        What a member had used when it was last seen stays in the sum after its end. A new root begins anew.
        """
        if root != self._root:
            self._root, self._spent, self._ended_seconds = root, {}, 0.0
        spent: dict[psutil.Process, float] = {}
        for pid in {root, *members}:
            with suppress(psutil.Error):
                # Compares by id and start time: a number that passed on to another process is another key.
                process = psutil.Process(pid)
                times = process.cpu_times()
                spent[process] = times.user + times.system
        self._ended_seconds += sum(seconds for process, seconds in self._spent.items() if process not in spent)
        self._spent = spent
        return self._ended_seconds + sum(spent.values())

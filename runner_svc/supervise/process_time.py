"""Memory, processor time and GPU time of processes; GPU time comes from NVIDIA's management library (NVML).

GPU time is tested with fakes of the `pynvml` module and of the library behind it, not on hardware. NVML samples each
process's use of each GPU in percent of its multiprocessors; the samples are added up to seconds. It identifies
processes by the machine's ids: in a container with a PID namespace nothing is found and the time stays 0. A GPU without
these samples adds nothing. If no GPU has them, or NVML is missing, fails or hangs, the result is None ("unknown")
without a wait.
"""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import psutil

from weft.gpu.nvml import load_pynvml
from weft.gpu.observer import HANG_SECONDS, SingleFlightThread


class TreeTime:
    """Sums up the processor time of a process tree with changing members; the sum never falls while the root lives."""

    def __init__(self) -> None:
        self._root: int | None = None
        self._spent: dict[psutil.Process, float] = {}
        self._ended_seconds = 0.0

    def seconds(self, root: int, members: Collection[int]) -> float:
        """Returns the user and system time so far of process `root` and of the processes `members`.

        A member's last observed time stays in the sum after its end. A new root resets the sum.
        """
        if root != self._root:
            self._root, self._spent, self._ended_seconds = root, {}, 0.0
        spent: dict[psutil.Process, float] = {}
        for pid in {root, *members}:
            with suppress(psutil.Error):
                # Equal only for the same id and start time: a reused id is another key.
                process = psutil.Process(pid)
                times = process.cpu_times()
                spent[process] = times.user + times.system
        self._ended_seconds += sum(seconds for process, seconds in self._spent.items() if process not in spent)
        self._spent = spent
        return self._ended_seconds + sum(spent.values())


def resident_bytes(members: Collection[int]) -> int | None:
    """Returns the total resident memory of processes; None: none of them runs."""
    sizes: list[int] = []
    for pid in members:
        with suppress(psutil.Error):
            sizes.append(psutil.Process(pid).memory_info().rss)
    return sum(sizes) if sizes else None


__all__ = ["HANG_SECONDS", "GpuTime"]


class GpuTime:
    """Sums up the GPU time of a changing set of processes. Never blocks and never raises.

    Each reading runs in a separate thread, which may hang; at most one exists. A reading that takes HANG_SECONDS makes
    the GPU time unknown until it ends.
    """

    def __init__(
        self, load: Callable[[], Any] = load_pynvml, monotonic_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._module: Any = None
        self._absent = False
        self._seconds: float | None = None
        self._last_seen: dict[int, int] = {}
        self._reader = SingleFlightThread("gpu-time", monotonic_seconds)

    def seconds(self, process_ids: Collection[int]) -> float | None:
        """Returns the processes' GPU time over all GPUs as of the last reading, and starts another reading.

        Use before the second reading is not included. None: unknown.
        """
        if self._absent:
            return None
        if self._reader.is_alive():
            return None if self._reader.is_hung() else self._seconds
        known = self._seconds
        asked = frozenset(process_ids)
        self._reader.start_or_join(lambda: self._read(asked))
        return known

    def _read(self, process_ids: frozenset[int]) -> None:
        try:
            if self._module is None:
                self._module = self._load()
            numbers = range(self._module.nvmlDeviceGetCount())
            used = [seconds for number in numbers if (seconds := self._read_device(number, process_ids)) is not None]
        except Exception:  # noqa: BLE001 - any failure of the library makes the figure unknown
            self._absent = self._module is None
            self._seconds = None
        else:
            self._seconds = (self._seconds or 0.0) + sum(used) if used or not numbers else None

    def _read_device(self, number: int, process_ids: frozenset[int]) -> float | None:
        """Returns the use since the last reading; None: unknown on this GPU."""
        begin = self._last_seen.get(number, 0)
        try:
            handle = self._module.nvmlDeviceGetHandleByIndex(number)
            samples = sorted(self._samples(handle, begin), key=lambda sample: sample.timeStamp)
        except self._module.NVMLError:
            return None
        if samples:
            self._last_seen[number] = max(begin, samples[-1].timeStamp)
        if not begin:
            return 0.0  # the first samples only give NVML's time
        used, until = 0.0, dict.fromkeys(process_ids, begin)
        for sample in samples:
            if sample.pid in until and sample.timeStamp > until[sample.pid]:
                used += sample.smUtil / 100.0 * (sample.timeStamp - until[sample.pid]) / 1e6
                until[sample.pid] = sample.timeStamp
        return used

    def _samples(self, handle: Any, since_microseconds: int) -> list[Any]:
        try:
            return list(self._module.nvmlDeviceGetProcessUtilization(handle, since_microseconds))
        except self._module.NVMLError as error:
            # No samples since then: the GPU was not used.
            if error.value == self._module.NVML_ERROR_NOT_FOUND:
                return []
            raise

"""The use of a runner's host, as its reports have it."""

import math

import psutil

from runner_svc.policy.memory_estimate import MEBIBYTE
from weft.api.registry.v1 import runner_pb2
from weft.kernel.machine.machine_limits import busy_seconds, usable_memory, usable_processors
from weft.kernel.time.clock import Clock

SAMPLE_SECONDS = 10.0
CPU_STEP = 0.05
MEMORY_STEP_BYTES = 64 * MEBIBYTE
"""Smaller changes are not reported: each one is sent to the registry and to all who watch it."""


class HostMeter:
    """Samples the processors and the main memory of this host, at most every ten seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sampled_at = -math.inf
        self._use = runner_pb2.HostUse()
        self._busy, self._whole = self._processor_seconds()

    def use(self) -> runner_pb2.HostUse:
        """Returns the use of the host as last sampled."""
        now = self._clock.monotonic()
        if now - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = now
            (busy, whole), memory = self._processor_seconds(), usable_memory()
            share = (busy - self._busy) / (whole - self._whole) if whole > self._whole else 0.0
            self._busy, self._whole = busy, whole
            used = round((memory.total_bytes - memory.available_bytes) / MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
            self._use = runner_pb2.HostUse(
                cpu_count=usable_processors(),
                cpu_utilization=max(0.0, min(1.0, round(round(share / CPU_STEP) * CPU_STEP, 2))),
                memory_total_bytes=memory.total_bytes,
                memory_used_bytes=min(memory.total_bytes, used),
            )
        return self._use

    def _processor_seconds(self) -> tuple[float, float]:
        """Returns the seconds that the usable processors were busy, and all their seconds, since some start."""
        if (used := busy_seconds()) is not None:
            return used, self._clock.monotonic() * usable_processors()
        return _machine_seconds()


def _machine_seconds() -> tuple[float, float]:
    """Returns the seconds that all processors were busy, and all seconds, since the host started."""
    times = psutil.cpu_times()
    # The time of virtual machines is a part of the user time on Linux.
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return whole - times.idle - getattr(times, "iowait", 0.0), whole

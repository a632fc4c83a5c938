"""Computes the shares of requests in accelerator work, from device samples and engine calls.

For one device and one interval between two samples, if no foreign process uses the device:

    busy  = utilization of the later sample * length of the interval
    each part of the interval with the same calls gets  min(busy, active) * part / active  of the busy time and
    energy * part / length  of the energy, where `active` is the length of all parts with a call;
    the calls of one engine divide it evenly. Parts in which two engines have calls are unknown.

The shares of all calls never add up to more than the device's busy time and energy. docs/memory.md lists the errors of
this rule.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import TypeVar

MIN_SAMPLED_SHARE = 0.8
"""Minimum share of a call's time that samples must cover; below it the call's share is unknown."""


class Gap(IntEnum):
    """Why a share is unknown. Numbers as in `common.v1.DeviceUsage.Gap`."""

    NONE = 0
    NOT_SAMPLED = 1
    FOREIGN_PROCESS = 2
    OTHER_MODEL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """The state of a device at one time."""

    at: float
    utilization: float | None = None
    """Share of the time since the last sample in which it computed, 0 to 1; None: unknown."""
    energy_millijoules: int | None = None
    """Its energy counter; None: unknown."""
    engines: frozenset[str] = frozenset()
    """Engines of this runner that hold memory on it."""
    is_private: bool = False
    """Whether only processes of this runner's engines hold memory on it."""
    memory: Mapping[str, int | None] = field(default_factory=dict)
    """Used memory in bytes by engine; the empty name is all other processes; None: unknown."""


@dataclass(slots=True, eq=False, kw_only=True)
class EngineCall:
    """An engine call of a request."""

    engine: str
    began: float
    ended: float | None = None
    """None: still running."""


Call = TypeVar("Call", bound=EngineCall)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A call's share in the work of one or more devices."""

    seconds: float = 0.0
    millijoules: float | None = 0.0
    """None: unknown."""
    sampled_seconds: float = 0.0
    """Sampled part of the call's time."""
    gap: Gap = Gap.NONE

    def plus(self, other: "Share") -> "Share":
        """Returns the sum over two intervals. A value that is unknown in one is unknown in the sum."""
        energies = (self.millijoules, other.millijoules)
        return Share(
            seconds=self.seconds + other.seconds,
            millijoules=None if None in energies else sum(amount for amount in energies if amount is not None),
            sampled_seconds=self.sampled_seconds + other.sampled_seconds,
            gap=self.gap or other.gap,
        )

    def known_for(self, call_seconds: float) -> "Share":
        """Returns the share of a call with this duration; it gets a gap if too little of it was sampled."""
        if self.gap or (self.sampled_seconds > 0.0 and self.sampled_seconds >= MIN_SAMPLED_SHARE * call_seconds):
            return self
        return Share(gap=Gap.NOT_SAMPLED)


def shares_of_interval(first: DeviceSample, last: DeviceSample, calls: Sequence[Call]) -> Mapping[Call, Share]:
    """Returns each call's share in a device's work between two samples; calls without a share are missing."""
    length = last.at - first.at
    active = _active(first.at, last.at, calls)
    if length <= 0.0 or not active:
        return {}
    if last.utilization is None:
        # Leaves the interval unsampled.
        return {}
    active_seconds = sum(seconds for seconds, _ in active)
    busy = min(min(1.0, max(0.0, last.utilization)) * length, active_seconds)
    energy = _energy(first, last)
    shares: dict[Call, Share] = {}
    for seconds, running in active:
        gap = _gap(first, last, running)
        count = len(running)
        for call in running:
            share = Share(
                seconds=0.0 if gap else busy * seconds / active_seconds / count,
                millijoules=None if gap or energy is None else energy * seconds / length / count,
                sampled_seconds=seconds,
                gap=gap,
            )
            shares[call] = shares[call].plus(share) if call in shares else share
    return shares


def mean_utilization(samples: Sequence[DeviceSample], seconds: float) -> float | None:
    """Returns the mean utilization of the last `seconds` before the last sample; None: partly unknown."""
    began = samples[-1].at - seconds if samples else 0.0
    busy = sampled = 0.0
    for first, last in pairwise(samples):
        length = last.at - max(first.at, began)
        if length > 0.0:
            if last.utilization is None:
                return None
            busy, sampled = busy + last.utilization * length, sampled + length
    return busy / sampled if sampled else None


def over_devices(shares: Iterable[Share]) -> Share:
    """Returns a call's total share over its devices; unknown if it is unknown on one of them."""
    total = Share()
    for share in shares:
        total = total.plus(share)
    return Share(gap=total.gap) if total.gap else total


def _active(began: float, ended: float, calls: Sequence[Call]) -> list[tuple[float, list[Call]]]:
    """Returns the parts of a period that have calls: their lengths in seconds, and the calls."""
    present = [call for call in calls if call.began < ended and (call.ended is None or call.ended > began)]
    marks = {began, ended}
    for call in present:
        marks.add(max(began, call.began))
        marks.add(ended if call.ended is None else min(ended, call.ended))
    parts: list[tuple[float, list[Call]]] = []
    for start, end in pairwise(sorted(marks)):
        running = [call for call in present if call.began <= start and (call.ended is None or call.ended >= end)]
        if running:
            parts.append((end - start, running))
    return parts


def _energy(first: DeviceSample, last: DeviceSample) -> int | None:
    """Returns the energy between two samples; None: unknown, for example after a counter reset."""
    if first.energy_millijoules is None or last.energy_millijoules is None:
        return None
    spent = last.energy_millijoules - first.energy_millijoules
    return spent if spent >= 0 else None


def _gap(first: DeviceSample, last: DeviceSample, calls: Sequence[EngineCall]) -> Gap:
    engines = {call.engine for call in calls}
    if not (first.is_private and last.is_private) or not engines <= last.engines:
        return Gap.FOREIGN_PROCESS
    return Gap.OTHER_MODEL if len(engines) > 1 else Gap.NONE

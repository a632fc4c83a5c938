"""When a runner counts as alive, when as inactive, and when it is forgotten.

    OpenSession ──▶ ACTIVE ──silent for inactive_after──▶ SILENT ──inactive for delete_after──▶ (gone)
                     ▲  │                                  │                                      ▲
                     │  └──CloseSession──▶ CLOSED ─────────┼──inactive for delete_after───────────┘
                     └──────────Heartbeat──────────────────┘

OpenSession leads from everywhere to ACTIVE. All times are seconds of one monotonic clock.
"""

from dataclasses import dataclass
from enum import Enum, auto

from registry_svc.domain import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long silence is put up with."""

    inactive_after_seconds: float
    delete_after_seconds: float
    grace_until_monotonic: float
    """Nobody expires before this moment: runners could not reach a registry that was away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The last that is known of a runner's life."""

    standing: Standing
    heard_monotonic: float
    """When it was last heard of."""
    lost_monotonic: float | None
    """When it became inactive; None while it is active."""

    @property
    def active(self) -> bool:
        """Whether it counts as alive."""
        return self.standing is Standing.ACTIVE


class Verdict(Enum):
    """What is to be done about a runner now."""

    KEEP = auto()
    SILENCE = auto()
    FORGET = auto()


def judge(pulse: Pulse, limits: LivenessLimits, now: float) -> Verdict:
    """What `pulse` calls for at `now`."""
    if pulse.lost_monotonic is None:
        deadline = max(pulse.heard_monotonic + limits.inactive_after_seconds, limits.grace_until_monotonic)
        return Verdict.SILENCE if now >= deadline else Verdict.KEEP
    deadline = max(pulse.lost_monotonic + limits.delete_after_seconds, limits.grace_until_monotonic)
    return Verdict.FORGET if now >= deadline else Verdict.KEEP


def heard(now: float) -> Pulse:
    """The pulse of a runner that has just been heard: alive, whatever it was before."""
    return Pulse(standing=Standing.ACTIVE, heard_monotonic=now, lost_monotonic=None)


def lost(pulse: Pulse, standing: Standing, now: float) -> Pulse:
    """The pulse of a runner that is inactive from `now` on; one that already was keeps its older moment."""
    since = now if pulse.lost_monotonic is None else pulse.lost_monotonic
    return Pulse(standing=standing, heard_monotonic=pulse.heard_monotonic, lost_monotonic=since)


def resumed(standing: Standing, heard_ago_seconds: float, lost_ago_seconds: float | None, now: float) -> Pulse:
    """The pulse of a runner read back after a restart.

    Ages come from the wall clock of two lives and may be negative after it was set back; then they count as zero.
    """
    return Pulse(
        standing=standing,
        heard_monotonic=now - max(0.0, heard_ago_seconds),
        lost_monotonic=None if lost_ago_seconds is None else now - max(0.0, lost_ago_seconds),
    )

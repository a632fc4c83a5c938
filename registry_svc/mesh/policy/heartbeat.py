"""Sessions and heartbeats: which are valid, and when a runner without heartbeats counts as inactive and is removed.

    OpenSession ──▶ ACTIVE ──silent for inactive_after──▶ SILENT ──inactive for delete_after──▶ (gone)
                     ▲  │                                  │                                      ▲
                     │  └──CloseSession──▶ CLOSED ─────────┼──inactive for delete_after───────────┘
                     └──────────Heartbeat──────────────────┘

OpenSession leads from everywhere to ACTIVE. All times are seconds of one monotonic clock.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from registry_svc.mesh.domain import Session, Standing
from registry_svc.mesh.policy.namespace import Claim, sessions_to_end
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long silence is put up with."""

    inactive_after_seconds: float
    delete_after_seconds: float
    back_since_monotonic: float
    """When the registry became reachable again."""
    grace_seconds: float
    """No runner expires for this long after that: runners could not reach a registry that was down."""
    spread_seconds: float
    """Expiries due by the end of that grace are spread over this long; each runner has its own moment."""
    keep_seconds: float
    """Replaces `delete_after_seconds` for a runner whose host the mesh can wake, if it is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Liveness of a runner."""

    standing: Standing
    heard_monotonic: float
    """When its last heartbeat arrived."""
    lost_monotonic: float | None
    """When it became inactive; None while it is active."""

    @property
    def active(self) -> bool:
        """Whether it counts as alive."""
        return self.standing is Standing.ACTIVE


class HeartbeatKind(Enum):
    """ResourceKind of a valid heartbeat."""

    FRESH = auto()
    """Newer than all before: its report counts."""
    REPEATED = auto()
    """A repeat of the newest one: proves liveness, its report is known."""


def validate_heartbeat(
    incarnation: str, sequence: int, session: Session, standing: Standing, last_sequence: int | None
) -> HeartbeatKind:
    """Return the kind of a heartbeat of an incarnation; raises STALE_HEARTBEAT or SESSION_UNKNOWN when it is not valid.

    `last_sequence` is the newest one of this incarnation; None: none yet, or the registry restarted since.
    """
    if incarnation != session.incarnation:
        raise WeftError(
            Reason.STALE_HEARTBEAT,
            "another incarnation of this runner has opened the session since",
            metadata={"runner": session.runner},
        )
    if standing is Standing.CLOSED:
        raise unknown_session()
    if last_sequence is None or sequence > last_sequence:
        return HeartbeatKind.FRESH
    if sequence == last_sequence:
        return HeartbeatKind.REPEATED
    raise WeftError(
        Reason.STALE_HEARTBEAT,
        f"heartbeat {sequence} is older than {last_sequence}, which was seen before",
        metadata={"runner": session.runner},
    )


class Verdict(Enum):
    """What to do about a runner now."""

    KEEP = auto()
    SILENCE = auto()
    FORGET = auto()


def judge(pulse: Pulse, limits: LivenessLimits, now: float, *, share: float = 0.0, wakeable: bool = False) -> Verdict:
    """Return what to do at `now`.

    `share` is the runner's place in the spread, from 0 to 1; `wakeable` is whether the mesh can wake its host.
    """
    if pulse.lost_monotonic is None:
        deadline = _deadline(pulse.heard_monotonic, limits.inactive_after_seconds, limits, share)
        return Verdict.SILENCE if now >= deadline else Verdict.KEEP
    patience = limits.delete_after_seconds
    if wakeable:
        patience = max(patience, limits.keep_seconds)
    return Verdict.FORGET if now >= _deadline(pulse.lost_monotonic, patience, limits, share) else Verdict.KEEP


def share_of(name: str) -> float:
    """Return a runner's place in a spread, from 0 to just below 1: fixed for a name, uniform over many names."""
    return zlib.crc32(name.encode()) / 2**32


def _deadline(since: float, patience_seconds: float, limits: LivenessLimits, share: float) -> float:
    grace_until = limits.back_since_monotonic + limits.grace_seconds
    # A runner heard since the registry is back falls due at a moment of its own anyway.
    if since < limits.back_since_monotonic:
        grace_until += share * limits.spread_seconds
    return max(since + patience_seconds, grace_until)


def heard(now: float) -> Pulse:
    """Return the liveness of a runner whose heartbeat just arrived: active, whatever it was before."""
    return Pulse(standing=Standing.ACTIVE, heard_monotonic=now, lost_monotonic=None)


def lost(pulse: Pulse, standing: Standing, now: float) -> Pulse:
    """Return the liveness of a runner inactive from `now` on; an inactive one keeps its earlier moment."""
    since = now if pulse.lost_monotonic is None else pulse.lost_monotonic
    return Pulse(standing=standing, heard_monotonic=pulse.heard_monotonic, lost_monotonic=since)


def resumed(standing: Standing, heard_ago_seconds: float, lost_ago_seconds: float | None, now: float) -> Pulse:
    """Return the liveness of a runner loaded after a restart.

    Ages come from the wall clock of two processes and may be negative after it was set back; then they count as zero.
    """
    return Pulse(
        standing=standing,
        heard_monotonic=now - max(0.0, heard_ago_seconds),
        lost_monotonic=None if lost_ago_seconds is None else now - max(0.0, lost_ago_seconds),
    )


class Retirement(IntEnum):
    """Result of retiring a runner; numbers as in `registry.v1.RetireSessionResponse.Outcome`."""

    RETIRED = 1
    """It is forgotten, with all that it published."""
    LIVES = 2
    """It may still answer: it is forgotten once it is closed or silent."""
    HOLDS_MEMORY = 3
    """Memory is booked for it: it is inactive, and forgotten once that memory is free."""
    UNKNOWN = 4
    """There is no such session: it was forgotten before."""


def decide_retirement(*, standing: Standing, reported: bool, process_ended: bool, lease_count: int) -> Retirement:
    """Decide whether a retired runner is deleted now.

    `reported`: whether it sent a report since the registry started. `process_ended`: whether its owner states that its
    process has ended, which a report refutes. `lease_count`: leases of accelerator memory that it holds, also those
    without a process: the memory may still be in use.
    """
    if standing is Standing.ACTIVE and (reported or not process_ended):
        return Retirement.LIVES
    return Retirement.HOLDS_MEMORY if lease_count else Retirement.RETIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The OpenSession of an incarnation of a runner."""

    request_id: str
    runner: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The session that a row belongs to, and whether its runner is alive."""

    session: Session
    live: bool


@dataclass(frozen=True, slots=True)
class Repeated:
    """The call was answered before; answer the same."""

    session: Session


@dataclass(frozen=True, slots=True)
class Admitted:
    """The names are free for this session."""

    adopted: Session | None
    """The earlier incarnation whose id and rows it keeps; None: a new session."""
    evicted: tuple[str, ...]
    """Dead sessions, by id, that held a name it gets and end now, with all their rows."""


def decide_opening(
    opening: Opening, *, own: Holder | None, runner_holder: Holder | None, claims: Sequence[Claim]
) -> Repeated | Admitted:
    """Decide whether `opening` gets its names; raises ALREADY_EXISTS for a name that another session keeps.

    `own` is the session it names as its earlier incarnation, if known; `runner_holder` is the session that holds the
    name of its runner; `claims` are all names it claims. A dead session loses a model's or an agent's name alone, but
    with the runner's name everything: a runner is one session.
    """
    if runner_holder is not None and is_repeat(opening, runner_holder.session):
        return Repeated(runner_holder.session)
    adopted = None if own is None else own.session
    if adopted is not None and own is not None and own.live and adopted.runner != opening.runner:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"this session is open for the live runner {adopted.runner!r}; close it before the runner changes its name",
            metadata={"owner_kind": ResourceKind.RUNNER.value, ResourceKind.RUNNER.value: adopted.runner},
        )
    ended = sessions_to_end(claims, own_session="" if adopted is None else adopted.id, runner=opening.runner)
    return Admitted(adopted=adopted, evicted=tuple(sorted(ended)))


def is_repeat(opening: Opening, session: Session) -> bool:
    """Whether `opening` is a call that `session` has answered already."""
    return session.request_id == opening.request_id and session.incarnation == opening.incarnation


def unknown_session() -> WeftError:
    """The error for a session that is not, or no longer, open."""
    return WeftError(Reason.SESSION_UNKNOWN, "this session is not open; open a new one")

"""Decides which sessions and heartbeats are valid, and when a runner without heartbeats is inactive or removed.

    OpenSession ──▶ ACTIVE ──silent for inactive_after──▶ SILENT ──inactive for delete_after──▶ (gone)
                     ▲  │                                  │                                      ▲
                     │  └──CloseSession──▶ CLOSED ─────────┼──inactive for delete_after───────────┘
                     └──────────Heartbeat──────────────────┘

OpenSession leads from every state to ACTIVE. All times are seconds of one monotonic clock.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from registry_svc.mesh.policy.namespace import NameOwners, sessions_to_end
from registry_svc.mesh.states import Session, Standing
from registry_svc.registry_config import RegistryConfig
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Liveness of a runner."""

    standing: Standing
    alive_monotonic: float
    """When its last heartbeat arrived."""
    lost_monotonic: float | None
    """When it became inactive; None while active."""

    @property
    def active(self) -> bool:
        """Whether the runner counts as alive."""
        return self.standing is Standing.ACTIVE


class HeartbeatKind(Enum):
    """Kind of a valid heartbeat."""

    FRESH = auto()
    """Newer than all before; its report is used."""
    REPEATED = auto()
    """A repeat of the newest one; proves liveness, but its report is known."""


def validate_heartbeat(
    incarnation: str, sequence: int, session: Session, standing: Standing, last_sequence: int | None
) -> HeartbeatKind:
    """Returns the kind of a heartbeat. Raises STALE_HEARTBEAT or SESSION_UNKNOWN if it is not valid.

    `last_sequence` is the newest one of this incarnation; None: none yet, or the registry has restarted since.
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
    """What to do with a runner."""

    KEEP = auto()
    SILENCE = auto()
    FORGET = auto()


def judge(
    pulse: Pulse,
    config: RegistryConfig,
    back_since: float,
    now: float,
    *,
    share: float = 0.0,
    wakeable: bool = False,
) -> Verdict:
    """Returns what to do with a runner at `now`.

    `back_since` is when the registry became reachable again: no runner expires during the grace period after it, and
    expiries due by its end are spread. `share` is the position in the spread, from 0 to 1; `wakeable` is whether the
    mesh can wake the runner's host.
    """
    is_active = pulse.lost_monotonic is None
    since = pulse.alive_monotonic if pulse.lost_monotonic is None else pulse.lost_monotonic
    patience = config.inactive_after_seconds if is_active else config.delete_after_seconds
    if wakeable and not is_active:
        patience = max(patience, config.hibernating_keep_seconds)
    grace_until = back_since + config.restart_grace_seconds
    # A runner that sent a heartbeat since the registry is back does not need the spread.
    if since < back_since:
        grace_until += share * config.restart_spread_seconds
    if now < max(since + patience, grace_until):
        return Verdict.KEEP
    return Verdict.SILENCE if is_active else Verdict.FORGET


def share_of(name: str) -> float:
    """Returns a runner's position in a spread, 0 <= x < 1: constant for a name, uniform over many names."""
    return zlib.crc32(name.encode()) / 2**32


def alive_pulse(now: float) -> Pulse:
    """Returns the liveness of a runner after a heartbeat at `now`: active."""
    return Pulse(standing=Standing.ACTIVE, alive_monotonic=now, lost_monotonic=None)


def lost(pulse: Pulse, standing: Standing, now: float) -> Pulse:
    """Returns the liveness of a runner that is inactive from `now` on, or since earlier."""
    since = now if pulse.lost_monotonic is None else pulse.lost_monotonic
    return Pulse(standing=standing, alive_monotonic=pulse.alive_monotonic, lost_monotonic=since)


def resumed(standing: Standing, heard_ago_seconds: float, lost_ago_seconds: float | None, now: float) -> Pulse:
    """Returns the liveness of a runner loaded after a restart.

    Ages are differences of wall clock times; negative ones, after the clock was set back, count as zero.
    """
    return Pulse(
        standing=standing,
        alive_monotonic=now - max(0.0, heard_ago_seconds),
        lost_monotonic=None if lost_ago_seconds is None else now - max(0.0, lost_ago_seconds),
    )


class Retirement(IntEnum):
    """Result of retiring a runner; numbers as in `registry.v1.RetireSessionResponse.Outcome`."""

    RETIRED = 1
    """It is deleted, with all that it published."""
    LIVES = 2
    """It may still answer; it is deleted once it is closed or silent."""
    HOLDS_MEMORY = 3
    """It holds leases; it is inactive, and deleted once they have ended."""
    UNKNOWN = 4
    """There is no such session: it was deleted before."""


def decide_retirement(*, standing: Standing, reported: bool, process_ended: bool, lease_count: int) -> Retirement:
    """Decides whether a retired runner is deleted now.

    `reported`: whether it has sent a report since the registry started. `process_ended`: whether its owner states that
    its process has ended, which a report refutes. `lease_count` includes leases without a process, since their memory
    may still be in use.
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
    address: str = ""
    """Where the mesh reaches the runner: that of its relay, if it dials out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The session that owns a resource, and whether its runner is alive."""

    session: Session
    live: bool
    address: str = ""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The call was answered before; give the same answer."""

    session: Session


@dataclass(frozen=True, slots=True)
class Admitted:
    """The names are free for this session."""

    adopted: Session | None
    """Earlier incarnation, with the id and resources that it keeps; None: a new session."""
    evicted: tuple[str, ...]
    """Ids of dead sessions that held a claimed name and end now, with all their resources."""


def decide_opening(
    opening: Opening, *, own: Holder | None, runner_holder: Holder | None, wanted: Sequence[NameOwners]
) -> Repeated | Admitted:
    """Decides whether `opening` gets its names. Raises ALREADY_EXISTS for a name that another session keeps.

    `own` is the earlier incarnation that it specifies, if known; `runner_holder` is the session with its runner's name;
    `wanted` are all names that it claims. A dead session only loses the names of models and agents, but ends if it
    loses the runner's name, since a runner is one session.
    """
    if runner_holder is not None and is_repeat(opening, runner_holder.session):
        if opening.address == runner_holder.address:
            return Repeated(runner_holder.session)
        # The first answer was lost together with its relay, and the runner repeats the call through another one.
        own = runner_holder
    adopted = None if own is None else own.session
    if adopted is not None and own is not None and own.live and adopted.runner != opening.runner:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"this session is open for the live runner {adopted.runner!r}; close it before the runner changes its name",
            metadata={"owner_kind": ResourceKind.RUNNER.value, ResourceKind.RUNNER.value: adopted.runner},
        )
    ended = sessions_to_end(wanted, own_session="" if adopted is None else adopted.id, runner=opening.runner)
    return Admitted(adopted=adopted, evicted=tuple(sorted(ended)))


def is_repeat(opening: Opening, session: Session) -> bool:
    """Whether `opening` repeats the call that created `session`."""
    return session.request_id == opening.request_id and session.incarnation == opening.incarnation


def unknown_session() -> WeftError:
    """Returns the error for a session that is not open."""
    return WeftError(Reason.SESSION_UNKNOWN, "this session is not open; open a new one")

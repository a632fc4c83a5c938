"""Who may open a session under which names, and which heartbeats count."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from registry_svc.domain import Heartbeat, Opening, Session, Standing
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


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
    """The earlier life whose id and rows it keeps; None: a new session."""
    evicted: Session | None
    """A dead session that held the runner's name and ends now, with all its rows."""


def decide_opening(
    opening: Opening, *, own: Holder | None, runner_holder: Holder | None, model_holders: Mapping[str, Holder]
) -> Repeated | Admitted:
    """Whether `opening` may have its names; raises ALREADY_EXISTS when one belongs to another live session.

    `own` is the session it names as its earlier life, if that is known; `runner_holder` and `model_holders` are the
    sessions that hold the names it asks for. A dead session loses a model's name alone, but with the runner's name
    everything: a runner is one session.
    """
    if runner_holder is not None and _is_repeat(opening, runner_holder.session):
        return Repeated(runner_holder.session)
    adopted = None if own is None else own.session
    if own is not None and own.live and own.session.runner != opening.profile.name:
        raise _taken("session", own.session.runner, "is open for the live runner of this name")
    if runner_holder is not None and _is_foreign(runner_holder, adopted):
        raise _taken("runner", opening.profile.name, "belongs to another live session")
    for name, holder in model_holders.items():
        if _is_foreign(holder, adopted):
            raise _taken("model", name, f"belongs to the live runner {holder.session.runner!r}")
    holds_name = None if runner_holder is None else runner_holder.session
    same = holds_name is None or (adopted is not None and holds_name.id == adopted.id)
    return Admitted(adopted=adopted, evicted=None if same else holds_name)


def _is_repeat(opening: Opening, session: Session) -> bool:
    return session.request_id == opening.request_id and session.incarnation == opening.profile.incarnation


def _is_foreign(holder: Holder, adopted: Session | None) -> bool:
    return holder.live and (adopted is None or holder.session.id != adopted.id)


def _taken(kind: str, name: str, why: str) -> WeftError:
    return WeftError(Reason.ALREADY_EXISTS, f"{kind} {name!r} {why}", metadata={kind: name})


class Hearing(Enum):
    """What a heartbeat is worth."""

    FRESH = auto()
    """Newer than all before: its report counts."""
    REPEATED = auto()
    """The newest one again: a sign of life, its report is known."""


def decide_hearing(beat: Heartbeat, session: Session, standing: Standing, last_sequence: int | None) -> Hearing:
    """What `beat` is worth to its session; raises STALE_HEARTBEAT or SESSION_UNKNOWN when nothing.

    `last_sequence` is the newest one seen of this incarnation; None: none yet, or the registry restarted since.
    """
    if beat.incarnation != session.incarnation:
        raise WeftError(
            Reason.STALE_HEARTBEAT,
            "another incarnation of this runner has opened the session since",
            metadata={"runner": session.runner},
        )
    if standing is Standing.CLOSED:
        raise unknown_session()
    if last_sequence is None or beat.sequence > last_sequence:
        return Hearing.FRESH
    if beat.sequence == last_sequence:
        return Hearing.REPEATED
    raise WeftError(
        Reason.STALE_HEARTBEAT,
        f"heartbeat {beat.sequence} is older than {last_sequence}, which was seen before",
        metadata={"runner": session.runner},
    )


def unknown_session() -> WeftError:
    """The error for a session that is not, or no longer, open."""
    return WeftError(Reason.SESSION_UNKNOWN, "this session is not open; open a new one")

"""Decides which session may open under which names."""

from collections.abc import Sequence
from dataclasses import dataclass

from registry_svc.mesh.domain import Kind, Opening, Session
from registry_svc.mesh.policy.namespace import Claim, sessions_to_end
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
    if adopted is not None and own is not None and own.live and adopted.runner != opening.profile.name:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"this session is open for the live runner {adopted.runner!r}; close it before the runner changes its name",
            metadata={"owner_kind": Kind.RUNNER.value, Kind.RUNNER.value: adopted.runner},
        )
    ended = sessions_to_end(claims, own_session="" if adopted is None else adopted.id, runner=opening.profile.name)
    return Admitted(adopted=adopted, evicted=tuple(sorted(ended)))


def is_repeat(opening: Opening, session: Session) -> bool:
    """Whether `opening` is a call that `session` has answered already."""
    return session.request_id == opening.request_id and session.incarnation == opening.profile.incarnation


def unknown_session() -> WeftError:
    """The error for a session that is not, or no longer, open."""
    return WeftError(Reason.SESSION_UNKNOWN, "this session is not open; open a new one")

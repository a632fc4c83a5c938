"""The life of an operation: what it is, which steps it may take, and when it is forgotten.

    PENDING ──▶ RUNNING ──▶ SUCCEEDED | FAILED | CANCELLED
       └───────────────────▶ FAILED | CANCELLED

An operation that has ended never changes again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import IntEnum

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

OPERATION_PREFIX = "operations/"


class OperationState(IntEnum):
    """State of an operation; numbers as in `operations.v1.Operation.State`."""

    PENDING = 1
    RUNNING = 2
    SUCCEEDED = 3
    FAILED = 4
    CANCELLED = 5


_ENDED = frozenset({OperationState.SUCCEEDED, OperationState.FAILED, OperationState.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernedOperation:
    """Governed work on the mesh, as far as it is kept on disk."""

    id: str
    number: int = 0
    """Its place in the order of acceptance, from 1; 0: not saved yet."""
    request_id: str
    action: bytes
    """`operations.v1.OperationAction`, serialized deterministically; these bytes were signed."""
    state: OperationState = OperationState.PENDING
    requested_by: str
    signers: tuple[str, ...] = ()
    runner: str = ""
    """The runner that carries it out; empty until it is chosen, and for work on several."""
    reason: Reason = Reason.UNSPECIFIED
    """Why it failed."""
    detail: str = ""
    """What went wrong, as text."""
    result: bytes = b""
    """`operations.v1.OperationResult`, serialized. Until the end it names the models whose load was begun for it, so
    that a cancellation after a restart undoes them."""
    cancel_requested: bool = False
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def name(self) -> str:
        """As the wire calls it."""
        return OPERATION_PREFIX + self.id

    @property
    def ended(self) -> bool:
        """Whether it will never change again."""
        return self.state in _ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationProgress:
    """Progress of an operation, which is not stored."""

    stage: str = ""
    """Such as "waiting for memory"."""
    detail: str = ""
    share: float | None = None
    """Share done, 0 to 1; None: unknown."""
    ends_at: float | None = None
    """When it will be done, in seconds of the process's clock; None: unknown."""
    done_bytes: int | None = None
    """Of a pull: bytes of all files that are here; None: unknown, or it pulls nothing."""
    total_bytes: int | None = None
    """Of a pull: bytes of all files; None: unknown, or it pulls nothing."""
    digest: str = ""
    """Of a pull: "sha256:" and the digest of the file that is loaded now; empty: unknown, or it pulls nothing."""


NO_PROGRESS = OperationProgress()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an operation ends."""

    state: OperationState
    reason: Reason = Reason.UNSPECIFIED
    detail: str = ""
    result: bytes = b""


class WrongStepError(Exception):
    """A step that the life cycle of an operation does not have: a programming error."""


def started(operation: GovernedOperation, at: datetime) -> GovernedOperation:
    """Return the operation as running. One resumed after a restart keeps its first start time."""
    if operation.ended:
        raise WrongStepError(f"{operation.state.name} to RUNNING")
    return replace(operation, state=OperationState.RUNNING, started_at=operation.started_at or at)


def assigned(operation: GovernedOperation, runner: str) -> GovernedOperation:
    """One runner carries it out."""
    if operation.ended:
        raise WrongStepError(f"{operation.state.name} to a runner")
    return replace(operation, runner=runner)


def cancel_requested(operation: GovernedOperation) -> GovernedOperation:
    """Return the operation with a cancellation requested; an ended one stays as it is."""
    return operation if operation.ended else replace(operation, cancel_requested=True)


def ended(operation: GovernedOperation, ending: Ending, at: datetime) -> GovernedOperation:
    """Return the operation as ended."""
    if operation.ended or ending.state not in _ENDED:
        raise WrongStepError(f"{operation.state.name} to {ending.state.name}")
    if ending.state is OperationState.SUCCEEDED and operation.state is not OperationState.RUNNING:
        raise WrongStepError("PENDING to SUCCEEDED")
    return replace(
        operation,
        state=ending.state,
        reason=ending.reason,
        detail=ending.detail,
        result=ending.result,
        ended_at=at,
    )


def require_same_action(earlier: GovernedOperation, action: bytes) -> None:
    """Raise ALREADY_EXISTS when the request id of `earlier` is used for another action."""
    if earlier.action != action:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            "this request_id was used for another operation; use a different one for each",
            metadata={"operation": earlier.name},
        )


def require_place(unfinished: int, max_unfinished: int) -> None:
    """Raise TOO_MANY_RESOURCES when no further operation may wait."""
    if unfinished >= max_unfinished:
        raise WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"{max_unfinished} operations wait or run already; try again when some have ended",
            metadata={"limit": str(max_unfinished)},
        )


def seconds_left(operation: GovernedOperation, now: datetime, timeout_seconds: float) -> float:
    """How long a running operation may still take; a clock that was set back gives it no more than the whole."""
    if operation.started_at is None:
        return timeout_seconds
    spent = (now - operation.started_at).total_seconds()
    return min(max(timeout_seconds - spent, 0.0), timeout_seconds)


def forgotten_before(now: datetime, keep_seconds: float) -> datetime:
    """Operations that ended before this are forgotten."""
    return now - timedelta(seconds=keep_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An operation that waits or runs."""

    id: str
    subjects: frozenset[str]
    """Names of the models it changes; empty: it conflicts with no other."""
    running: bool
    after: frozenset[str] = frozenset()
    """Ids of the operations that it waits for; those that have ended do not count."""


def startable(unfinished: Iterable[Unfinished], max_running: int) -> list[str]:
    """Return the ids of the operations that may start now. `unfinished` is in order of acceptance.

    A waiting operation holds its subjects too: later ones must not overtake it, or it could wait without end.
    """
    waiting_or_running = list(unfinished)
    room = max_running - sum(each.running for each in waiting_or_running)
    ids = {each.id for each in waiting_or_running}
    held: set[str] = set()
    chosen: list[str] = []
    for each in waiting_or_running:
        if room <= 0:
            break
        if not each.running and held.isdisjoint(each.subjects) and ids.isdisjoint(each.after):
            chosen.append(each.id)
            room -= 1
        held |= each.subjects
    return chosen

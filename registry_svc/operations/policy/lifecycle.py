"""The life cycle of operations: states, transitions and expiry.

    PENDING ──▶ RUNNING ──▶ SUCCEEDED | FAILED | CANCELLED
       └───────────────────▶ FAILED | CANCELLED

An ended operation never changes again.
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
    """The stored part of governed work on the mesh."""

    id: str
    number: int = 0
    """Number in order of acceptance, from 1; 0: not saved yet."""
    request_id: str
    action: bytes
    """`operations.v1.OperationAction`, serialized deterministically; these bytes were signed."""
    state: OperationState = OperationState.PENDING
    requested_by: str
    signers: tuple[str, ...] = ()
    runner: str = ""
    """The runner that executes it; empty until it is chosen, and for work on several runners."""
    reason: Reason = Reason.UNSPECIFIED
    """Why it failed."""
    detail: str = ""
    """Text of the failure."""
    result: bytes = b""
    """`operations.v1.OperationResult`, serialized. Until the end it has the models with a load that was begun, so that
    a cancellation after a restart undoes them."""
    cancel_requested: bool = False
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def name(self) -> str:
        """Resource name on the wire."""
        return OPERATION_PREFIX + self.id

    @property
    def ended(self) -> bool:
        """Whether it has ended, and never changes again."""
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
    """Estimated end, in seconds of the process's monotonic clock; None: unknown."""
    done_bytes: int | None = None
    """Pulled bytes of all files; None: unknown, or not a pull."""
    total_bytes: int | None = None
    """Total bytes of all files of a pull; None: unknown, or not a pull."""
    digest: str = ""
    """"sha256:" and the digest of the file that is being pulled; empty: unknown, or not a pull."""


NO_PROGRESS = OperationProgress()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an operation ends."""

    state: OperationState
    reason: Reason = Reason.UNSPECIFIED
    detail: str = ""
    result: bytes = b""


class WrongStepError(Exception):
    """An invalid transition of an operation: a programming error."""


def started(operation: GovernedOperation, at: datetime) -> GovernedOperation:
    """Returns the operation as running. A resumed one keeps its first start time."""
    if operation.ended:
        raise WrongStepError(f"{operation.state.name} to RUNNING")
    return replace(operation, state=OperationState.RUNNING, started_at=operation.started_at or at)


def assigned(operation: GovernedOperation, runner: str) -> GovernedOperation:
    """Returns the operation with its runner."""
    if operation.ended:
        raise WrongStepError(f"{operation.state.name} to a runner")
    return replace(operation, runner=runner)


def cancel_requested(operation: GovernedOperation) -> GovernedOperation:
    """Returns the operation with a cancellation requested; an ended one is unchanged."""
    return operation if operation.ended else replace(operation, cancel_requested=True)


def ended(operation: GovernedOperation, ending: Ending, at: datetime) -> GovernedOperation:
    """Returns the operation as ended."""
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
    """Raises ALREADY_EXISTS if the request id of `earlier` is used for another action."""
    if earlier.action != action:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            "this request_id was used for another operation; use a different one for each",
            metadata={"operation": earlier.name},
        )


def require_place(unfinished: int, max_unfinished: int) -> None:
    """Raises TOO_MANY_RESOURCES if `max_unfinished` operations are unfinished."""
    if unfinished >= max_unfinished:
        raise WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"{max_unfinished} operations wait or run already; try again when some have ended",
            metadata={"limit": str(max_unfinished)},
        )


def seconds_left(operation: GovernedOperation, now: datetime, timeout_seconds: float) -> float:
    """Returns how long an operation may still take, at most `timeout_seconds` even if the clock was set back."""
    if operation.started_at is None:
        return timeout_seconds
    spent = (now - operation.started_at).total_seconds()
    return min(max(timeout_seconds - spent, 0.0), timeout_seconds)


def forgotten_before(now: datetime, keep_seconds: float) -> datetime:
    """Returns the time before which ended operations are deleted."""
    return now - timedelta(seconds=keep_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A waiting or running operation."""

    id: str
    subjects: frozenset[str]
    """Names that it changes; empty: it conflicts with no other."""
    running: bool
    after: frozenset[str] = frozenset()
    """Ids of operations that it waits for; ended ones are ignored."""


def startable(unfinished: Iterable[Unfinished], max_running: int) -> list[str]:
    """Returns the ids of operations that may start now. `unfinished` is in order of acceptance.

    A waiting operation also holds its subjects, so that later ones cannot overtake it and make it starve.
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

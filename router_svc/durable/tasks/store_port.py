"""The port of whoever keeps tasks: SQLite or PostgreSQL. `tests/contract/test_task_store.py` is the suite both pass.

Times are UTC seconds since the epoch, by `now`. Every write is durable when it returns; every method raises
SERVICE_UNAVAILABLE when the database fails, and then nothing was acknowledged. A claim is a fence: whatever is written
under one that is not the task's any more is discarded, and the writer is told by False.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.durable.tasks import Submitted, Task, TaskChunk, TaskDetails, TaskFailure, TaskPage, TaskQuery, TaskState
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


class Lane(NamedTuple):
    """A tuple, because it is a key of everything."""

    model: str
    """As it was asked for."""
    tenant: str
    band: Priority


@dataclass(frozen=True, slots=True)
class LaneFilled:
    """A task waits in this lane."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class TaskChanged:
    """A task has another state, or more of an answer."""

    task_id: str


@dataclass(frozen=True, slots=True)
class ManyChanged:
    """More has changed than is told one by one, or news was missed: look at everything again."""


StoreEvent = LaneFilled | TaskChanged | ManyChanged


class Claim(NamedTuple):
    """The fence: who has a task, in which attempt."""

    task_id: str
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A task that is to be kept."""

    id: str
    lane: Lane
    idempotency_key: str = ""
    digest: bytes
    """SHA-256 of `spec`: what the same idempotency key must come with."""
    spec: bytes
    """A serialized TaskSpec."""
    origin_kind: str = ""
    caller: str = "local"
    batch: str = ""
    line: int = 0
    custom_id: str = ""
    max_attempts: int
    pending_limit_seconds: float
    created_at: float
    window_ends_at: float | None = None
    """When it fails unless begun, however often it comes back; None: `pending_limit_seconds` after it began to wait."""

    @property
    def expires_at(self) -> float:
        """When it fails unless it has been begun by then."""
        own = self.created_at + self.pending_limit_seconds
        return own if self.window_ends_at is None else self.window_ends_at


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTask:
    """A task that may be begun."""

    id: str
    lane: Lane
    spec: bytes
    caller: str
    attempt: int
    """How often it was begun already."""
    failures: int
    """How many of those attempts came to nothing."""
    max_attempts: int
    batch: str = ""
    """The batch that it is a line of; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """Events of a running attempt, to be kept."""

    first_index: int
    """Of its first event, counted from 1 within the attempt."""
    event_count: int
    output: bytes
    """A serialized TaskOutput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """How an attempt ends for good."""

    state: TaskState
    """COMPLETED or FAILED."""
    chunks: Sequence[NewChunk] = ()
    """What is still to be kept of its answer; committed with the end, or not at all."""
    failure: TaskFailure | None = None
    receipt: bytes = b""
    """A serialized Receipt; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredLease:
    """A claim whose heartbeat stopped."""

    claim: Claim
    lane: Lane
    state: TaskState
    """PENDING again, or FAILED where it was the last attempt."""


class TaskStore(Protocol):
    """Who keeps tasks."""

    # -- what submitters want

    async def submit(self, row: TaskRow) -> Submitted:
        """Keep it. Raises IDEMPOTENCY_CONFLICT. Submissions of the same moment share one commit."""
        ...

    async def submitted(self, row: TaskRow) -> Submitted | None:
        """The task that has the row's idempotency key already; None: none has. Raises IDEMPOTENCY_CONFLICT."""
        ...

    async def get(self, tenant: str, task_id: str) -> Task | None:
        """None: the tenant has none of this id. So with the next ones."""
        ...

    async def details(self, tenant: str, task_id: str) -> TaskDetails | None:
        """With what is to be done, and every attempt."""
        ...

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """The newest first. Raises INVALID_ARGUMENT for a page token that is not one."""
        ...

    async def chunks(self, task_id: str, attempt: int, after_index: int, max_bytes: int) -> Sequence[TaskChunk]:
        """What is kept of an attempt's answer after an event, in order; as many as fit, but one at least."""
        ...

    async def cancel(self, tenant: str, task_id: str, now: float) -> Task | None:
        """End it unless it is at its end; the task as it is then, `owner` still naming who ran it."""
        ...

    async def delete(self, tenant: str, task_id: str) -> Task | None:
        """Forget it if it is at its end; the task as it was. Raises RESOURCE_IN_USE where it is not."""
        ...

    # -- what whoever runs them wants

    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        """Lanes in which somebody may be begun now, in their order, after one (None: from the first on).

        Costs the same however many wait in each.
        """
        ...

    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        """The first of a lane that may be begun now. As many as fit, at least one if there is one."""
        ...

    async def next_ready_at(self, now: float) -> float | None:
        """When the next pause after a lost attempt ends; None: none is under way."""
        ...

    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
        """Take a pending task; None: somebody else has, or it waits no more. Nobody waits for another's lock."""
        ...

    async def renew(self, owner: str, lease_until: float) -> frozenset[Claim]:
        """Prolong all claims of an owner; those it still has."""
        ...

    async def append(self, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        """Keep a part of an answer. False: the claim is lost, and nothing was kept."""
        ...

    async def end(self, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        """The attempt's end is the task's. False: the claim is lost, and nothing was kept."""
        ...

    async def revert(
        self, claim: Claim, failure: TaskFailure, *, receipt: bytes, counts: bool, now: float, ready_at: float
    ) -> bool:
        """The attempt came to nothing, and its pieces are forgotten: the task waits again, to be begun from then on.

        `counts`: whether it is one of the attempts that the task has. False: the claim is lost, and nothing was done.
        """
        ...

    async def revert_expired(self, now: float, limit: int) -> Sequence[ExpiredLease]:
        """Claims whose lease is over: the task waits again, or fails where it has no attempt left."""
        ...

    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        """Move moments that lie further off than they can, because a clock was set back; how many.

        A lease ends within its length, a pause within the longest, a wait within its limit; no end is in the future. At
        most `limit` of each kind are moved.
        """
        ...

    async def fail_expired(self, now: float, limit: int) -> Sequence[str]:
        """Fail those that waited too long: QUEUE_TIMEOUT, or DEADLINE_EXCEEDED where a window is over. Their ids."""
        ...

    async def purge_ended(self, before: float, limit: int) -> int:
        """Forget tasks that ended before, but for lines of batches whose results are not written; how many."""
        ...

    async def open_counts(self) -> Mapping[str, int]:
        """By tenant, how many tasks are not at their end."""
        ...

    # -- news

    async def listen(self, heard: Callable[[StoreEvent], None]) -> None:
        """Hand on what other routers on this database tell, until cancelled. Without others it only waits.

        It says ManyChanged whenever it begins to listen: what was told before that was missed.
        """
        ...


LOST_LEASE = Reason.WORKER_LOST
"""Why an attempt ended whose heartbeat stopped."""

"""The port of the task store, with its records and events. Its test suite: `tests/contract/test_task_store.py`.

Times are UTC seconds since the epoch, passed in as `now`. Every write is durable when it returns; every method raises
SERVICE_UNAVAILABLE when the database fails, and then nothing was acknowledged. A claim is a fencing token: a write
under a claim that the task no longer has is discarded, and returns False.

`DatabaseClock` is the time by which all routers on one database compare leases.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from router_svc.policy.task_release import KeptTasks, Release
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.kernel.clock import Clock
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


class Lane(NamedTuple):
    """A queue of tasks: those of one tenant for one model in one priority class start in order."""

    model: str
    """The name that was requested, before routes are resolved."""
    tenant: str
    band: Priority


@dataclass(frozen=True, slots=True)
class LaneFilled:
    """A task became pending in this lane."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class TaskChanged:
    """The state of a task changed, or chunks were added to its answer."""

    task_id: str


@dataclass(frozen=True, slots=True)
class ManyChanged:
    """More changed than is published one by one, or events were missed: everything must be read again."""


StoreEvent = LaneFilled | TaskChanged | ManyChanged


class Claim(NamedTuple):
    """The fencing token: which router owns a task, in which attempt."""

    task_id: str
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A new task as it is stored."""

    id: str
    lane: Lane
    idempotency_key: str = ""
    digest: bytes
    """SHA-256 of `spec`; a resubmission with the same idempotency key must have the same."""
    spec: bytes
    """A serialized TaskSpec."""
    origin_kind: str = ""
    caller: str = "local"
    request_id: str = ""
    """Id of the request whose caller waits for it; empty: nobody waits."""
    labels: bytes = b""
    """A serialized TaskSpec with user and metadata alone; empty: neither."""
    batch: str = ""
    line: int = 0
    custom_id: str = ""
    max_attempts: int
    pending_limit_seconds: float
    created_at: float
    window_ends_at: float | None = None
    """When it expires unless started, retries included; None: `pending_limit_seconds` after it became pending."""

    @property
    def expires_at(self) -> float:
        """When it fails unless it has started by then."""
        own = self.created_at + self.pending_limit_seconds
        return own if self.window_ends_at is None else self.window_ends_at


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTask:
    """A pending task that may start."""

    id: str
    lane: Lane
    spec: bytes
    caller: str
    attempt: int
    """How many attempts were started so far."""
    failures: int
    """How many of those attempts failed and count."""
    max_attempts: int
    batch: str = ""
    """The batch that it is an item of; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """Consecutive events of a running attempt, to be stored."""

    first_index: int
    """Index of its first event, counted from 1 within the attempt."""
    event_count: int
    output: bytes
    """A serialized TaskOutput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """The terminal result of a task, by its last attempt."""

    state: "task_pb2.TaskState.ValueType"
    """COMPLETED or FAILED."""
    chunks: Sequence[NewChunk] = ()
    """The last chunks of its answer; committed together with the terminal state, or not at all."""
    failure: task_pb2.TaskError | None = None
    receipt: bytes = b""
    """A serialized Receipt; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredLease:
    """A claim whose lease expired."""

    claim: Claim
    lane: Lane
    state: "task_pb2.TaskState.ValueType"
    """PENDING again, or FAILED if it was the last attempt."""


@dataclass(frozen=True, slots=True)
class StateCount:
    """The tasks in one state."""

    count: int
    oldest_at: float | None = None
    """When the oldest one was submitted, UTC seconds since the epoch; None: none is open."""


class TaskReads(Protocol):
    """Reads of tasks, their claims and their answers."""

    async def submitted(self, row: TaskRow) -> pb.SubmitTaskResponse | None:
        """Returns the stored task with the row's idempotency key; None: there is none. Raises IDEMPOTENCY_CONFLICT."""
        ...

    async def get(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        """Returns a task; None, here and below: the tenant has no task with this id."""
        ...

    async def details(self, tenant: str, task_id: str) -> pb.GetTaskResponse | None:
        """Returns a task with its spec and its attempts."""
        ...

    async def list_page(self, tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        """Returns a page of tasks, newest first. Raises INVALID_ARGUMENT for a page token of another query."""
        ...

    async def chunks(
        self, task_id: str, attempt: int, after_index: int, max_bytes: int
    ) -> Sequence[task_pb2.TaskPiece]:
        """Returns the stored chunks of an attempt after an event, in order; as many as fit, but at least one."""
        ...

    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        """Returns lanes with a task that may start now, in order, after a given one (None: from the first on).

        The cost does not depend on how many tasks wait in each lane.
        """
        ...

    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        """Returns the first tasks of a lane that may start now: as many as fit, at least one if there is one."""
        ...

    async def next_ready_at(self, now: float) -> float | None:
        """Returns when the next retry pause ends; None: no task pauses."""
        ...

    async def open_of_request(self, request_id: str, limit: int) -> Sequence[task_pb2.Task]:
        """Returns unfinished tasks of the requests with this id, of any tenant, oldest first."""
        ...

    async def kept_counts(self) -> Mapping[str, KeptTasks]:
        """Returns how many finished tasks there are and how long they are, by tenant."""
        ...

    async def state_counts(self) -> Mapping["task_pb2.TaskState.ValueType", StateCount]:
        """Returns how many tasks there are in each state but STAGED, by the state's number."""
        ...

    async def open_counts(self) -> Mapping[str, int]:
        """Returns the number of tasks that are not terminal, by tenant."""
        ...


class TaskStore(TaskReads, Protocol):
    """Stores tasks, their claims and their answers."""

    async def submit(self, row: TaskRow) -> pb.SubmitTaskResponse:
        """Stores a task. Raises IDEMPOTENCY_CONFLICT. Concurrent submissions share one commit."""
        ...

    async def cancel(self, tenant: str, task_id: str, now: float) -> task_pb2.Task | None:
        """Cancels a task unless it is terminal; returns it, with `owner` still naming the router that ran it."""
        ...

    async def delete(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        """Deletes a terminal task and returns it as it was. Raises RESOURCE_IN_USE if it is not terminal."""
        ...

    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
        """Claims a pending task; None: another router has it, or it is not pending. Never waits for a row lock."""
        ...

    async def renew(self, owner: str, lease_until: float) -> frozenset[Claim]:
        """Renews the leases of all claims of an owner; returns the claims that it still has."""
        ...

    async def append(self, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        """Appends chunks to an answer. False: the claim is lost, and nothing was stored."""
        ...

    async def end(self, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        """Ends the task with its attempt. False: the claim is lost, and nothing was stored."""
        ...

    async def revert(
        self, claim: Claim, failure: task_pb2.TaskError, *, receipt: bytes, counts: bool, now: float, ready_at: float
    ) -> bool:
        """Discards a failed attempt and its chunks: the task is pending again and may start from `ready_at` on.

        `counts`: whether the attempt counts toward `max_attempts`. False: the claim is lost, and nothing was done.
        """
        ...

    async def revert_expired(self, now: float, limit: int, *, except_of: str = "") -> Sequence[ExpiredLease]:
        """Takes back claims with expired leases: each task is pending again, or fails if it has no attempt left.

        `except_of`: an owner whose claims are left to it.
        """
        ...

    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        """Moves times that lie further in the future than they can after a clock was set back; returns how many.

        A lease ends within its length, a pause within the longest one, a wait within its limit; no end time is in the
        future. At most `limit` of each kind are moved.
        """
        ...

    async def fail_expired(self, now: float, limit: int) -> Sequence[str]:
        """Fails expired pending tasks: QUEUE_TIMEOUT, or DEADLINE_EXCEEDED after a batch window. Returns their ids."""
        ...

    async def purge_ended(self, before: float, limit: int) -> int:
        """Deletes tasks that ended before a time, except items of batches without written results; returns how many."""
        ...

    async def release_oldest(self, wanted: Release, limit: int) -> KeptTasks:
        """Deletes the oldest finished tasks until `wanted` is reached, at most `limit`; returns what was deleted.

        Of items of batches only those whose results are written.
        """
        ...


class OpenableTaskStore(TaskStore, Protocol):
    """A TaskStore with a life cycle."""

    async def start(self) -> None:
        """Opens the store. Raises SERVICE_UNAVAILABLE."""
        ...

    async def stop(self) -> None:
        """Closes the store; safe to call twice."""
        ...

    async def database_now(self) -> float | None:
        """Returns the database's UTC seconds since the epoch; None if no other router shares the database."""
        ...


LOST_LEASE = Reason.WORKER_LOST
"""Reason of an attempt whose lease expired."""


class DatabaseClock:
    """UTC of the database: this machine's clock plus an offset that `synchronize` measures."""

    def __init__(self, clock: Clock, database_time: Callable[[], Awaitable[float | None]]) -> None:
        self._clock = clock
        self._database_time = database_time
        self._offset_seconds = 0.0

    @property
    def clock(self) -> Clock:
        """The process clock, for durations inside this process."""
        return self._clock

    def now(self) -> float:
        """Returns UTC seconds since the epoch."""
        return self._clock.utc_now().timestamp() + self._offset_seconds

    async def synchronize(self) -> None:
        """Measures the offset to the database's clock. Raises SERVICE_UNAVAILABLE."""
        database_seconds = await self._database_time()
        if database_seconds is not None:
            self._offset_seconds = database_seconds - self._clock.utc_now().timestamp()

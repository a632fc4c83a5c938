"""Records of the task store, and the events of tasks. Times are UTC seconds since the epoch.

`DatabaseClock` is the clock by which all routers of a database compare leases.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.clock import Clock, MeshClock


class Lane(NamedTuple):
    """A queue of tasks: those of a tenant for a model in a priority class start in order."""

    model: str
    """The requested name, before routes are resolved."""
    tenant: str
    band: Priority


@dataclass(frozen=True, slots=True)
class LaneFilled:
    """A task became pending in this lane."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class TaskChanged:
    """A task's state changed, or chunks were added to its answer."""

    task_id: str


@dataclass(frozen=True, slots=True)
class ManyChanged:
    """Too many changes to publish individually, or missed events: everything must be read again."""


@dataclass(frozen=True, slots=True)
class ItemEnded:
    """A batch item ended."""

    batch_id: str
    """Empty: unknown batches."""


@dataclass(frozen=True, slots=True)
class TasksPurged:
    """A sweep deleted finished tasks."""

    task_ids: Collection[str]


@dataclass(frozen=True, slots=True)
class TaskOffered:
    """A task is offered to the scheduler, for the first time or again."""

    task: "PendingTask"


@dataclass(frozen=True, slots=True)
class TaskPaused:
    """An attempt failed, and the task waits for the next one."""

    task_id: str
    retry: task_pb2.TaskRetry


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTask:
    """A task with the receipt over all its attempts."""

    task: task_pb2.Task
    band: Priority
    attempts: Sequence[task_pb2.TaskAttempt]
    receipt: receipt_pb2.Receipt


@dataclass(frozen=True, slots=True)
class TasksEnded:
    """Tasks ended."""

    tasks: Sequence[EndedTask]


StoreEvent = LaneFilled | TaskChanged | ManyChanged | ItemEnded | TasksPurged | TaskOffered | TaskPaused | TasksEnded


class TaskLease(NamedTuple):
    """The fencing token: the router that owns a task, and the attempt."""

    task_id: str
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """A task to be stored."""

    task: task_pb2.Task
    """Pending, without its times."""
    band: Priority
    spec: bytes
    """A serialized TaskSpec."""
    digest: bytes
    """SHA-256 of `spec`; must be the same for a resubmission with the same idempotency key."""
    idempotency_key: str = ""
    custom_id: str = ""
    created_at: float
    pending_limit_seconds: float
    window_ends_at: float | None = None
    """When it expires if not started, retries included; None: `pending_limit_seconds` after it became pending."""

    @property
    def lane(self) -> Lane:
        """The queue that it waits in."""
        return Lane(self.task.model, self.task.tenant, self.band)

    @property
    def expires_at(self) -> float:
        """When it fails if not started by then."""
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
    """Number of attempts started so far."""
    failures: int
    """Number of failed attempts that count."""
    max_attempts: int
    batch: str = ""
    """Empty: none."""
    created_at: float
    """When it was submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """Consecutive events of a running attempt, to be stored."""

    first_index: int
    """Index of its first event, from 1 within the attempt."""
    event_count: int
    output: bytes
    """A serialized TaskOutput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """The final result of a task, from its last attempt."""

    state: "task_pb2.TaskState.ValueType"
    """COMPLETED or FAILED."""
    chunks: Sequence[NewChunk] = ()
    """The last chunks of its answer, committed together with the terminal state or not at all."""
    failure: task_pb2.TaskError | None = None
    receipt: bytes = b""
    """A serialized Receipt; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredLease:
    """A claim whose lease expired."""

    claim: TaskLease
    lane: Lane
    state: "task_pb2.TaskState.ValueType"
    """PENDING again, or FAILED after the last attempt."""


@dataclass(frozen=True, slots=True)
class StateCount:
    """The tasks in one state."""

    count: int
    oldest_at: float | None = None
    """When the oldest one was submitted, UTC seconds since the epoch; None: none is open."""


LOST_LEASE = Reason.WORKER_LOST
"""Reason of an attempt whose lease expired."""


class DatabaseClock:
    """UTC of the database, as `synchronize` last read it; if it has none, UTC of this machine.

    In between it follows the monotonic clock: setting this machine's clock moves no lease and no limit.
    """

    def __init__(self, clock: Clock, database_time: Callable[[], Awaitable[float | None]]) -> None:
        self._clock = clock
        self._database_time = database_time
        self._utc = MeshClock(clock)

    @property
    def clock(self) -> Clock:
        """The process clock, for durations within this process."""
        return self._clock

    def now(self) -> float:
        """Returns UTC seconds since the epoch."""
        return self._utc.utc_now().timestamp()

    async def synchronize(self) -> None:
        """Reads the database's clock. Raises SERVICE_UNAVAILABLE."""
        database_seconds = await self._database_time()
        if database_seconds is not None:
            self._utc.set(datetime.fromtimestamp(database_seconds, UTC))

"""Unfinished operations in memory, their order, and their watchers.

    PENDING ──▶ RUNNING ──▶ SUCCEEDED | FAILED | CANCELLED
       └───────────────────▶ FAILED | CANCELLED

An ended operation never changes again.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from registry_svc.operations.operation_spans import OperationTrace
from registry_svc.watchers import Watcher, Watchers, shutting_down
from weft.api.operations.v1.operation_pb2 import Operation
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of

OPERATION_PREFIX = "operations/"
ENDED = frozenset({Operation.STATE_SUCCEEDED, Operation.STATE_FAILED, Operation.STATE_CANCELLED})
WATCH_BUFFER = 16
"""Maximum queued changes of a watcher; beyond that the oldest are dropped."""
MAX_WATCHERS = 1_024
MAX_WAITING_OPERATIONS = 4_096
"""Maximum operations with unread changes of a watcher of all operations."""


class OperationWatcher(Watcher[Operation]):
    """A watcher of one operation, which ends with it. Beyond WATCH_BUFFER, the oldest changes are dropped."""

    def __init__(self, watchers: "set[OperationWatcher]", now: Operation) -> None:
        super().__init__(WATCH_BUFFER, watchers.discard)
        self._waiting = deque([now], maxlen=WATCH_BUFFER)
        self._end_delivered = False

    @override
    async def __anext__(self) -> Operation:
        if self._end_delivered:
            raise StopAsyncIteration
        operation = await super().__anext__()
        self._end_delivered = operation.state in ENDED
        return operation

    def offer_newest(self, operation: Operation) -> None:
        """Queues a change. Drops the oldest one if there are too many."""
        self._waiting.append(operation)
        self._changed.set()


@dataclass(slots=True, kw_only=True, eq=False)
class LiveOperation:
    """An unfinished operation."""

    operation: Operation
    """As stored on disk, without progress. Until the end its result has the models with a load that was begun, so that
    a cancellation after a restart undoes them."""
    subjects: frozenset[str]
    """Names that it changes; empty: it conflicts with no other."""
    progress: Operation = field(default_factory=Operation)
    """Stage and other fields that are not stored."""
    ends_at: float | None = None
    """Estimated end, in seconds of the process's monotonic clock; None: unknown."""
    resumed: bool = False
    """Whether an earlier registry process accepted it."""
    cancel_requested: asyncio.Event = field(default_factory=asyncio.Event)
    trace: OperationTrace | None = None
    """None: tracing is off."""
    task: asyncio.Task[None] | None = None
    """The task that executes it; None while it waits."""
    watchers: set[OperationWatcher] = field(default_factory=set)

    def shown(self, now: float) -> Operation:
        """Returns the operation with its progress at `now`, in monotonic seconds."""
        operation = shown(self.operation)
        operation.MergeFrom(self.progress)
        # An operation that takes longer than expected has no known end.
        if self.ends_at is not None and self.ends_at > now:
            operation.eta.CopyFrom(duration_of(self.ends_at - now))
        return operation


def shown(stored: Operation) -> Operation:
    """Returns a copy of a stored operation, with a result only if it succeeded."""
    operation = Operation()
    operation.CopyFrom(stored)
    if operation.state == Operation.STATE_SUCCEEDED:
        operation.progress = 1.0
    else:
        operation.ClearField("result")
    return operation


def startable(unfinished: Iterable[LiveOperation], max_running: int) -> list[LiveOperation]:
    """Returns the operations that may start now. `unfinished` is in order of acceptance.

    A waiting operation also holds its subjects, so that later ones cannot overtake it and make it starve.
    """
    waiting_or_running = list(unfinished)
    room = max_running - sum(each.task is not None for each in waiting_or_running)
    held: set[str] = set()
    chosen: list[LiveOperation] = []
    for each in waiting_or_running:
        if room <= 0:
            break
        if each.task is None and held.isdisjoint(each.subjects):
            chosen.append(each)
            room -= 1
        held |= each.subjects
    return chosen


class OperationTable:
    """Unfinished operations, in order of acceptance."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[str, LiveOperation] = {}
        self._by_request: dict[str, LiveOperation] = {}
        self.watched = Watchers[Operation](MAX_WAITING_OPERATIONS, MAX_WATCHERS)
        """Watchers of all operations."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveOperation]:
        return iter(list(self._live.values()))

    def get(self, name: str) -> LiveOperation | None:
        """Returns the operation with this name, or None."""
        return self._live.get(name)

    def of_request(self, request_id: str) -> LiveOperation | None:
        """Returns the operation that a request created, or None."""
        return self._by_request.get(request_id)

    def add(self, live: LiveOperation) -> None:
        """Adds a newly accepted operation."""
        self._live[live.operation.name] = live
        self._by_request[live.operation.request_id] = live

    def remove(self, live: LiveOperation) -> None:
        """Removes an ended operation."""
        self._live.pop(live.operation.name, None)
        self._by_request.pop(live.operation.request_id, None)

    def shown(self, stored: Operation) -> Operation:
        """Returns an operation for callers, with its current progress if it is unfinished."""
        live = self._live.get(stored.name)
        return shown(stored) if live is None else live.shown(self._clock.monotonic())

    def publish(self, live: LiveOperation) -> None:
        """Sends the current state of an operation to all its watchers, also after it has ended."""
        operation = live.shown(self._clock.monotonic())
        for watcher in live.watchers:
            watcher.offer_newest(operation)
        self.watched.publish_state(operation.name, operation)

    def watch(self, live: LiveOperation) -> OperationWatcher:
        """Returns a watcher that starts with the current state. Raises TOO_MANY_RESOURCES."""
        if sum(len(each.watchers) for each in self._live.values()) >= MAX_WATCHERS:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{MAX_WATCHERS} callers are already watching operations; poll the operation instead",
                metadata={"limit": str(MAX_WATCHERS)},
            )
        watcher = OperationWatcher(live.watchers, live.shown(self._clock.monotonic()))
        live.watchers.add(watcher)
        return watcher

    def clear(self) -> None:
        """Removes all operations; watchers get SHUTTING_DOWN."""
        for live in self._live.values():
            for watcher in live.watchers:
                watcher.end(shutting_down())
        self.watched.close()
        self._live.clear()
        self._by_request.clear()

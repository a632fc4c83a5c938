"""Unfinished operations in memory, and their watchers."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from registry_svc.newest_states import NewestStates
from registry_svc.operations.operation_spans import OperationTrace
from registry_svc.operations.policy.lifecycle import NO_PROGRESS, GovernedOperation, OperationProgress
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

WATCH_BUFFER = 16
"""Maximum queued changes of a watcher; beyond that the oldest are dropped."""
MAX_WATCHERS = 1_024
MAX_WAITING_OPERATIONS = 4_096
"""Maximum operations with unread changes of a watcher of all operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView:
    """An operation at one moment."""

    operation: GovernedOperation
    progress: OperationProgress = NO_PROGRESS


class OperationWatcher:
    """A watcher of one operation. Iterate over it inside `with`; it ends with the operation."""

    def __init__(self, watchers: "set[OperationWatcher]", now: OperationView) -> None:
        self._watchers = watchers
        self._waiting: deque[OperationView] = deque([now], maxlen=WATCH_BUFFER)
        self._changed = asyncio.Event()
        self._error: WeftError | None = None
        self._end_delivered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchers.discard(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OperationView:
        """Returns the next change. Raises SHUTTING_DOWN after the last one."""
        if self._end_delivered:
            raise StopAsyncIteration
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        view = self._waiting.popleft()
        self._end_delivered = view.operation.ended
        return view

    def offer(self, view: OperationView) -> None:
        """Queues a change. Drops the oldest one if there are too many."""
        self._waiting.append(view)
        self._changed.set()

    def end(self, error: WeftError) -> None:
        """Raises `error` once the queue was read."""
        self._error = error
        self._changed.set()


@dataclass(slots=True, kw_only=True, eq=False)
class LiveOperation:
    """An unfinished operation."""

    operation: GovernedOperation
    """As stored on disk."""
    action: operation_pb2.OperationAction
    subjects: frozenset[str]
    after: frozenset[str] = frozenset()
    """Ids of operations that it waits for."""
    progress: OperationProgress = NO_PROGRESS
    resumed: bool = False
    """Whether an earlier registry process accepted it."""
    cancel_requested: asyncio.Event = field(default_factory=asyncio.Event)
    trace: OperationTrace | None = None
    """None: tracing is off."""
    task: asyncio.Task[None] | None = None
    """The task that executes it; None while it waits."""
    watchers: set[OperationWatcher] = field(default_factory=set)

    @property
    def view(self) -> OperationView:
        """The current state."""
        return OperationView(operation=self.operation, progress=self.progress)


class OperationTable:
    """Unfinished operations, in order of acceptance."""

    def __init__(self) -> None:
        self._live: dict[str, LiveOperation] = {}
        self._by_request: dict[str, LiveOperation] = {}
        self.watched = NewestStates[OperationView](max_watchers=MAX_WATCHERS, max_waiting=MAX_WAITING_OPERATIONS)
        """Watchers of all operations."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveOperation]:
        return iter(list(self._live.values()))

    def get(self, operation_id: str) -> LiveOperation | None:
        """Returns the operation with this id, or None."""
        return self._live.get(operation_id)

    def of_request(self, request_id: str) -> LiveOperation | None:
        """Returns the operation that a request created, or None."""
        return self._by_request.get(request_id)

    def add(self, live: LiveOperation) -> None:
        """Adds a newly accepted operation."""
        self._live[live.operation.id] = live
        self._by_request[live.operation.request_id] = live

    def remove(self, live: LiveOperation) -> None:
        """Removes an ended operation."""
        self._live.pop(live.operation.id, None)
        self._by_request.pop(live.operation.request_id, None)

    def publish(self, live: LiveOperation) -> None:
        """Sends the current state of an operation to all its watchers, also after it has ended."""
        view = live.view
        for watcher in live.watchers:
            watcher.offer(view)
        self.watched.publish(live.operation.id, view)

    def watch(self, live: LiveOperation) -> OperationWatcher:
        """Returns a watcher that starts with the current state. Raises TOO_MANY_RESOURCES."""
        if sum(len(each.watchers) for each in self._live.values()) >= MAX_WATCHERS:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{MAX_WATCHERS} callers follow operations already; ask for the operation's state instead",
                metadata={"limit": str(MAX_WATCHERS)},
            )
        watcher = OperationWatcher(live.watchers, live.view)
        live.watchers.add(watcher)
        return watcher

    def clear(self) -> None:
        """Removes all operations; watchers get SHUTTING_DOWN."""
        for live in self._live.values():
            for watcher in live.watchers:
                watcher.end(WeftError(Reason.SHUTTING_DOWN, "the registry is shutting down; watch again"))
        self.watched.close()
        self._live.clear()
        self._by_request.clear()

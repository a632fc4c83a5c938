"""Delivery of changes and events to watchers, without waiting for any of them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from registry_svc.mesh.domain import EventDraft
from registry_svc.mesh.overlay import Publisher, watched_runner
from registry_svc.mesh.records import event_message, extended, without_key
from weft.api.registry.v1 import (
    event_pb2,
    registry_service_pb2,
    router_pb2,
    settings_pb2,
)
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The mesh at one revision. It has a function per message, because building all of them in one step takes long."""

    revision: int
    settings: settings_pb2.MeshSettings
    runners: Sequence[Publisher]
    resources: Sequence[Callable[[], ResourceDocument]]
    routers: Sequence[router_pb2.Router]

    async def message(self, *, with_keys: bool) -> registry_service_pb2.WatchResponse:
        """Returns the first response of a watch. Lets other tasks run, since a large one takes long."""
        response = registry_service_pb2.WatchResponse(revision=self.revision)
        shown = response.snapshot
        shown.settings.CopyFrom(self.settings)
        runners = [partial(watched_runner, runner, with_key=with_keys) for runner in self.runners]
        await extended(shown.runners, runners)
        await extended(shown.resources, self.resources)
        shown.routers.extend(self.routers)
        return response


def change_message(
    response: registry_service_pb2.WatchResponse, *, with_keys: bool
) -> registry_service_pb2.WatchResponse:
    """Returns a later response of a watch, without its runner's ticket key unless `with_keys`."""
    if with_keys or not response.change.HasField("runner"):
        return response
    return registry_service_pb2.WatchResponse(
        revision=response.revision, change=registry_service_pb2.Change(runner=without_key(response.change.runner))
    )


T = TypeVar("T")

RETRY_AFTER_SECONDS = 1.0


class Watcher(Generic[T]):
    """A watcher's bounded queue of changes or events. Iterate over it inside `with`, which ends it."""

    def __init__(self, broadcaster: "Broadcaster[T]", max_waiting: int) -> None:
        self._broadcaster = broadcaster
        self._max_waiting = max_waiting
        self._waiting: deque[T] = deque()
        self._changed = asyncio.Event()
        self._ended: WeftError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broadcaster.forget(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Returns the next change. Raises WATCH_LAGGED or SHUTTING_DOWN after the last one."""
        while not self._waiting:
            if self._ended is not None:
                raise self._ended
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    def offer(self, batch: Sequence[T]) -> bool:
        """Queues `batch`. Returns False if there was no room, which ends this watcher.

        An empty queue accepts a batch of any size, so that a watcher that keeps up is not ended by one large change.
        """
        if self._waiting and len(self._waiting) + len(batch) > self._max_waiting:
            # Queued changes are useless before a gap; free them now, since the watcher may be stuck in a write.
            self._waiting.clear()
            self.end(
                WeftError(
                    Reason.WATCH_LAGGED,
                    f"more than {self._max_waiting} changes were waiting to be read; watch again",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            )
            return False
        self._waiting.extend(batch)
        self._changed.set()
        return True

    def end(self, error: WeftError) -> None:
        """Raises `error` in the watcher once it has read its queue."""
        self._ended = error
        self._changed.set()


class Broadcaster(Generic[T]):
    """The watchers of a stream of changes or events."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._watchers: set[Watcher[T]] = set()

    @property
    def watchers(self) -> int:
        """Number of watchers."""
        return len(self._watchers)

    def subscribe(self) -> Watcher[T]:
        """Returns a watcher for everything published from now on."""
        watcher = Watcher[T](self, self._max_waiting)
        self._watchers.add(watcher)
        return watcher

    def publish(self, batch: Sequence[T]) -> None:
        """Delivers to every watcher; ends those without room with WATCH_LAGGED."""
        self._watchers = {watcher for watcher in self._watchers if watcher.offer(batch)}

    def forget(self, watcher: Watcher[T]) -> None:
        """Removes a watcher. Ignores an unknown one."""
        self._watchers.discard(watcher)

    def close(self) -> None:
        """Ends all watchers with SHUTTING_DOWN."""
        for watcher in self._watchers:
            watcher.end(WeftError(Reason.SHUTTING_DOWN, "the registry is shutting down; watch again"))
        self._watchers.clear()


class EventStore(Protocol):
    """Port: stores events across restarts; see `registry_svc.mesh.store.SqlStore`."""

    async def save_events(self, new: Sequence[event_pb2.Event], oldest: int) -> None:
        """Stores new events, and deletes those with a number below `oldest`."""
        ...


class EventLog:
    """The newest `max_events` events, including those before a restart."""

    def __init__(self, clock: Clock, max_events: int, watch_buffer_events: int) -> None:
        self._clock = clock
        self._events: deque[event_pb2.Event] = deque(maxlen=max_events)
        self._sequence = self._saved_sequence = 0
        self._broadcaster = Broadcaster[event_pb2.Event](watch_buffer_events)

    def record(self, drafts: Iterable[EventDraft]) -> None:
        """Records and publishes events in this order, with the same time."""
        now = self._clock.utc_now()
        batch: list[event_pb2.Event] = []
        for draft in drafts:
            self._sequence += 1
            batch.append(event_message(draft, self._sequence, now))
        if batch:
            self._events.extend(batch)
            self._broadcaster.publish(batch)

    def restore(self, events: Sequence[event_pb2.Event]) -> None:
        """Replaces all events by those from before a restart, oldest first."""
        self._events.clear()
        self._events.extend(events)
        self._sequence = self._saved_sequence = events[-1].sequence if events else 0

    async def save(self, store: EventStore) -> None:
        """Stores the events since the last call. Raises SERVICE_UNAVAILABLE; then the next call stores them."""
        new = [event for event in self._events if event.sequence > self._saved_sequence]
        if new:
            await store.save_events(new, self._events[0].sequence)
            self._saved_sequence = new[-1].sequence

    def newest(self, kind: ResourceKind | None, name: str, limit: int) -> list[event_pb2.Event]:
        """Returns the newest `limit` events of a kind and name, oldest first; None and "" mean all."""
        found: list[event_pb2.Event] = []
        for event in reversed(self._events):
            if len(found) == limit:
                break
            if concerns(event, kind, name):
                found.append(event)
        return found[::-1]

    def subscribe(self) -> Watcher[event_pb2.Event]:
        """Returns a watcher for every event from now on."""
        return self._broadcaster.subscribe()

    def close(self) -> None:
        """Ends all watchers with SHUTTING_DOWN."""
        self._broadcaster.close()


def concerns(event: event_pb2.Event, kind: ResourceKind | None, name: str) -> bool:
    """Whether an event has this kind and name; None and "" mean all."""
    return (kind is None or event.kind == kind) and (not name or event.name == name)

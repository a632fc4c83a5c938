"""The snapshot and changes of the mesh for watchers, and its events."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from registry_svc.mesh.overlay import Publisher, watched_runner
from registry_svc.mesh.records import extended
from registry_svc.watchers import Watcher, Watchers
from weft.api.registry.v1 import (
    event_pb2,
    router_pb2,
    settings_pb2,
)
from weft.api.registry.v1 import registry_service_pb2 as pb
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import stamp_of


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The mesh at one revision. It has a function per message, because building all of them in one step takes long."""

    revision: int
    settings: settings_pb2.MeshSettings
    runners: Sequence[Publisher]
    resources: Sequence[Callable[[], ResourceDocument]]
    routers: Sequence[router_pb2.Router]

    async def message(self, *, with_keys: bool) -> pb.WatchResponse:
        """Returns the first response of a watch. Lets other tasks run, since a large one takes long."""
        response = pb.WatchResponse(revision=self.revision)
        shown = response.snapshot
        shown.settings.CopyFrom(self.settings)
        runners = [partial(watched_runner, runner, with_key=with_keys) for runner in self.runners]
        await extended(shown.runners, runners)
        await extended(shown.resources, self.resources)
        shown.routers.extend(self.routers)
        return response


def change_message(response: pb.WatchResponse, *, with_keys: bool) -> pb.WatchResponse:
    """Returns a later response of a watch, without its runner's ticket key unless `with_keys`."""
    if with_keys or not response.change.HasField("runner"):
        return response
    return pb.WatchResponse(
        revision=response.revision, change=pb.Change(runner=pb.WatchedRunner(runner=response.change.runner.runner))
    )


SaveEvents = Callable[[Sequence[event_pb2.Event], int], Awaitable[None]]
"""Stores new events, and deletes those with a number below the second argument."""


class EventLog:
    """The newest `max_events` events, including those before a restart."""

    def __init__(self, clock: Clock, max_events: int, watch_buffer_events: int) -> None:
        self._clock = clock
        self._events: deque[event_pb2.Event] = deque(maxlen=max_events)
        self._sequence = self._saved_sequence = 0
        self._watchers = Watchers[event_pb2.Event](watch_buffer_events)

    def record(self, drafts: Iterable[event_pb2.Event]) -> None:
        """Numbers, records and publishes events in this order, with the same time."""
        now = stamp_of(self._clock.utc_now())
        batch = list(drafts)
        for event in batch:
            self._sequence += 1
            event.sequence = self._sequence
            event.time.CopyFrom(now)
        if batch:
            self._events.extend(batch)
            self._watchers.publish(batch)

    def restore(self, events: Sequence[event_pb2.Event]) -> None:
        """Replaces all events by those from before a restart, oldest first."""
        self._events.clear()
        self._events.extend(events)
        self._sequence = self._saved_sequence = events[-1].sequence if events else 0

    async def save(self, save_events: SaveEvents) -> None:
        """Stores the events since the last call. Raises SERVICE_UNAVAILABLE; then the next call stores them."""
        new = [event for event in self._events if event.sequence > self._saved_sequence]
        if new:
            await save_events(new, self._events[0].sequence)
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
        return self._watchers.subscribe()

    def close(self) -> None:
        """Ends all watchers with SHUTTING_DOWN."""
        self._watchers.close()


def concerns(event: event_pb2.Event, kind: ResourceKind | None, name: str) -> bool:
    """Whether an event has this kind and name; None and "" mean all."""
    return (kind is None or event.kind == kind) and (not name or event.name == name)

"""What happened lately, in memory: bounded, and told to whoever listens."""

from collections import deque
from collections.abc import Iterable

from registry_svc.mesh.domain import Event, Happening, Kind
from registry_svc.mesh.watch import Broadcaster, Watcher
from weft.kernel.clock import Clock


class EventLog:
    """The newest `max_events` events of one registry life."""

    def __init__(self, clock: Clock, max_events: int, watch_buffer_events: int) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=max_events)
        self._sequence = 0
        self._broadcaster = Broadcaster[Event](watch_buffer_events)

    def record(self, happenings: Iterable[Happening]) -> None:
        """Remember and tell these, in this order; all at the same moment."""
        now = self._clock.utc_now()
        batch: list[Event] = []
        for happening in happenings:
            self._sequence += 1
            batch.append(Event(sequence=self._sequence, at=now, happening=happening))
        if batch:
            self._events.extend(batch)
            self._broadcaster.publish(batch)

    def newest(self, kind: Kind | None, name: str, limit: int) -> list[Event]:
        """At most `limit` events of this kind and name, oldest first; None and "" mean all."""
        found: list[Event] = []
        for event in reversed(self._events):
            if len(found) == limit:
                break
            if concerns(event, kind, name):
                found.append(event)
        return found[::-1]

    def subscribe(self) -> Watcher[Event]:
        """A listener that hears every event from now on."""
        return self._broadcaster.subscribe()

    def close(self) -> None:
        """End all listeners with SHUTTING_DOWN."""
        self._broadcaster.close()


def concerns(event: Event, kind: Kind | None, name: str) -> bool:
    """Whether an event is of this kind and name; None and "" mean all."""
    happening = event.happening
    return (kind is None or happening.kind is kind) and (not name or happening.name == name)

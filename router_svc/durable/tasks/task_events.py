"""Events of tasks within the process, published after the commit as hints to read again; readers also poll."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from router_svc.durable.tasks.task_records import ManyChanged, StoreEvent, TaskChanged

Listener = Callable[[StoreEvent], None]


class TaskEventBus:
    """Passes events to the listeners and watchers of this process."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._watchers: dict[str, list[asyncio.Event]] = {}

    def subscribe(self, listener: Listener) -> None:
        """Registers a listener for all events in order. It must neither raise nor block."""
        self._listeners.append(listener)

    @contextmanager
    def listening(self, listener: Listener) -> Generator[None]:
        """Registers a listener for the duration of a block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def publish(self, event: StoreEvent) -> None:
        """Publishes a committed change."""
        for listener in self._listeners:
            listener(event)
        if isinstance(event, TaskChanged):
            _set(self._watchers.get(event.task_id, ()))
        elif isinstance(event, ManyChanged):
            for watchers in self._watchers.values():
                _set(watchers)

    def is_watched(self, task_id: str) -> bool:
        """Whether a watcher waits for events of the task."""
        return task_id in self._watchers

    @contextmanager
    def watching(self, task_id: str) -> Generator[asyncio.Event]:
        """Yields an asyncio event that is set at every change of a task; clear it before reading."""
        event = asyncio.Event()
        self._watchers.setdefault(task_id, []).append(event)
        try:
            yield event
        finally:
            watchers = self._watchers[task_id]
            with suppress(ValueError):
                watchers.remove(event)
            if not watchers:
                del self._watchers[task_id]


def _set(events: "list[asyncio.Event] | tuple[()]") -> None:
    for event in events:
        event.set()

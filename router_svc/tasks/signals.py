"""News of tasks inside one process: told after the commit, never instead of it. Whoever misses some looks again."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from router_svc.tasks.lanes import Lane


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


News = LaneFilled | TaskChanged | ManyChanged
Listener = Callable[[News], None]


class TaskSignals:
    """Hands on news to whoever listens in this process."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._watchers: dict[str, list[asyncio.Event]] = {}

    def subscribe(self, listener: Listener) -> None:
        """Be told everything, in the order it happens. A listener must not raise, and must not wait."""
        self._listeners.append(listener)

    def announce(self, news: News) -> None:
        """Something is on disk."""
        for listener in self._listeners:
            listener(news)
        if isinstance(news, TaskChanged):
            _set(self._watchers.get(news.task_id, ()))
        elif isinstance(news, ManyChanged):
            for watchers in self._watchers.values():
                _set(watchers)

    def is_watched(self, task_id: str) -> bool:
        """Whether somebody waits for news of it."""
        return task_id in self._watchers

    @contextmanager
    def watching(self, task_id: str) -> Generator[asyncio.Event]:
        """An event that is set with every news of a task; clear it before looking."""
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

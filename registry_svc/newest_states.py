"""Watchers of things that change often: they receive the newest state of each thing, and skip earlier ones."""

import asyncio
from types import TracebackType
from typing import Generic, Self, TypeVar

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

T = TypeVar("T")
RETRY_AFTER_SECONDS = 1.0


class StateWatcher(Generic[T]):
    """The newest states that a watcher has not received yet. Iterate over it inside `with`, which ends it."""

    def __init__(self, states: "NewestStates[T]", max_waiting: int) -> None:
        self._states = states
        self._max_waiting = max_waiting
        self._waiting: dict[str, T] = {}
        self._changed = asyncio.Event()
        self._ended: WeftError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states.forget(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, T]:
        """Returns the next name and its newest state. Raises WATCH_LAGGED or SHUTTING_DOWN after the last one."""
        while not self._waiting:
            if self._ended is not None:
                raise self._ended
            self._changed.clear()
            await self._changed.wait()
        name = next(iter(self._waiting))
        return name, self._waiting.pop(name)

    def offer(self, name: str, state: T) -> None:
        """Queues a state, replacing an earlier one of the same name."""
        if name not in self._waiting and len(self._waiting) >= self._max_waiting:
            self._waiting.clear()
            self._states.forget(self)
            message = f"more than {self._max_waiting} changes were waiting to be read; watch again"
            self.end(WeftError(Reason.WATCH_LAGGED, message, retry_after_seconds=RETRY_AFTER_SECONDS))
            return
        self._waiting[name] = state
        self._changed.set()

    def end(self, error: WeftError) -> None:
        """Raises `error` in the watcher once it has read its queue."""
        self._ended = error
        self._changed.set()


class NewestStates(Generic[T]):
    """The watchers of one kind of things."""

    def __init__(self, *, max_watchers: int, max_waiting: int) -> None:
        """`max_waiting` is the number of queued things beyond which a watcher is ended with WATCH_LAGGED."""
        self._max_watchers = max_watchers
        self._max_waiting = max_waiting
        self._watchers: dict[StateWatcher[T], None] = {}

    @property
    def watchers(self) -> int:
        """Number of watchers."""
        return len(self._watchers)

    def subscribe(self) -> StateWatcher[T]:
        """Returns a watcher for everything published from now on. Raises TOO_MANY_RESOURCES."""
        if len(self._watchers) >= self._max_watchers:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._max_watchers} callers watch already; ask for the list instead",
                metadata={"limit": str(self._max_watchers)},
            )
        watcher = StateWatcher[T](self, self._max_waiting)
        self._watchers[watcher] = None
        return watcher

    def publish(self, name: str, state: T) -> None:
        """Delivers the newest state of a thing to every watcher."""
        for watcher in list(self._watchers):
            watcher.offer(name, state)

    def forget(self, watcher: StateWatcher[T]) -> None:
        """Removes a watcher. Ignores an unknown one."""
        self._watchers.pop(watcher, None)

    def close(self) -> None:
        """Ends all watchers with SHUTTING_DOWN."""
        for watcher in self._watchers:
            watcher.end(WeftError(Reason.SHUTTING_DOWN, "the registry is shutting down; watch again"))
        self._watchers.clear()

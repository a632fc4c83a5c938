"""Watchers: queues of unread changes, which are filled without waiting for their readers."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

T = TypeVar("T")
RETRY_AFTER_SECONDS = 1.0


class _Name(str):
    """An entry of a queue that stands for the newest state of this name."""

    __slots__ = ()


class Watcher(Generic[T]):
    """The changes that one caller has not read yet. Iterate over it inside `with`, which ends it."""

    def __init__(self, max_waiting: int, forget: Callable[[Any], None]) -> None:
        """`forget` is called with this watcher when its caller leaves."""
        self._max_waiting = max_waiting
        self._forget = forget
        self._waiting: deque[Any] = deque()
        self._states: dict[str, T] = {}
        """The newest unread state of each name in the queue."""
        self._changed = asyncio.Event()
        self._ended: WeftError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Returns the next change. Raises WATCH_LAGGED or SHUTTING_DOWN after the last one."""
        while not self._waiting:
            if self._ended is not None:
                raise self._ended
            self._changed.clear()
            await self._changed.wait()
        found = self._waiting.popleft()
        change: T = self._states.pop(found) if isinstance(found, _Name) else found
        return change

    def offer(self, batch: Sequence[T | _Name]) -> bool:
        """Queues `batch`. Returns False if there was no room, which ends this watcher.

        An empty queue accepts a batch of any size, so that a watcher that keeps up is not ended by one large change.
        """
        if self._waiting and len(self._waiting) + len(batch) > self._max_waiting:
            # Queued changes are useless before a gap; free them now, since the caller may be stuck in a write.
            self._waiting.clear()
            self._states.clear()
            message = f"more than {self._max_waiting} changes were waiting to be read; watch again"
            self.end(WeftError(Reason.WATCH_LAGGED, message, retry_after_seconds=RETRY_AFTER_SECONDS))
            return False
        self._waiting.extend(batch)
        self._changed.set()
        return True

    def offer_state(self, name: str, state: T) -> bool:
        """Queues a state, or replaces an unread one of the same name. Returns False if there was no room."""
        if name not in self._states and not self.offer([_Name(name)]):
            return False
        self._states[name] = state
        return True

    def end(self, error: WeftError) -> None:
        """Raises `error` in the watcher once it has read its queue."""
        self._ended = error
        self._changed.set()


class Watchers(Generic[T]):
    """The watchers of a stream of changes, or of the newest states of things that change often."""

    def __init__(self, max_waiting: int, max_watchers: int | None = None) -> None:
        """`max_waiting` is the number of unread changes beyond which a watcher is ended with WATCH_LAGGED."""
        self._max_waiting = max_waiting
        self._max_watchers = max_watchers
        self._watchers: dict[Watcher[T], None] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    def subscribe(self) -> Watcher[T]:
        """Returns a watcher for everything published from now on. Raises TOO_MANY_RESOURCES."""
        if self._max_watchers is not None and len(self._watchers) >= self._max_watchers:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._max_watchers} callers are already watching; poll the list instead",
                metadata={"limit": str(self._max_watchers)},
            )
        watcher = Watcher[T](self._max_waiting, lambda left: self._watchers.pop(left, None))
        self._watchers[watcher] = None
        return watcher

    def publish(self, batch: Sequence[T]) -> None:
        """Delivers changes to every watcher."""
        self._watchers = {watcher: None for watcher in self._watchers if watcher.offer(batch)}

    def publish_state(self, name: str, state: T) -> None:
        """Delivers the newest state of a thing to every watcher, which skips unread earlier ones."""
        self._watchers = {watcher: None for watcher in self._watchers if watcher.offer_state(name, state)}

    def close(self) -> None:
        """Ends all watchers with SHUTTING_DOWN."""
        for watcher in self._watchers:
            watcher.end(shutting_down())
        self._watchers.clear()


def shutting_down() -> WeftError:
    """Returns the error that ends all watchers."""
    return WeftError(Reason.SHUTTING_DOWN, "the registry is shutting down; watch again")

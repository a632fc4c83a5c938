"""Those who follow which prompts a store has."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MAX_FOLLOWERS = 64


class StoreFollowers:
    """Wakes its followers after changes. Used on the event loop only."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change
        self._events: set[asyncio.Event] = set()
        self._has_ended = False

    def note_change(self) -> None:
        """Records that the store has changed."""
        self.on_change()
        for event in self._events:
            event.set()

    def end(self) -> None:
        """Ends all followers: the runner stops."""
        self._has_ended = True
        self.note_change()

    async def changes(self) -> AsyncGenerator[None]:
        """Yields immediately, then after changes. Raises TOO_MANY_RESOURCES beyond MAX_FOLLOWERS."""
        if len(self._events) >= MAX_FOLLOWERS:
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"{MAX_FOLLOWERS} callers follow the stored prompts, the limit")
        event = asyncio.Event()
        self._events.add(event)
        try:
            while not self._has_ended:
                yield
                await event.wait()
                event.clear()
        finally:
            self._events.discard(event)

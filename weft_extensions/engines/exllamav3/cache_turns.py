"""Isolates requests of different tenants that use one cache.

The library shares cached pages between all prompts and cannot separate them. Only a new generator drops all pages,
which is fast but requires that no request is running. So requests with one salt run concurrently, and a request with
another salt waits until they have ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_UNKNOWN = object()
"""Salt of pages with an unknown owner."""


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True)
class _Place:
    """A request in the queue."""

    salt: object
    admitted: asyncio.Future[None] = field(default_factory=_future)
    renews: bool = False
    """Whether the engine must drop its pages before this request."""


class CacheTurns:
    """Admits requests in order of arrival. Not thread-safe: use it on one event loop."""

    def __init__(self, renew: Callable[[], Awaitable[None]]) -> None:
        """`renew` makes the engine drop all pages; called while no other request is admitted."""
        self._renew = renew
        self._salt: object = None
        """Salt of the cached pages; None: there are none."""
        self._admitted = 0
        self._is_renewing = False
        self._waiting: deque[_Place] = deque()

    @asynccontextmanager
    async def turn(self, salt: object) -> AsyncGenerator[None]:
        """Holds the cache, shared with requests of the same salt."""
        place = _Place(salt)
        self._waiting.append(place)
        self._admit()
        try:
            await place.admitted
            if place.renews:
                await self._renew()
                place.renews = self._is_renewing = False
                self._admit()
            yield
        finally:
            self._leave(place)

    def _admit(self) -> None:
        """Admits requests from the head of the queue that can share the cache."""
        while self._waiting and not self._is_renewing:
            place = self._waiting[0]
            if self._admitted and self._salt != place.salt:
                return
            self._waiting.popleft()
            self._admitted += 1
            place.renews = self._is_renewing = self._salt not in (None, place.salt)
            self._salt = place.salt
            if not place.admitted.done():
                place.admitted.set_result(None)

    def _leave(self, place: _Place) -> None:
        if place in self._waiting:
            self._waiting.remove(place)
        else:
            self._admitted -= 1
            if place.renews:
                # The request was cancelled or the renewal failed: the pages may still exist.
                self._is_renewing, self._salt = False, _UNKNOWN
        self._admit()

"""The order in which requests of different tenants use one cache.

The library finds the pages of every earlier prompt for every later one, and has no name by which to keep them apart.
It forgets all pages with a new generator, which takes no time and needs that no request runs. So requests with one
salt work side by side, and a request with another waits until they have ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_UNKNOWN = object()
"""The salt of pages of which it is not known whose they are."""


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True)
class _Place:
    """The place of one request in the queue."""

    salt: object
    admitted: asyncio.Future[None] = field(default_factory=_future)
    renews: bool = False
    """Whether the engine must forget its pages before this request."""


class CacheTurns:
    """Admits requests in the order of their arrival. Used on one event loop only."""

    def __init__(self, renew: Callable[[], Awaitable[None]]) -> None:
        """`renew` makes the engine forget all pages; called while no request is admitted but the one that waits."""
        self._renew = renew
        self._salt: object = None
        """Of the requests whose pages the engine has; None: it has none."""
        self._admitted = 0
        self._is_renewing = False
        self._waiting: deque[_Place] = deque()

    @asynccontextmanager
    async def turn(self, salt: object) -> AsyncGenerator[None]:
        """Hold the cache together with requests of the same salt."""
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
        """Admit requests from the head of the queue, as far as they share the cache."""
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
                # It was cancelled, or the renewal failed: the pages may still be there.
                self._is_renewing, self._salt = False, _UNKNOWN
        self._admit()

"""Where the decisions about one request wait until its caller reads them."""

import asyncio
from dataclasses import dataclass, field

from weft.dispatch import placement
from weft.kernel.errors import WeftError


@dataclass(slots=True)
class Mailbox:
    """The decisions for one request, in order. At most one caller waits on it."""

    request: placement.PlacementRequest
    allow_remote: bool
    """The permit: request and tenant allow that it leaves the premises."""
    _decisions: list[placement.Decision | WeftError] = field(default_factory=list)
    """Few at a time. A deque takes 0.7 KB, for as long as the request runs."""
    _arrived: asyncio.Future[None] | None = None

    def put(self, decision: placement.Decision | WeftError) -> None:
        """Deliver a decision. A word about waiting replaces an older one that nobody has read yet."""
        if self._decisions and isinstance(self._decisions[-1], (placement.WaitingInQueue, placement.LoadingModel)):
            self._decisions.pop()
        self._decisions.append(decision)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def get(self) -> placement.Decision:
        """The next decision; raises the WeftError of a rejection."""
        while not self._decisions:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        decision = self._decisions.pop(0)
        if isinstance(decision, WeftError):
            raise decision
        return decision

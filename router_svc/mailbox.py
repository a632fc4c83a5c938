"""The mailbox of one request: decisions that its caller has not read yet."""

import asyncio
from dataclasses import dataclass, field

from weft.dispatch import placement
from weft.kernel.errors import WeftError


@dataclass(slots=True)
class Mailbox:
    """Decisions for one request, in order. At most one caller reads it."""

    request: placement.PlacementRequest
    allow_remote: bool
    """The permit to leave the premises, of both request and tenant."""
    _decisions: list[placement.Decision | WeftError] = field(default_factory=list)
    """Short. A deque takes 0.7 KB for as long as the request runs."""
    _arrived: asyncio.Future[None] | None = None

    def put(self, decision: placement.Decision | WeftError) -> None:
        """Deliver a decision. A status message replaces an unread earlier one."""
        if self._decisions and isinstance(self._decisions[-1], (placement.WaitingInQueue, placement.LoadingModel)):
            self._decisions.pop()
        self._decisions.append(decision)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def get(self) -> placement.Decision:
        """Return the next decision; raises the WeftError of a rejection."""
        while not self._decisions:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        decision = self._decisions.pop(0)
        if isinstance(decision, WeftError):
            raise decision
        return decision

"""Responses that are being streamed: what they are so far, and their end on somebody's word."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from gateway.responses.document import CANCELLED, IN_PROGRESS
from gateway.responses.keeping import GrowingResponse, Keeping
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible
from weft.kernel.reasons import Reason


class RunningResponse:
    """One response that others may look at and end."""

    def __init__(self, tenant: str, response_id: str, growing: GrowingResponse, keeping: Keeping | None) -> None:
        """`keeping`: None: it is not to be kept."""
        self.tenant = tenant
        self.response_id = response_id
        self.is_concluded = False
        """Whether the whole answer is there, so that there is nothing left to end."""
        self._growing = growing
        self._keeping = keeping
        self._block = Interruptible()
        self._ended_by: WeftError | None = None
        self._settled = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Whether somebody has ended it."""
        return self._ended_by is not None

    def snapshot(self) -> bytes:
        """The response as it is now, as JSON."""
        return self._growing.snapshot(CANCELLED if self.is_ended else IN_PROGRESS)

    @property
    def items(self) -> bytes | None:
        """Its own input, a JSON list of items; None where it is not to be kept, so that nobody holds it."""
        return None if self._keeping is None else self._keeping.items

    def waiting(self) -> Interruptible:
        """A block around a wait that `end` may end. Raises what it was ended with."""
        self._require_going()
        return self._block

    def conclude(self) -> None:
        """The whole answer is there. Raises what it was ended with."""
        self._require_going()
        self.is_concluded = True

    async def cancel(self) -> bytes:
        """End one that is not concluded, at once where its runner is waited for; returns it as JSON, as it is kept."""
        self._ended_by = WeftError(Reason.CANCELLED, "the response was cancelled")
        self._block.interrupt(self._ended_by)
        try:
            if self._keeping is not None:
                await self._keeping.keep(self._growing, self.snapshot())
            return self.snapshot()
        finally:
            self._settled.set()

    async def settled(self) -> None:
        """Wait until it is known whether one that was ended is kept."""
        await self._settled.wait()

    def _require_going(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by


class RunningResponses:
    """Those of one gateway."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._running: dict[str, RunningResponse] = {}

    def find(self, tenant: str, response_id: str) -> RunningResponse | None:
        """One of the tenant's; None: it does not run here."""
        found = self._running.get(response_id)
        return found if found is not None and found.tenant == tenant else None

    def require_room(self) -> None:
        """Raises RATE_LIMIT_EXCEEDED where there is no room for one more."""
        if len(self._running) >= self._max_running:
            message = f"more than {self._max_running} responses are being streamed (max_running_responses)"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message)

    @contextmanager
    def joined(self, running: RunningResponse) -> Generator[None]:
        """Have `running` found meanwhile. Raises RATE_LIMIT_EXCEEDED for one too many."""
        self.require_room()
        self._running[running.response_id] = running
        try:
            yield
        finally:
            del self._running[running.response_id]

"""Responses that are being streamed: what they are so far, and their end on somebody's word."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import structlog

from gateway.ports import Generation
from gateway.responses.document import CANCELLED, IN_PROGRESS
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.frames import Frame
from weft.durable.responses import ResponseStore, StoredResponse
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible
from weft.kernel.reasons import Reason

log = structlog.get_logger("weft.gateway")


class PartialResponse(Protocol):
    """A response on its way; see `gateway.responses.stream` and `responses_answer`."""

    def snapshot(self, status: str = ...) -> bytes:
        """The response as it is now, as JSON; once it is concluded, as it has become."""
        ...

    def conclude(self, receipt: receipt_pb2.Receipt) -> bytes:
        """Its end is next: the whole response as JSON. Raises BACKEND_PROTOCOL_ERROR where it cannot be its end."""
        ...

    def not_kept(self, why: WeftError) -> None:
        """It was to be kept and is not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """Where a response is to be kept, and what is known of it before there is an answer."""

    store: ResponseStore
    id: str
    tenant: str
    previous_id: str
    """The response it continues; empty: none."""
    created_at: datetime
    items: bytes
    """Its own input, a JSON list of items."""

    async def keep(self, growing: PartialResponse, body: bytes) -> bool:
        """Whether it is kept now; where it is not, `growing` says so."""
        response = StoredResponse(
            id=self.id,
            tenant=self.tenant,
            previous_id=self.previous_id,
            created_at=self.created_at,
            body=body,
            items=self.items,
        )
        try:
            await self.store.save(response)
        except WeftError as error:
            log.warning("response not kept", response_id=self.id, reason=error.reason.name.lower())
            growing.not_kept(error)
            return False
        return True


class RunningResponse:
    """One response that others may look at and end."""

    def __init__(self, tenant: str, response_id: str, growing: PartialResponse, keeping: ResponseRecord | None) -> None:
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


class RecordedGeneration:
    """A generation whose response others may look at, and which is kept before its last event is handed on."""

    def __init__(
        self,
        generation: Generation,
        growing: PartialResponse,
        *,
        keeping: ResponseRecord | None,
        running: RunningResponse | None,
        everyone: RunningResponses,
    ) -> None:
        """`keeping`: None: it is not to be kept; `running`: None: nobody could know of it before its end."""
        self._generation = generation
        self._growing = growing
        self._keeping = keeping
        self._running = running
        self._everyone = everyone

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """See Generation.receipt."""
        return self._generation.receipt

    async def frames(self) -> AsyncGenerator[Frame]:
        """See Generation.frames. Raises CANCELLED where somebody ended it."""
        running = self._running
        with ExitStack() as stack:
            if running is not None:
                stack.enter_context(self._everyone.joined(running))
            try:
                async with aclosing(self._generation.frames()) as frames:
                    while (frame := await self._next(frames)) is not None:
                        if not (frame and frame[-1].HasField("finished")):
                            yield frame
                            continue
                        if len(frame) > 1:
                            yield frame[:-1]
                        await self._conclude(frame[-1].finished.receipt)
                        # Whoever reads the last events slowly must not keep others from deleting what is kept.
                        stack.close()
                        yield frame[-1:]
            except WeftError as error:
                if running is not None and running.is_ended:
                    await running.settled()
                elif error.reason is Reason.CANCELLED and self._keeping is not None:
                    self._growing.not_kept(error)
                raise

    async def _next(self, frames: AsyncGenerator[Frame]) -> Frame | None:
        if self._running is None:
            return await anext(frames, None)
        with self._running.waiting():
            return await anext(frames, None)

    async def _conclude(self, receipt: receipt_pb2.Receipt) -> None:
        if self._running is not None:
            self._running.conclude()
        body = self._growing.conclude(receipt)
        if self._keeping is not None:
            await self._keeping.keep(self._growing, body)

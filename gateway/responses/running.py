"""Running responses: snapshots of streamed responses, their cancellation, and storing them at their end."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gateway.responses.document import CANCELLED, IN_PROGRESS, ResponseDocument
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.call import Call, Proceed
from weft.dispatch.frames import Frame
from weft.durable.responses import ResponseStore, StoredResponse
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.gateway")


class PartialResponse(Protocol):
    """A response that is being generated; see `gateway.responses.stream`."""

    @property
    def document(self) -> ResponseDocument:
        """The response so far."""
        ...

    def snapshot(self, status: str = ...) -> bytes:
        """Returns the current response as JSON; the final one once it is concluded."""
        ...

    def conclude(self, receipt: receipt_pb2.Receipt) -> bytes:
        """Conclude the response; returns it as JSON. Raises BACKEND_PROTOCOL_ERROR for an invalid end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """Where a response is stored, and its fields that are known before the answer."""

    store: ResponseStore
    id: str
    tenant: str
    previous_id: str
    """The response it continues; empty: none."""
    created_at: datetime
    items: bytes
    """Its own input, a JSON list of items."""

    async def keep(self, partial: PartialResponse, body: bytes) -> bool:
        """Store the response; returns whether that succeeded, and records a failure in `partial`."""
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
            partial.document.note_not_stored(error)
            return False
        return True


class RunningResponse:
    """One running response that other requests may retrieve and cancel."""

    def __init__(self, tenant: str, response_id: str, partial: PartialResponse, record: ResponseRecord | None) -> None:
        """`record`: None: it is not stored."""
        self.tenant = tenant
        self.response_id = response_id
        self.is_concluded = False
        """Whether the answer is complete, so that it can no longer be cancelled."""
        self._growing = partial
        self._keeping = record
        self._block = Interruptible()
        self._ended_by: WeftError | None = None
        self._settled = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Whether it was cancelled."""
        return self._ended_by is not None

    def snapshot(self) -> bytes:
        """Returns the current response as JSON."""
        return self._growing.snapshot(CANCELLED if self.is_ended else IN_PROGRESS)

    @property
    def items(self) -> bytes | None:
        """Its input, a JSON list of items; None where it is not stored."""
        return None if self._keeping is None else self._keeping.items

    def waiting(self) -> Interruptible:
        """Returns a block that `cancel` interrupts. Raises the cancellation."""
        self._require_going()
        return self._block

    def conclude(self) -> None:
        """Mark the answer as complete. Raises the cancellation."""
        self._require_going()
        self.is_concluded = True

    async def cancel(self) -> bytes:
        """Cancel the response, also while its runner is awaited; returns it as JSON, as stored."""
        self._ended_by = WeftError(Reason.CANCELLED, "the response was cancelled")
        self._block.interrupt(self._ended_by)
        try:
            if self._keeping is not None:
                await self._keeping.keep(self._growing, self.snapshot())
            return self.snapshot()
        finally:
            self._settled.set()

    async def settled(self) -> None:
        """Wait until a cancelled response is stored or storing failed."""
        await self._settled.wait()

    def _require_going(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by


class RunningResponses:
    """The running responses of one gateway, by id."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._running: dict[str, RunningResponse] = {}

    def find(self, tenant: str, response_id: str) -> RunningResponse | None:
        """Returns a running response of the tenant; None: it does not run on this gateway."""
        found = self._running.get(response_id)
        return found if found is not None and found.tenant == tenant else None

    def require_room(self) -> None:
        """Raises RATE_LIMIT_EXCEEDED where the maximum number is running."""
        if len(self._running) >= self._max_running:
            message = f"more than {self._max_running} responses are being streamed (max_running_responses)"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message)

    @contextmanager
    def joined(self, running: RunningResponse) -> Generator[None]:
        """Register `running` while the block runs. Raises RATE_LIMIT_EXCEEDED above the maximum."""
        self.require_room()
        self._running[running.response_id] = running
        try:
            yield
        finally:
            del self._running[running.response_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecording:
    """A layer around a generation whose response can be retrieved; it is stored before its last event is passed on."""

    partial: PartialResponse
    record: ResponseRecord | None
    """None: it is not stored."""
    running: RunningResponse | None
    """None: it cannot be retrieved before its end."""
    all_running: RunningResponses

    async def __call__(self, call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        """Yields the frames. Raises CANCELLED where it was cancelled."""
        running = self.running
        with ExitStack() as stack:
            if running is not None:
                stack.enter_context(self.all_running.joined(running))
            try:
                async with aclosing(proceed(call)) as frames:
                    while (frame := await self._next(frames)) is not None:
                        if not (frame and frame[-1].HasField("finished")):
                            yield frame
                            continue
                        if len(frame) > 1:
                            yield frame[:-1]
                        await self._conclude(frame[-1].finished.receipt)
                        # A slow reader of the last events must not block deletion of the stored response.
                        stack.close()
                        yield frame[-1:]
            except WeftError as error:
                if running is not None and running.is_ended:
                    await running.settled()
                elif error.reason is Reason.CANCELLED and self.record is not None:
                    self.partial.document.note_not_stored(error)
                raise

    async def _next(self, frames: AsyncGenerator[Frame]) -> Frame | None:
        if self.running is None:
            return await anext(frames, None)
        with self.running.waiting():
            return await anext(frames, None)

    async def _conclude(self, receipt: receipt_pb2.Receipt) -> None:
        if self.running is not None:
            self.running.conclude()
        body = self.partial.conclude(receipt)
        if self.record is not None:
            await self.record.keep(self.partial, body)

"""Live responses: snapshots and cancellation of streamed ones, and storage at their end."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING

from gateway.responses.document import CANCELLED, IN_PROGRESS
from gateway.responses.response_stream import PartialResponse
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.dispatch.call import Call, Proceed
from weft.dispatch.frames import Frame
from weft.durable.responses import ResponseClient
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.timestamps import stamp_of

if TYPE_CHECKING:
    from gateway.running_responses import RunningResponses

AddTo = Callable[[bytes, bytes], Awaitable[list[dict[str, object]]]]
log = get_logger("weft.gateway")


class LiveResponse:
    """A response being generated, as a layer around its generation.

    Other requests may retrieve and cancel it, and it is stored at its end.
    """

    def __init__(
        self,
        tenant: str,
        partial: PartialResponse,
        *,
        store: ResponseClient | None,
        items: bytes,
        previous_id: str,
        add_to: AddTo | None = None,
        running: "RunningResponses[LiveResponse] | None",
    ) -> None:
        """`store`: None: it is not stored. `running`: None: it cannot be retrieved before its end.

        `items`: its input as a JSON list; `previous_id`: the response that it continues; empty: none.
        `add_to`: adds its input and output to its conversation; returns warnings.
        """
        self.tenant = tenant
        self.response_id = partial.document.response_id
        self.is_concluded = False
        """Whether the answer is complete, so that it can no longer be cancelled."""
        self._partial = partial
        self._store = store
        self._items = items
        self._previous_id = previous_id
        self._add_to = add_to
        self._running = running
        self._block = Interruptible()
        self._ended_by: WeftError | None = None
        self._settled = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Whether it was cancelled."""
        return self._ended_by is not None

    def snapshot(self) -> bytes:
        """Returns the current response as JSON."""
        return self._partial.snapshot(CANCELLED if self.is_ended else IN_PROGRESS)

    @property
    def is_settled(self) -> bool:
        """Whether it was cancelled and has been stored, even if its stream still waits for a slow reader."""
        return self._settled.is_set()

    @property
    def items(self) -> bytes | None:
        """Its input as a JSON list; None: it is not stored."""
        return None if self._store is None else self._items

    async def cancel(self) -> bytes:
        """Cancels the response, even while it waits for a runner; returns it as JSON, as stored."""
        self._ended_by = WeftError(Reason.CANCELLED, "the response was cancelled")
        self._block.interrupt(self._ended_by)
        try:
            await self._save(self.snapshot())
            return self.snapshot()
        finally:
            self._settled.set()

    async def __call__(self, call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        """Yields the frames; the response is stored before the last. Raises CANCELLED if it was cancelled."""
        with ExitStack() as stack:
            if self._running is not None:
                stack.enter_context(self._running.joined(self))
            try:
                async with aclosing(proceed(call)) as frames:
                    while (frame := await self._next(frames)) is not None:
                        if not (frame and frame[-1].HasField("finished")):
                            yield frame
                            continue
                        if len(frame) > 1:
                            yield frame[:-1]
                        await self._conclude(frame[-1].finished.receipt)
                        # A slow reader of the last events must not prevent deletion of the stored response.
                        stack.close()
                        yield frame[-1:]
            except WeftError as error:
                if self.is_ended:
                    await self._settled.wait()
                elif error.reason is Reason.CANCELLED and self._store is not None:
                    self._partial.document.note_not_stored(error)
                raise

    async def _next(self, frames: AsyncGenerator[Frame]) -> Frame | None:
        if self._running is None:
            return await anext(frames, None)
        self._require_going()
        with self._block:
            return await anext(frames, None)

    async def _conclude(self, receipt: receipt_pb2.Receipt) -> None:
        self._require_going()
        self.is_concluded = True
        body = self._partial.conclude(receipt)
        if self._add_to is not None:
            self._partial.document.warnings += await self._add_to(self._items, body)
            body = self._partial.snapshot()
        await self._save(body)

    def _require_going(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by

    async def _save(self, body: bytes) -> None:
        """Stores the response, if it has a store; records a failure in it."""
        if self._store is None:
            return
        document = self._partial.document
        response = StoredResponse(
            id=self.response_id,
            tenant=self.tenant,
            previous_id=self._previous_id,
            create_time=stamp_of(document.created_at),
            body=body,
            items=self._items,
        )
        try:
            await self._store.save(response)
        except WeftError as error:
            log.warning("response not stored", response_id=self.response_id, reason=error.reason.name.lower())
            document.note_not_stored(error)

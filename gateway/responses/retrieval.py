"""Retrieval of responses by id: running on this gateway, stored, or in the background."""

from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from typing_extensions import override

from gateway.responses.background import BackgroundResponse, BackgroundResponses, StreamPosition
from gateway.responses.document import CANCELLED
from gateway.responses.history import items_to_store
from gateway.responses.running import RunningResponses
from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.durable.responses import ResponseStore, response_not_found
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.time_limit import store_answer

Answer = TypeVar("Answer")


class StoreWithTimeout(ResponseStore):
    """A ResponseStore with a timeout for each call; raises SERVICE_UNAVAILABLE."""

    def __init__(self, store: ResponseStore, *, timeout_seconds: float) -> None:
        self._store = store
        self._timeout_seconds = timeout_seconds

    @override
    async def save(self, response: StoredResponse) -> None:
        await self._in_time(self._store.save(response))

    @override
    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        return await self._in_time(self._store.get(tenant, response_id))

    @override
    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        return await self._in_time(self._store.chain(tenant, response_id))

    @override
    async def delete(self, tenant: str, response_id: str) -> None:
        await self._in_time(self._store.delete(tenant, response_id))

    async def _in_time(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        return await store_answer(self._timeout_seconds, answer, "response store")


class _Body(msgspec.Struct):
    """The fields read from a stored response."""

    status: str = ""
    background: bool | None = None


class ResponseRetrieval:
    """All responses that one gateway can retrieve."""

    def __init__(
        self, store: ResponseStore | None, running: RunningResponses, background: BackgroundResponses | None
    ) -> None:
        """`store`, `background`: None where there are no such responses."""
        self._store = store
        self._running = running
        self._background = background

    async def body(self, tenant: str, response_id: str) -> bytes:
        """Returns the current response as JSON. Raises NOT_FOUND, as all methods."""
        running = self._running.find(tenant, response_id)
        if running is not None:
            return running.snapshot()
        kept = await self._found(tenant, response_id)
        if kept is not None:
            return kept.body
        background, found = await self._in_background(tenant, response_id)
        return await background.body(found)

    async def events(
        self, tenant: str, response_id: str, position: StreamPosition, starting_after: int
    ) -> AsyncGenerator[bytes]:
        """Returns the event stream of a background response. Raises INVALID_ARGUMENT naming `stream` for others."""
        running = self._running.find(tenant, response_id)
        try:
            background, found = await self._in_background(tenant, response_id)
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            if running is None and await self._found(tenant, response_id) is None:
                raise
            raise not_streamed_again() from None
        return background.follow(found, position, starting_after=starting_after)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete it. Raises RESOURCE_IN_USE for one that is running."""
        if self._running.find(tenant, response_id) is not None:
            raise WeftError(Reason.RESOURCE_IN_USE, f"response {response_id} is being streamed; cancel it first")
        had_task = await self._forget_task(tenant, response_id)
        if self._store is None:
            raise response_not_found(response_id)
        try:
            await self._store.delete(tenant, response_id)
        except WeftError as error:
            # An ended background response may not be stored yet.
            if not (had_task and error.reason is Reason.NOT_FOUND):
                raise

    async def cancel(self, tenant: str, response_id: str) -> bytes:
        """Cancel it; returns it as JSON. Raises INVALID_ARGUMENT for one that has ended."""
        running = self._running.find(tenant, response_id)
        if running is not None:
            if running.is_concluded or running.is_ended:
                raise _at_its_end(response_id)
            return await running.cancel()
        kept = await self._found(tenant, response_id)
        if kept is None:
            background, found = await self._in_background(tenant, response_id)
            return await background.cancel(found)
        body = msgspec.json.decode(kept.body, type=_Body)
        if not (body.background and body.status == CANCELLED):
            raise _at_its_end(response_id)
        return kept.body

    async def input_items(self, tenant: str, response_id: str) -> Sequence[dict[str, object]]:
        """Returns its input items."""
        running = self._running.find(tenant, response_id)
        if running is not None:
            raw = running.items
            if raw is None:
                raise response_not_found(response_id)
        else:
            kept = await self._found(tenant, response_id)
            raw = await self._items_in_background(tenant, response_id) if kept is None else kept.items
        items: list[dict[str, object]] = msgspec.json.decode(raw)
        return items

    async def _items_in_background(self, tenant: str, response_id: str) -> bytes:
        _, found = await self._in_background(tenant, response_id)
        return items_to_store(found.origin.items, found.id)

    async def _forget_task(self, tenant: str, response_id: str) -> bool:
        try:
            background, found = await self._in_background(tenant, response_id)
            await background.delete(found)
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                return False
            raise
        return True

    async def _found(self, tenant: str, response_id: str) -> StoredResponse | None:
        if self._store is None:
            return None
        try:
            return await self._store.get(tenant, response_id)
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                return None
            raise

    async def _in_background(self, tenant: str, response_id: str) -> tuple[BackgroundResponses, BackgroundResponse]:
        if self._background is None:
            raise response_not_found(response_id)
        return self._background, await self._background.find(tenant, response_id)


def not_streamed_again() -> FieldError:
    """Returns the error of a stream that cannot be resumed."""
    return invalid_field("stream", "must be false: only a background response can be streamed again")


def _at_its_end(response_id: str) -> FieldError:
    return invalid_field("response_id", f"response {response_id} has ended and cannot be cancelled")

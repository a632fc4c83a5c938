"""Retrieval of responses by id: running on this gateway, stored, or in the background."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from gateway.deps import GatewayDeps
from gateway.gateway_config import KeepResponses
from gateway.responses.background import BackgroundResponse, BackgroundResponses, StreamPosition
from gateway.responses.document import CANCELLED
from gateway.responses.history import items_to_store
from gateway.responses.output import is_conversation
from gateway.responses.running import LiveResponse
from gateway.routing import collaborator
from gateway.running_responses import RunningResponses
from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.durable.responses import ResponseClient, response_not_found
from weft.kernel.errors.error_tree import FieldError, WeftError, found_or_none, invalid_field
from weft.kernel.errors.reasons import Reason


class _Body(msgspec.Struct):
    """The fields read from a stored response."""

    status: str = ""
    background: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """All responses of one gateway, and the collaborators of their endpoints."""

    deps: GatewayDeps
    store: ResponseClient | None
    """None: no responses are stored."""
    running: RunningResponses[LiveResponse]
    keeps: KeepResponses = KeepResponses.BY_DEFAULT
    background: BackgroundResponses | None = None
    """None: there are no background responses."""

    async def body(self, tenant: str, response_id: str) -> bytes:
        """Returns the current response as JSON. Raises NOT_FOUND, as all methods."""
        match await self._find(tenant, response_id):
            case BackgroundResponse() as found:
                return await self._require_background(response_id).body(found)
            case LiveResponse() as live:
                return live.snapshot()
            case stored:
                return stored.body

    async def events(
        self, tenant: str, response_id: str, position: StreamPosition, starting_after: int
    ) -> AsyncGenerator[bytes]:
        """Returns the event stream of a background response. Raises INVALID_ARGUMENT naming `stream` for others."""
        found = await found_or_none(self._in_background(tenant, response_id))
        if found is None:
            await self._find(tenant, response_id)
            raise not_streamed_again()
        return self._require_background(response_id).follow(found, position, starting_after=starting_after)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes it. Raises RESOURCE_IN_USE if it is running."""
        if self.running.find(tenant, response_id) is not None:
            raise WeftError(Reason.RESOURCE_IN_USE, f"response {response_id} is being streamed; cancel it first")
        had_task = await found_or_none(self._delete_task(tenant, response_id))
        if self.store is None or is_conversation(response_id):
            raise response_not_found(response_id)
        try:
            await self.store.delete(tenant, response_id)
        except WeftError as error:
            # An ended background response may not be stored yet.
            if not (had_task and error.reason is Reason.NOT_FOUND):
                raise

    async def cancel(self, tenant: str, response_id: str) -> bytes:
        """Cancels it; returns it as JSON. Raises INVALID_ARGUMENT if it has ended."""
        match await self._find(tenant, response_id):
            case BackgroundResponse() as found:
                return await self._require_background(response_id).cancel(found)
            case LiveResponse() as live if not (live.is_concluded or live.is_ended):
                return await live.cancel()
            case StoredResponse() as stored if _is_cancelled_in_background(stored):
                return stored.body
        raise invalid_field("response_id", f"response {response_id} has ended and cannot be cancelled")

    async def input_items(self, tenant: str, response_id: str) -> Sequence[dict[str, object]]:
        """Returns its input items."""
        found = await self._find(tenant, response_id)
        if isinstance(found, BackgroundResponse):
            raw: bytes | None = items_to_store(found.request.items, found.id)
        else:
            raw = found.items
        if raw is None:
            raise response_not_found(response_id)
        items: list[dict[str, object]] = msgspec.json.decode(raw)
        return items

    async def _find(self, tenant: str, response_id: str) -> LiveResponse | StoredResponse | BackgroundResponse:
        live = self.running.find(tenant, response_id)
        if live is not None:
            return live
        store = None if is_conversation(response_id) else self.store
        stored = None if store is None else await found_or_none(store.get(tenant, response_id))
        return await self._in_background(tenant, response_id) if stored is None else stored

    async def _delete_task(self, tenant: str, response_id: str) -> bool:
        found = await self._in_background(tenant, response_id)
        await self._require_background(response_id).delete(found)
        return True

    async def _in_background(self, tenant: str, response_id: str) -> BackgroundResponse:
        return await self._require_background(response_id).find(tenant, response_id)

    def _require_background(self, response_id: str) -> BackgroundResponses:
        if self.background is None:
            raise response_not_found(response_id)
        return self.background


Stored = Annotated[Responses, collaborator(Responses)]


def _is_cancelled_in_background(stored: StoredResponse) -> bool:
    body = msgspec.json.decode(stored.body, type=_Body)
    return bool(body.background) and body.status == CANCELLED


def not_streamed_again() -> FieldError:
    """Returns the error of a stream that cannot be resumed."""
    return invalid_field("stream", "must be false: only a background response can be streamed again")

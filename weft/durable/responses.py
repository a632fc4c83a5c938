"""The client of the response store.

A response and its input are JSON that the store never parses. Every method takes the tenant and raises NOT_FOUND for
another tenant's response. A `StoredResponse` is immutable, except a conversation, which grows by one holder at a time.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from weft.api.router.v1 import stored_response_service_pb2 as pb
from weft.api.router.v1 import stored_response_service_pb2_grpc
from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.durable.store_calls import store_calls
from weft.durable.tasks import TASK_PREFIX
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

RESPONSE_PREFIX = "resp_"
BACKGROUND_KIND = "responses.background"
"""`TaskSpec.origin_kind` of a background response."""
TIMEOUT_SECONDS = 5.0
"""Timeout of every call, since a response that cannot be stored is still answered."""
MAX_CHAIN = 256


class ResponseClient:
    """Client of the response store. Every method raises SERVICE_UNAVAILABLE if the store is unreachable."""

    def __init__(self, store: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`store`: a channel to the router, or its servicer in this process."""
        stub = stored_response_service_pb2_grpc.StoredResponseServiceStub
        self._calls = store_calls(store, stub, "response store", timeout_seconds)

    async def save(self, response: StoredResponse, *, holder: str = "") -> None:
        """Stores a response, replacing one with the same id and tenant; returns once it is durable.

        Raises REQUEST_TOO_LARGE above the size limit, TOO_MANY_RESOURCES at the tenant's limit, ALREADY_EXISTS if the
        id belongs to another tenant. `holder`: its hold ends; raises NOT_FOUND, RESOURCE_IN_USE if another holds it.
        """
        await self._calls.ask("SaveResponse", pb.SaveResponseRequest(response=response, holder=holder))

    async def hold(self, tenant: str, name: str, holder: str, seconds: float | None, *, former: str = "") -> None:
        """Reserves a response for one writer, or extends its hold. Raises NOT_FOUND, RESOURCE_IN_USE if it is held.

        `seconds`: 0: the hold ends; None: until the writer saves the response. `former`: a holder that is replaced.
        """
        request = pb.HoldResponseRequest(tenant=tenant, id=name, holder=holder, former_holder=former)
        if seconds is not None:
            request.duration.FromTimedelta(timedelta(seconds=seconds))
        await self._calls.ask("HoldResponse", request)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Returns one response. Raises NOT_FOUND."""
        request = pb.GetResponseRequest(tenant=tenant, id=response_id)
        response: StoredResponse = (await self._calls.ask("GetResponse", request)).response
        return response

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """Returns the response and all those it continues, oldest first.

        Raises NOT_FOUND if one of them is deleted, INVALID_ARGUMENT for more than MAX_CHAIN.
        """
        request = pb.ListChainRequest(tenant=tenant, id=response_id)
        responses: Sequence[StoredResponse] = (await self._calls.ask("ListChain", request)).responses
        return responses

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response. Raises NOT_FOUND."""
        await self._calls.ask("DeleteResponse", pb.DeleteResponseRequest(tenant=tenant, id=response_id))


def response_not_found(response_id: str, *, before: str = "") -> WeftError:
    """Returns NOT_FOUND for a response that is unknown or another tenant's; `before`: the one that continues it."""
    why = f": it was deleted or has expired, and {before} continues it" if before else ""
    return WeftError(Reason.NOT_FOUND, f"there is no response {response_id}{why}")


def background_response_id(task_id: str) -> str:
    """Returns the id of a task's response."""
    return RESPONSE_PREFIX + task_id.removeprefix(f"{TASK_PREFIX}-")

"""StoredResponseService over the keeper. Translation only."""

from datetime import UTC
from typing import Any

import grpc

from weft.api.router.v1 import stored_response_service_pb2 as pb
from weft.api.router.v1 import stored_response_service_pb2_grpc
from weft.durable.remote_responses import response_message
from weft.durable.responses import ResponseStore, StoredResponse
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_token
from weft.kernel.rpc import answering

Context = grpc.aio.ServicerContext[Any, Any]


class StoredResponseServicer(stored_response_service_pb2_grpc.StoredResponseServiceServicer):
    """See StoredResponseService."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def SaveResponse(  # noqa: N802 - the rpc's name
        self, request: pb.SaveResponseRequest, context: Context
    ) -> pb.SaveResponseResponse:
        """See StoredResponseService.SaveResponse."""
        async with answering(context):
            await self._store.save(_response_of(request.response))
            return pb.SaveResponseResponse()
        raise AssertionError("abort has raised")

    async def GetResponse(  # noqa: N802 - the rpc's name
        self, request: pb.GetResponseRequest, context: Context
    ) -> pb.GetResponseResponse:
        """See StoredResponseService.GetResponse."""
        async with answering(context):
            found = await self._store.get(*_named(request))
            return pb.GetResponseResponse(response=response_message(found))
        raise AssertionError("abort has raised")

    async def ListChain(self, request: pb.ListChainRequest, context: Context) -> pb.ListChainResponse:  # noqa: N802
        """See StoredResponseService.ListChain."""
        async with answering(context):
            found = await self._store.chain(*_named(request))
            return pb.ListChainResponse(responses=map(response_message, found))
        raise AssertionError("abort has raised")

    async def DeleteResponse(  # noqa: N802 - the rpc's name
        self, request: pb.DeleteResponseRequest, context: Context
    ) -> pb.DeleteResponseResponse:
        """See StoredResponseService.DeleteResponse."""
        async with answering(context):
            await self._store.delete(*_named(request))
            return pb.DeleteResponseResponse()
        raise AssertionError("abort has raised")


def _named(request: pb.GetResponseRequest | pb.ListChainRequest | pb.DeleteResponseRequest) -> tuple[str, str]:
    tenant = require_token(request.tenant, "tenant", MAX_TENANT_CHARS)
    return tenant, require_token(request.id, "id", MAX_REQUEST_ID_CHARS)


def _response_of(message: pb.StoredResponse) -> StoredResponse:
    if not message.HasField("create_time"):
        raise invalid_field("response.create_time", "is required")
    previous = message.previous_id
    return StoredResponse(
        id=require_token(message.id, "response.id", MAX_REQUEST_ID_CHARS),
        tenant=require_token(message.tenant, "response.tenant", MAX_TENANT_CHARS),
        previous_id=require_token(previous, "response.previous_id", MAX_REQUEST_ID_CHARS) if previous else "",
        created_at=message.create_time.ToDatetime(UTC),
        body=message.body,
        items=message.items,
    )

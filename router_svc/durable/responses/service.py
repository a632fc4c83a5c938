"""The service of stored responses: its gRPC servicer, and the sweeper that purges expired ones."""

from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from typing_extensions import override

from router_svc.durable.responses.config import ResponseLimits
from router_svc.durable.responses.response_store import ResponseManager, ResponseTable
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2, stored_response_service_pb2_grpc
from weft.api.router.v1 import stored_response_service_pb2 as pb
from weft.durable.remote_stores import response_message
from weft.durable.responses import ResponseStore, StoredResponse
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_token
from weft.kernel.rpc import answering
from weft.kernel.service import Service, start_restarting, stop_tasks

if TYPE_CHECKING:
    import asyncio


Context = grpc.aio.ServicerContext[Any, Any]


class StoredResponseServicer(stored_response_service_pb2_grpc.StoredResponseServiceServicer):
    """StoredResponseService over the response store; translation only."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    @override
    async def SaveResponse(self, request: pb.SaveResponseRequest, context: Context) -> pb.SaveResponseResponse:
        async with answering(context):
            await self._store.save(_response_of(request.response))
            return pb.SaveResponseResponse()
        raise AssertionError("abort has raised")

    @override
    async def GetResponse(self, request: pb.GetResponseRequest, context: Context) -> pb.GetResponseResponse:
        async with answering(context):
            found = await self._store.get(*_named(request))
            return pb.GetResponseResponse(response=response_message(found))
        raise AssertionError("abort has raised")

    @override
    async def ListChain(self, request: pb.ListChainRequest, context: Context) -> pb.ListChainResponse:
        async with answering(context):
            found = await self._store.chain(*_named(request))
            return pb.ListChainResponse(responses=map(response_message, found))
        raise AssertionError("abort has raised")

    @override
    async def DeleteResponse(self, request: pb.DeleteResponseRequest, context: Context) -> pb.DeleteResponseResponse:
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


log = structlog.get_logger("weft.router")


def build(database: RouterDatabase, limits: ResponseLimits, *, clock: Clock | None = None) -> "ResponseService":
    """Returns the service on a database, not started."""
    return ResponseService(database, limits, clock or SystemClock())


class ResponseService(Service):
    """Serves stored responses beside a router."""

    def __init__(self, database: RouterDatabase, limits: ResponseLimits, clock: Clock) -> None:
        self._database = database
        self._limits = limits
        self._clock = clock
        self._manager = ResponseManager(ResponseTable(database), limits, clock)
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def store(self) -> ResponseStore:
        """The response store for gateways in this process."""
        return self._manager

    @override
    @property
    def service_names(self) -> Sequence[str]:
        return (stored_response_service_pb2.DESCRIPTOR.services_by_name["StoredResponseService"].full_name,)

    @override
    def register(self, server: grpc.aio.Server) -> None:
        stored_response_service_pb2_grpc.add_StoredResponseServiceServicer_to_server(
            StoredResponseServicer(self._manager), server
        )

    @override
    async def start(self) -> None:
        await self._database.open()
        await self._sweep_once()
        self._sweeping = start_restarting(self._sweep, name="response-sweeper", clock=self._clock)

    @override
    async def stop(self, grace_seconds: float) -> None:
        if self._sweeping is not None:
            task, self._sweeping = self._sweeping, None
            await stop_tasks([task])
            await self._database.close()

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(self._limits.sweep_interval_seconds)
            await self._sweep_once()

    async def _sweep_once(self) -> None:
        """Sweeps once. A failure, such as a full disk, is logged and ends no service; the next round repeats it."""
        try:
            await self._manager.sweep()
        except WeftError as error:
            log.error("responses were not swept", reason=error.reason.name)  # noqa: TRY400 - the cause is logged

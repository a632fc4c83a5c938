"""gRPC servicer of the VRAM ledger."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import Grant, LeaseState
from registry_svc.ledger.requests import check_acquire, check_holder, check_renewal, holder_from
from registry_svc.wire_values import to_actor
from weft.api.registry.v1 import lease_pb2, lease_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.access.principal import MESH_ACCESS
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer, answering
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import stamp_of

Context = grpc.aio.ServicerContext[Any, Any]
RecordRelease = Callable[[Grant, str], Awaitable[None]]
"""Records in the audit log that an actor (second argument) releases a lease."""


async def no_record(_grant: Grant, _actor: str) -> None:
    """Does nothing: there is no audit log."""


class LeaseServicer(AnsweringServicer, lease_service_pb2_grpc.LeaseServiceServicer):
    """See LeaseService in the contract."""

    def __init__(self, ledger: Ledger, mesh_clock: Clock | None = None, record: RecordRelease = no_record) -> None:
        """`mesh_clock` is the mesh time to return to routers; None: return none."""
        self._ledger = ledger
        self._record = record
        self._mesh_clock = mesh_clock

    # A coroutine ends as soon as the call is cancelled, see RegistryServicer.Watch.
    @override
    async def AcquireLease(  # type: ignore[override]
        self, request: pb.AcquireLeaseRequest, context: Context
    ) -> None:
        check_acquire(request)
        _require_right(request.holder)
        async with aclosing(self._ledger.acquire(request)) as responses:
            async for response in responses:
                await context.write(response)

    @override
    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        check_renewal(request)
        _require_right(request.holder)
        return await self._ledger.renew(request)

    @override
    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        check_holder(request)
        _require_right(request.holder)
        holder = holder_from(request.holder)
        await self._ledger.release(holder, request.session_id, request.lease_id, request.fencing_number)
        return pb.ReleaseLeaseResponse()

    @override
    async def ReleaseProgramLease(
        self, request: pb.ReleaseProgramLeaseRequest, context: Context
    ) -> pb.ReleaseProgramLeaseResponse:
        check_message(request)
        actor = to_actor(request.requested_by)
        lease = self._ledger.require_releasable(request.lease_id)
        if lease.state is not LeaseState.RELEASING:
            await self._record(lease.grant, actor)
        released = await self._ledger.release_program_lease(request.lease_id)
        return pb.ReleaseProgramLeaseResponse(lease=released)

    @override
    async def ReleaseEarlierLives(
        self, request: pb.ReleaseEarlierLivesRequest, context: Context
    ) -> pb.ReleaseEarlierLivesResponse:
        check_holder(request)
        holder = holder_from(request.holder)
        released_count = await self._ledger.release_earlier_lives(holder, request.session_id)
        return pb.ReleaseEarlierLivesResponse(released_count=released_count)

    @override
    async def ListHostMemory(self, request: pb.ListHostMemoryRequest, context: Context) -> pb.ListHostMemoryResponse:
        check_message(request)
        hosts = self._ledger.hosts(request.host)
        return pb.ListHostMemoryResponse(
            hosts=hosts,
            mesh_time=None if self._mesh_clock is None else stamp_of(self._mesh_clock.utc_now()),
        )

    @override
    async def WatchHostMemory(  # type: ignore[override]
        self, request: pb.WatchHostMemoryRequest, context: Context
    ) -> None:
        del request
        async with answering(context), aclosing(self._ledger.watch_hosts()) as responses:
            async for response in responses:
                await context.write(response)


def _require_right(holder: lease_pb2.LeaseHolder) -> None:
    """Requires mesh access for runners, so that a dial-out runner's key cannot act in a runner's name."""
    if holder.kind == lease_pb2.LeaseHolder.KIND_RUNNER:
        caller().require(MESH_ACCESS)

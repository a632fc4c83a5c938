"""The book of accelerator memory."""

# ruff: noqa: N802 - the methods are called as in the contract

from contextlib import aclosing
from typing import Any

import grpc

from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.messages import acquire_message, host_message, renewed_message
from registry_svc.ledger.policy.leases import Holder, HolderKind
from registry_svc.ledger.requests import (
    earlier_lives_of,
    host_filter_of,
    memory_request_of,
    release_of,
    renewal_of,
)
from registry_svc.mesh.messages import timestamp
from weft.api.registry.v1 import lease_service_pb2, lease_service_pb2_grpc
from weft.kernel.clock import Clock
from weft.kernel.principal import MESH_ACCESS
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

Context = grpc.aio.ServicerContext[Any, Any]


class LeaseServicer(lease_service_pb2_grpc.LeaseServiceServicer):
    """See LeaseService in the contract."""

    def __init__(self, ledger: Ledger, mesh_clock: Clock | None = None) -> None:
        """`mesh_clock`: the mesh's time, which routers are told; None: they are not."""
        self._ledger = ledger
        self._mesh_clock = mesh_clock

    # A coroutine that writes gives up the moment the call is cancelled, see RegistryServicer.Watch.
    async def AcquireLease(  # type: ignore[override]
        self, request: lease_service_pb2.AcquireLeaseRequest, context: Context
    ) -> None:
        """See the contract."""
        async with answering(context):
            wanted = memory_request_of(request)
            _require_right(wanted.holder)
            async with aclosing(self._ledger.acquire(wanted)) as words:
                async for word in words:
                    await context.write(acquire_message(word, self._ledger.config))

    async def RenewLeases(
        self, request: lease_service_pb2.RenewLeasesRequest, context: Context
    ) -> lease_service_pb2.RenewLeasesResponse:
        """See the contract."""
        async with answering(context):
            renewal = renewal_of(request)
            _require_right(renewal.holder)
            return renewed_message(await self._ledger.renew(renewal))

    async def ReleaseLease(
        self, request: lease_service_pb2.ReleaseLeaseRequest, context: Context
    ) -> lease_service_pb2.ReleaseLeaseResponse:
        """See the contract."""
        async with answering(context):
            holder, session_id, lease_id, fencing_number = release_of(request)
            _require_right(holder)
            await self._ledger.release(holder, session_id, lease_id, fencing_number)
            return lease_service_pb2.ReleaseLeaseResponse()

    async def ReleaseEarlierLives(
        self, request: lease_service_pb2.ReleaseEarlierLivesRequest, context: Context
    ) -> lease_service_pb2.ReleaseEarlierLivesResponse:
        """See the contract."""
        async with answering(context):
            released_count = await self._ledger.release_earlier_lives(*earlier_lives_of(request))
            return lease_service_pb2.ReleaseEarlierLivesResponse(released_count=released_count)

    async def ListHostMemory(
        self, request: lease_service_pb2.ListHostMemoryRequest, context: Context
    ) -> lease_service_pb2.ListHostMemoryResponse:
        """See the contract."""
        async with answering(context):
            hosts = self._ledger.hosts(host_filter_of(request))
            return lease_service_pb2.ListHostMemoryResponse(
                hosts=[host_message(host) for host in hosts],
                mesh_time=None if self._mesh_clock is None else timestamp(self._mesh_clock.utc_now()),
            )


def _require_right(holder: Holder) -> None:
    """Runners are services of the mesh: a guest's key does not hold, keep or give up memory in the name of one."""
    if holder.kind is HolderKind.RUNNER:
        caller().require(MESH_ACCESS)

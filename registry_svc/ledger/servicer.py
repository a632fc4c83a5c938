"""gRPC servicer of the VRAM ledger: requests from the wire with every limit, answers to the wire."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.config import LedgerConfig
from registry_svc.ledger.domain import (
    AcquireRequest,
    Granted,
    LeaseUse,
    Renewal,
    Renewed,
)
from registry_svc.ledger.host_view import lease_message
from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import Holder, HolderKind
from registry_svc.wire_values import require_text
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.gpu.snapshot_messages import MAX_DEVICE_BYTES, MAX_DEVICES, process_id_from, snapshot_from
from weft.kernel.clock import Clock
from weft.kernel.errors import invalid_field
from weft.kernel.field_rules import check_message
from weft.kernel.names import MAX_NAME_CHARS, require_name, require_token
from weft.kernel.principal import MESH_ACCESS
from weft.kernel.request import CALLER_BANDS, Priority
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller
from weft.kernel.timestamps import duration_of, optional_datetime, seconds_of, stamp_of

MAX_ID_CHARS = 128
MAX_BYTES = MAX_DEVICES * MAX_DEVICE_BYTES
"""1 PiB: more memory than any host has, and sums of it stay exact everywhere."""


def acquire_request_of(request: lease_service_pb2.AcquireLeaseRequest) -> AcquireRequest:
    """A valid AcquireLease; raises INVALID_ARGUMENT naming the field."""
    check_message(request)
    if len(set(request.device_indexes)) < len(request.device_indexes):
        raise invalid_field("device_indexes", "must not name a device twice")
    holder = holder_of(request.holder, "holder")
    return AcquireRequest(
        request_id=request.request_id,
        holder=holder,
        session_id=request.session_id,
        # The purpose is the model name that the runner is asked to evict.
        purpose=require_name(request.purpose, "purpose") if holder.kind is HolderKind.RUNNER else request.purpose,
        snapshot=snapshot_from(request.sighting, "sighting"),
        size=request.bytes,
        device_indexes=frozenset(request.device_indexes),
        max_devices=request.max_devices,
        priority=_priority_of(request.priority, "priority", holder),
        max_wait_seconds=seconds_of(request.max_wait) if request.HasField("max_wait") else None,
        pinned=request.pinned,
    )


def renewal_of(request: lease_service_pb2.RenewLeasesRequest) -> Renewal:
    """A valid RenewLeases; raises INVALID_ARGUMENT naming the field."""
    check_message(request)
    holder = holder_of(request.holder, "holder")
    uses = tuple(_use_of(use, f"leases[{index}]", holder) for index, use in enumerate(request.leases))
    return Renewal(
        holder=holder,
        session_id=request.session_id,
        uses=uses,
        snapshot=snapshot_from(request.sighting, "sighting"),
    )


def release_of(request: lease_service_pb2.ReleaseLeaseRequest) -> tuple[Holder, str, str, int]:
    """Holder, session id, lease id and fencing number; raises INVALID_ARGUMENT naming the field."""
    check_message(request)
    return holder_of(request.holder, "holder"), request.session_id, request.lease_id, request.fencing_number


def earlier_lives_of(request: lease_service_pb2.ReleaseEarlierLivesRequest) -> tuple[Holder, str]:
    """Holder and session id; raises INVALID_ARGUMENT naming the field."""
    check_message(request)
    return holder_of(request.holder, "holder"), request.session_id


def host_filter_of(request: lease_service_pb2.ListHostMemoryRequest) -> str:
    """One host or, empty, all; raises INVALID_ARGUMENT naming the field."""
    check_message(request)
    return request.host


def holder_of(holder: lease_pb2.LeaseHolder, field: str) -> Holder:
    """Return a valid holder; raises INVALID_ARGUMENT naming the field below `field`."""
    if holder.kind not in {kind.value for kind in HolderKind}:
        raise invalid_field(f"{field}.kind", "must be a runner or a program")
    kind = HolderKind(holder.kind)
    if kind is HolderKind.RUNNER:
        name = require_name(holder.name, f"{field}.name")
    else:
        name = _filled_text(holder.name, f"{field}.name", MAX_NAME_CHARS)
    incarnation = require_token(holder.incarnation, f"{field}.incarnation", MAX_ID_CHARS)
    return Holder(kind=kind, name=name, incarnation=incarnation)


def _use_of(use: lease_service_pb2.LeaseUse, field: str, holder: Holder) -> LeaseUse:
    processes = [process_id_from(each, f"{field}.processes[{index}]") for index, each in enumerate(use.processes)]
    _require_once(processes, f"{field}.processes", "pid")
    return LeaseUse(
        lease_id=use.lease_id,
        fencing_number=use.fencing_number,
        processes=frozenset(processes),
        filled=use.filled,
        active_requests=use.active_requests,
        priority=_priority_of(use.priority, f"{field}.priority", holder),
        pinned=use.pinned,
        last_used_at=optional_datetime(use, "last_used_time"),
    )


def _priority_of(priority: priority_pb2.Priority.ValueType, field: str, holder: Holder) -> Priority:
    """Only a runner works for the mesh itself, or for durable tasks: no program is of the mesh's own bands."""
    band = Priority.from_wire(priority)
    if band is None or (band not in CALLER_BANDS and holder.kind is not HolderKind.RUNNER):
        raise invalid_field(field, "must be high, normal or low")
    return band


def _filled_text(text: str, field: str, max_chars: int) -> str:
    if not text:
        raise invalid_field(field, "must not be empty")
    return require_text(text, field, max_chars)


def _require_once(items: Sequence[object], field: str, member: str) -> None:
    seen: set[object] = set()
    for index, item in enumerate(items):
        if item in seen:
            raise invalid_field(f"{field}[{index}].{member}", "must not appear twice")
        seen.add(item)


def acquire_message(
    status: lease_service_pb2.WaitingForMemory | Granted, config: LedgerConfig
) -> lease_service_pb2.AcquireLeaseResponse:
    """Return a status message or the granted lease, for the wire."""
    if isinstance(status, lease_service_pb2.WaitingForMemory):
        return lease_service_pb2.AcquireLeaseResponse(waiting=status)
    granted = lease_service_pb2.GrantedLease(
        lease=lease_message(status),
        time_to_live=duration_of(config.lease_time_to_live_seconds),
        renew_interval=duration_of(config.renew_interval_seconds),
    )
    return lease_service_pb2.AcquireLeaseResponse(granted=granted)


def renewed_message(renewed: Renewed) -> lease_service_pb2.RenewLeasesResponse:
    """Return the answer to a renewal, for the wire."""
    return lease_service_pb2.RenewLeasesResponse(
        lost_lease_ids=renewed.lost_lease_ids,
        watched_processes=[lease_pb2.ProcessId(pid=each.pid, start_ticks=each.start_ticks) for each in renewed.watched],
        next_within=duration_of(renewed.next_within_seconds),
    )


Context = grpc.aio.ServicerContext[Any, Any]


class LeaseServicer(lease_service_pb2_grpc.LeaseServiceServicer):
    """See LeaseService in the contract."""

    def __init__(self, ledger: Ledger, mesh_clock: Clock | None = None) -> None:
        """`mesh_clock`: the mesh's time, which is returned to routers; None: it is not."""
        self._ledger = ledger
        self._mesh_clock = mesh_clock

    # A coroutine that writes gives up the moment the call is cancelled, see RegistryServicer.Watch.
    @override
    async def AcquireLease(  # type: ignore[override]
        self, request: lease_service_pb2.AcquireLeaseRequest, context: Context
    ) -> None:
        async with answering(context):
            wanted = acquire_request_of(request)
            _require_right(wanted.holder)
            async with aclosing(self._ledger.acquire(wanted)) as statuses:
                async for status in statuses:
                    await context.write(acquire_message(status, self._ledger.config))

    @override
    async def RenewLeases(
        self, request: lease_service_pb2.RenewLeasesRequest, context: Context
    ) -> lease_service_pb2.RenewLeasesResponse:
        async with answering(context):
            renewal = renewal_of(request)
            _require_right(renewal.holder)
            return renewed_message(await self._ledger.renew(renewal))

    @override
    async def ReleaseLease(
        self, request: lease_service_pb2.ReleaseLeaseRequest, context: Context
    ) -> lease_service_pb2.ReleaseLeaseResponse:
        async with answering(context):
            holder, session_id, lease_id, fencing_number = release_of(request)
            _require_right(holder)
            await self._ledger.release(holder, session_id, lease_id, fencing_number)
            return lease_service_pb2.ReleaseLeaseResponse()

    @override
    async def ReleaseEarlierLives(
        self, request: lease_service_pb2.ReleaseEarlierLivesRequest, context: Context
    ) -> lease_service_pb2.ReleaseEarlierLivesResponse:
        async with answering(context):
            released_count = await self._ledger.release_earlier_lives(*earlier_lives_of(request))
            return lease_service_pb2.ReleaseEarlierLivesResponse(released_count=released_count)

    @override
    async def ListHostMemory(
        self, request: lease_service_pb2.ListHostMemoryRequest, context: Context
    ) -> lease_service_pb2.ListHostMemoryResponse:
        async with answering(context):
            hosts = self._ledger.hosts(host_filter_of(request))
            return lease_service_pb2.ListHostMemoryResponse(
                hosts=hosts,
                mesh_time=None if self._mesh_clock is None else stamp_of(self._mesh_clock.utc_now()),
            )


def _require_right(holder: Holder) -> None:
    """Runners are services of the mesh: a dial-out runner's key may not hold, renew or release memory in their name."""
    if holder.kind is HolderKind.RUNNER:
        caller().require(MESH_ACCESS)

"""Requests to the VRAM ledger: checks that involve several fields, and conversion to policy values.

Each check raises INVALID_ARGUMENT naming the field.
"""

from dataclasses import replace

from registry_svc.ledger.policy.leases import Holder, HolderKind, Lease, MemoryRequest, renewed
from registry_svc.wire_values import require_text
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.gpu.snapshot import ProcessId, check_processes, process_id_from
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.time.timestamps import optional_datetime, seconds_of
from weft.kernel.values.names import MAX_NAME_CHARS, require_name


def check_acquire(request: pb.AcquireLeaseRequest) -> None:
    """Checks a request for memory."""
    check_holder(request)
    _check_sighting(request)
    if len(set(request.device_indexes)) < len(request.device_indexes):
        raise invalid_field("device_indexes", "must not name a device twice")
    if request.holder.kind == lease_pb2.LeaseHolder.KIND_RUNNER:
        # The purpose is the model name that the runner is asked to evict.
        require_name(request.purpose, "purpose")
    _check_priority(request.priority, "priority", request.holder)


def check_renewal(request: pb.RenewLeasesRequest) -> None:
    """Checks a renewal."""
    check_holder(request)
    _check_sighting(request)
    for index, use in enumerate(request.leases):
        _check_processes_of(use, f"leases[{index}].processes")
        _check_priority(use.priority, f"leases[{index}].priority", request.holder)


def check_holder(
    request: pb.AcquireLeaseRequest | pb.RenewLeasesRequest | pb.ReleaseLeaseRequest | pb.ReleaseEarlierLivesRequest,
) -> None:
    """Checks the field rules of a request, and its holder."""
    check_message(request)
    if not request.HasField("holder"):
        check_message(request.holder, "holder")
    name = request.holder.name
    if request.holder.kind == lease_pb2.LeaseHolder.KIND_RUNNER:
        require_name(name, "holder.name")
    elif not name:
        raise invalid_field("holder.name", "must not be empty")
    else:
        require_text(name, "holder.name", MAX_NAME_CHARS)


def _check_sighting(request: pb.AcquireLeaseRequest | pb.RenewLeasesRequest) -> None:
    if not request.HasField("sighting"):
        check_message(request.sighting, "sighting")
    check_processes(request.sighting, "sighting")


def _check_processes_of(use: pb.LeaseUse, field: str) -> None:
    seen: set[ProcessId] = set()
    for index, process in enumerate(map(process_id_from, use.processes)):
        if process in seen:
            raise invalid_field(f"{field}[{index}].pid", "must not appear twice")
        seen.add(process)


def _check_priority(priority: priority_pb2.Priority.ValueType, field: str, holder: lease_pb2.LeaseHolder) -> None:
    """Only runners may use the mesh's internal priorities, SYSTEM and DURABLE."""
    band = Priority.from_wire(priority)
    is_runner = holder.kind == lease_pb2.LeaseHolder.KIND_RUNNER
    if band is None or (band not in CALLER_CLASSES and not is_runner):
        raise invalid_field(field, "must be high, normal or low")


def holder_from(message: lease_pb2.LeaseHolder) -> Holder:
    """Returns the holder in a valid message."""
    return Holder(kind=HolderKind(message.kind), name=message.name, incarnation=message.incarnation)


def memory_request_from(
    request: pb.AcquireLeaseRequest, *, arrival: int, now: float, max_wait_seconds: float
) -> MemoryRequest:
    """Returns a valid request as an entry of the queue, which waits at most `max_wait_seconds`."""
    holder = holder_from(request.holder)
    wait = min(seconds_of(request.max_wait), max_wait_seconds) if request.HasField("max_wait") else max_wait_seconds
    return MemoryRequest(
        key=f"{holder.kind.name}\n{holder.name}\n{holder.incarnation}\n{request.request_id}",
        request_id=request.request_id,
        holder=holder,
        purpose=request.purpose,
        host=request.sighting.host,
        size=request.bytes,
        device_indexes=frozenset(request.device_indexes),
        max_devices=request.max_devices,
        priority=_priority_from(request.priority),
        pinned=request.pinned,
        arrival=arrival,
        deadline=now + wait,
    )


def renewed_with(lease: Lease, use: pb.LeaseUse, now: float) -> Lease:
    """Returns a lease renewed at `now`, with the reported use."""
    return replace(
        renewed(lease, now),
        named=processes_in(use),
        filled=use.filled,
        active_requests=use.active_requests,
        priority=_priority_from(use.priority),
        pinned=use.pinned,
        last_used_at=optional_datetime(use, "last_used_time"),
    )


def processes_in(use: pb.LeaseUse) -> frozenset[ProcessId]:
    """Returns the processes in a holder's report."""
    return frozenset(map(process_id_from, use.processes))


def _priority_from(priority: priority_pb2.Priority.ValueType) -> Priority:
    band = Priority.from_wire(priority)
    assert band is not None, "an unchecked priority"
    return band

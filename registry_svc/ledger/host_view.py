"""Messages that show callers the memory and leases of hosts."""

from registry_svc.ledger.lease_table import LeaseTable
from registry_svc.ledger.policy.device_memory import DeviceAccount
from registry_svc.ledger.policy.leases import Holder, Lease
from registry_svc.ledger.wait_queue import Waiter, WaitQueue
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.gpu.snapshot import DeviceSnapshot, bytes_messages, device_message
from weft.kernel.time.timestamps import duration_of, optional_stamp, stamp_of

MAX_WAITS = 64
"""Maximum waits that a host shows, the first in line, besides their number."""


def host_memory(table: LeaseTable, queue: WaitQueue, name: str, now: float) -> lease_service_pb2.HostMemory | None:
    """Returns a host as last observed; None if it has no observed devices. `now` is in monotonic seconds."""
    seen, account = table.host(name), table.open(name)
    if seen is None or account is None or not seen.snapshot.devices:
        return None
    waiting = sorted(queue.on(name), key=lambda each: each.request.queue_key)
    return lease_service_pb2.HostMemory(
        host=name,
        source=lease_pb2.HostSighting.Source.ValueType(seen.snapshot.source),
        sighting_time=stamp_of(seen.seen_at),
        devices=[_device_memory(device, account.devices[device.index]) for device in seen.snapshot.devices],
        leases=[
            _lease_message(each, account.seen[each.grant.id], unowned=table.is_unowned(each))
            for each in table.leases_on(name)
        ],
        waiting_count=len(waiting),
        waits=[_wait_message(each, now) for each in waiting[:MAX_WAITS]],
    )


def shown_lease(table: LeaseTable, lease: Lease) -> lease_pb2.Lease:
    """Returns a lease with the observed memory of its processes."""
    account = table.open(lease.grant.host)
    seen = None if account is None else account.seen.get(lease.grant.id)
    return _lease_message(lease, seen, unowned=table.is_unowned(lease))


def _lease_message(lease: Lease, seen_bytes: int | None, *, unowned: bool) -> lease_pb2.Lease:
    grant = lease.grant
    return lease_pb2.Lease(
        lease_id=grant.id,
        fencing_number=grant.fencing_number,
        host=grant.host,
        holder=_holder_message(grant.holder),
        purpose=grant.purpose,
        shares=bytes_messages(grant.shares),
        state=lease_pb2.Lease.State.ValueType(lease.state.value),
        priority=priority_pb2.Priority.ValueType(lease.priority.wire),
        pinned=lease.pinned,
        active_requests=lease.active_requests,
        seen_bytes=seen_bytes,
        create_time=stamp_of(grant.created_at),
        last_used_time=optional_stamp(lease.last_used_at),
        unowned=unowned,
    )


def _wait_message(waiter: Waiter, now: float) -> lease_service_pb2.MemoryWait:
    request = waiter.request
    return lease_service_pb2.MemoryWait(
        holder=_holder_message(request.holder),
        purpose=request.purpose,
        bytes=request.size,
        device_indexes=sorted(request.device_indexes),
        priority=priority_pb2.Priority.ValueType(request.priority.wire),
        detail="" if waiter.status is None else waiter.status.detail,
        remaining_wait=duration_of(max(request.deadline - now, 0.0)),
    )


def _holder_message(holder: Holder) -> lease_pb2.LeaseHolder:
    return lease_pb2.LeaseHolder(
        kind=lease_pb2.LeaseHolder.Kind.ValueType(holder.kind.value), name=holder.name, incarnation=holder.incarnation
    )


def _device_memory(device: DeviceSnapshot, account: DeviceAccount) -> lease_service_pb2.DeviceMemory:
    return lease_service_pb2.DeviceMemory(
        device=device_message(device),
        booked_bytes=account.booked,
        foreign_bytes=account.foreign,
        free_bytes=account.free,
        margin_bytes=account.margin,
    )

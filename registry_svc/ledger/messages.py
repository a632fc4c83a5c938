"""From the book of memory to the wire."""

from google.protobuf import duration_pb2, timestamp_pb2

from registry_svc.config import LedgerConfig
from registry_svc.ledger.domain import DeviceMemory, Granted, HostMemory, Renewed, Waiting
from registry_svc.ledger.policy.leases import Holder
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.gpu.sighting import DeviceSight


def acquire_message(word: Waiting | Granted, config: LedgerConfig) -> lease_service_pb2.AcquireLeaseResponse:
    """One word to somebody who asked for memory."""
    if isinstance(word, Waiting):
        waiting = lease_service_pb2.WaitingForMemory(
            detail=word.detail, needed_bytes=word.needed, free_bytes=word.free, holders=word.holders
        )
        return lease_service_pb2.AcquireLeaseResponse(waiting=waiting)
    granted = lease_service_pb2.GrantedLease(
        lease=lease_message(word),
        time_to_live=_duration(config.lease_time_to_live_seconds),
        renew_interval=_duration(config.renew_interval_seconds),
    )
    return lease_service_pb2.AcquireLeaseResponse(granted=granted)


def renewed_message(renewed: Renewed) -> lease_service_pb2.RenewLeasesResponse:
    """What is left of somebody's leases."""
    return lease_service_pb2.RenewLeasesResponse(
        lost_lease_ids=renewed.lost_lease_ids,
        watched_processes=[lease_pb2.ProcessId(pid=each.pid, start_ticks=each.start_ticks) for each in renewed.watched],
        next_within=_duration(renewed.next_within_seconds),
    )


def host_message(host: HostMemory) -> lease_service_pb2.HostMemory:
    """One host."""
    sighting_time = timestamp_pb2.Timestamp()
    sighting_time.FromDatetime(host.seen_at)
    return lease_service_pb2.HostMemory(
        host=host.host,
        source=lease_pb2.HostSighting.Source.ValueType(host.source.value),
        sighting_time=sighting_time,
        devices=[_device_memory_message(device) for device in host.devices],
        leases=[lease_message(lease) for lease in host.leases],
        waiting_count=host.waiting_count,
    )


def lease_message(granted: Granted) -> lease_pb2.Lease:
    """One lease."""
    lease, grant = granted.lease, granted.lease.grant
    message = lease_pb2.Lease(
        lease_id=grant.id,
        fencing_number=grant.fencing_number,
        host=grant.host,
        holder=_holder_message(grant.holder),
        purpose=grant.purpose,
        shares=[lease_pb2.DeviceBytes(device_index=index, bytes=size) for index, size in grant.shares],
        state=lease_pb2.Lease.State.ValueType(lease.state.value),
        priority=priority_pb2.Priority.ValueType(lease.priority.wire),
        pinned=lease.pinned,
        active_requests=lease.active_requests,
        seen_bytes=granted.seen,
        unowned=granted.unowned,
    )
    message.create_time.FromDatetime(grant.created_at)
    if lease.last_used_at is not None:
        message.last_used_time.FromDatetime(lease.last_used_at)
    return message


def _holder_message(holder: Holder) -> lease_pb2.LeaseHolder:
    return lease_pb2.LeaseHolder(
        kind=lease_pb2.LeaseHolder.Kind.ValueType(holder.kind.value), name=holder.name, incarnation=holder.incarnation
    )


def _device_memory_message(device: DeviceMemory) -> lease_service_pb2.DeviceMemory:
    return lease_service_pb2.DeviceMemory(
        device=_device_message(device.sight),
        booked_bytes=device.book.booked,
        foreign_bytes=device.book.foreign,
        free_bytes=device.book.free,
        margin_bytes=device.book.margin,
    )


def _device_message(device: DeviceSight) -> lease_pb2.Device:
    return lease_pb2.Device(
        index=device.index,
        id=device.id,
        name=device.name,
        total_bytes=device.total_bytes,
        used_bytes=device.used_bytes,
        utilization=device.utilization,
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration

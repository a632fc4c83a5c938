"""Leases as messages, as a runner writes and reads them."""

from google.protobuf.duration_pb2 import Duration

from runner_svc.backend.port import DeviceShare
from runner_svc.memory.memory_port import LeaseGrant, MemoryUse, MemoryWish
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.gpu.messages import process_id_message, sighting_message
from weft.gpu.sighting import HostSight, Source
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_PROCESSES = 256
"""Of one lease, told to the registry."""


def acquire_request(
    wish: MemoryWish, sight: HostSight, *, device_indexes: tuple[int, ...], max_wait_seconds: float
) -> pb.AcquireLeaseRequest:
    """The request but for who asks."""
    request = pb.AcquireLeaseRequest(
        purpose=wish.model,
        sighting=sighting_message(sight),
        bytes=wish.bytes,
        device_indexes=device_indexes,
        priority=wish.priority.wire,  # type: ignore[arg-type]  # same numbers
        pinned=wish.pinned,
    )
    request.max_wait.FromNanoseconds(int(max_wait_seconds * 1e9))
    return request


def grant_from(lease: lease_pb2.Lease, source: Source) -> LeaseGrant:
    """A lease as it was granted. Raises INTERNAL for one without memory: that is no lease."""
    shares = tuple(DeviceShare(index=share.device_index, bytes=share.bytes) for share in lease.shares)
    if not shares or not lease.lease_id:
        raise WeftError(Reason.INTERNAL, "the registry granted a lease without memory")
    return LeaseGrant(
        lease_id=lease.lease_id,
        fencing_number=lease.fencing_number,
        shares=shares,
        hides_devices=source is not Source.DECLARED,
    )


def use_message(grant: LeaseGrant, use: MemoryUse) -> pb.LeaseUse:
    """How a lease is used."""
    message = pb.LeaseUse(
        lease_id=grant.lease_id,
        fencing_number=grant.fencing_number,
        processes=[process_id_message(process) for process in use.processes[:MAX_PROCESSES]],
        filled=use.filled,
        active_requests=use.active_requests,
        priority=use.priority.wire,  # type: ignore[arg-type]  # same numbers
        pinned=use.pinned,
    )
    if use.last_used_at is not None:
        message.last_used_time.FromDatetime(use.last_used_at)
    return message


def seen_bytes(use: MemoryUse, sight: HostSight) -> int | None:
    """What the processes of a lease were seen to hold; None: nobody can tell."""
    if sight.source is not Source.NVML or not use.processes:
        return None
    by_process = {seen.process: seen for seen in sight.processes}
    found = [by_process.get(process) for process in use.processes]
    if any(seen is None or seen.memory_unknown for seen in found):
        return None
    return sum(held for seen in found if seen is not None for _, held in seen.bytes_by_device)


def seconds_of(duration: Duration) -> float:
    """A length of time."""
    return duration.ToNanoseconds() / 1e9

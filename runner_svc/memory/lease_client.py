"""A runner's client of the registry's lease service: calls for its own leases, and their messages."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, cast

import grpc
from google.protobuf.duration_pb2 import Duration

from runner_svc.backend.port import DeviceShare
from runner_svc.memory.port import LeaseGrant, MemoryRequest, MemoryUse
from weft.api.registry.v1 import lease_pb2, lease_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.gpu.snapshot import HostSnapshot, Source
from weft.gpu.snapshot_messages import process_id_message, snapshot_message
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub


CALL_TIMEOUT_SECONDS = 5.0
AWAY = frozenset(
    {Reason.SERVICE_UNAVAILABLE, Reason.DEADLINE_EXCEEDED, Reason.SESSION_UNKNOWN, Reason.PERMISSION_DENIED}
)
"""Reasons of a registry that is unreachable, or does not know this runner's session yet or again."""


class LeaseClient:
    """Calls of the lease service. Each raises WeftError; one of AWAY before `connect` and while there is no session."""

    def __init__(self, runner: str, incarnation: str, session_id: Callable[[], str]) -> None:
        """`session_id` is empty while there is none."""
        self._runner = runner
        self._incarnation = incarnation
        self._session_id = session_id
        self._stub: LeaseServiceAsyncStub | None = None

    def connect(self, registry: grpc.aio.Channel) -> None:
        """Set the channel to the registry."""
        self._stub = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(registry))

    async def acquire(self, request: pb.AcquireLeaseRequest) -> AsyncGenerator[pb.AcquireLeaseResponse]:
        """Request a lease; yields status messages until it is granted. Closing the generator leaves the wait queue."""
        request.session_id = self._require_session()
        request.holder.CopyFrom(self._holder())
        async with _errors():
            call = self._require_stub().AcquireLease(request)
            try:
                # Not `async for`: its generator and the call refer to each other, 25 KB until they are collected.
                while (response := await call.read()) is not grpc.aio.EOF:
                    yield cast("pb.AcquireLeaseResponse", response)
            finally:
                call.cancel()

    async def renew(self, request: pb.RenewLeasesRequest) -> pb.RenewLeasesResponse:
        """Renew leases; the holder is filled in."""
        request.session_id = self._require_session()
        request.holder.CopyFrom(self._holder())
        async with _errors():
            return await self._require_stub().RenewLeases(request, timeout=CALL_TIMEOUT_SECONDS)
        raise AssertionError("an error has been raised")

    async def release(self, lease_id: str, fencing_number: int) -> None:
        """Release a lease."""
        request = pb.ReleaseLeaseRequest(
            holder=self._holder(),
            session_id=self._require_session(),
            lease_id=lease_id,
            fencing_number=fencing_number,
        )
        async with _errors():
            await self._require_stub().ReleaseLease(request, timeout=CALL_TIMEOUT_SECONDS)

    async def release_earlier_incarnations(self) -> int:
        """Release the leases of earlier incarnations of this runner; returns their number."""
        request = pb.ReleaseEarlierLivesRequest(holder=self._holder(), session_id=self._require_session())
        async with _errors():
            response = await self._require_stub().ReleaseEarlierLives(request, timeout=CALL_TIMEOUT_SECONDS)
            return response.released_count
        raise AssertionError("an error has been raised")

    def _holder(self) -> lease_pb2.LeaseHolder:
        return lease_pb2.LeaseHolder(
            kind=lease_pb2.LeaseHolder.KIND_RUNNER, name=self._runner, incarnation=self._incarnation
        )

    def _require_session(self) -> str:
        session_id = self._session_id()
        if not session_id:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the session with the registry is not open")
        return session_id

    def _require_stub(self) -> "LeaseServiceAsyncStub":
        if self._stub is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the runner has not started")
        return self._stub


@contextlib.asynccontextmanager
async def _errors() -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error


MAX_PROCESSES = 256
"""Processes of one lease that are reported to the registry at most."""


def acquire_request(
    wanted: MemoryRequest, snapshot: HostSnapshot, *, device_indexes: tuple[int, ...], max_wait_seconds: float
) -> pb.AcquireLeaseRequest:
    """Builds the request for a lease, without the holder."""
    request = pb.AcquireLeaseRequest(
        purpose=wanted.model,
        sighting=snapshot_message(snapshot),
        bytes=wanted.bytes,
        device_indexes=device_indexes,
        priority=wanted.priority.wire,  # type: ignore[arg-type]  # same numbers
        pinned=wanted.pinned,
    )
    request.max_wait.FromNanoseconds(int(max_wait_seconds * 1e9))
    return request


def grant_from(lease: lease_pb2.Lease, source: Source) -> LeaseGrant:
    """Reads a granted lease. Raises INTERNAL for one without memory."""
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
    """The use of a lease as a message."""
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


def seen_bytes(use: MemoryUse, snapshot: HostSnapshot) -> int | None:
    """Returns the memory that the processes of a lease were observed to hold; None: unknown."""
    if snapshot.source is not Source.NVML or not use.processes:
        return None
    by_process = {seen.process: seen for seen in snapshot.processes}
    found = [by_process.get(process) for process in use.processes]
    if any(seen is None or seen.memory_unknown for seen in found):
        return None
    return sum(held for seen in found if seen is not None for _, held in seen.bytes_by_device)


def seconds_of(duration: Duration) -> float:
    """A duration message in seconds."""
    return duration.ToNanoseconds() / 1e9

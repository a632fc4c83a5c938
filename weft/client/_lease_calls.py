"""The ledger's calls, for a program that is no runner."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc
from google.protobuf import duration_pb2

from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.client._channel import open_mesh_channel
from weft.gpu.messages import process_id_message, sighting_message
from weft.gpu.sighting import HostSight, ProcessId
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

CALL_TIMEOUT_SECONDS = 10.0
ANSWER_MARGIN_SECONDS = 30.0
"""On top of the wait itself: how long the ledger may take to say that it is over."""
MAX_USE_PROCESSES = 256
"""Of one lease; as in `registry.v1.LeaseUse`."""

pb = lease_service_pb2


class LeaseCalls:
    """Calls on the ledger on behalf of one holder. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, holder: lease_pb2.LeaseHolder) -> None:
        self._target = target
        self._holder = holder
        self._channel = open_mesh_channel(target)
        self._stub = lease_service_pb2_grpc.LeaseServiceStub(self._channel)

    def close(self) -> None:
        """Close the channel; calls still running are cancelled."""
        self._channel.close()

    def acquire(self, request: pb.AcquireLeaseRequest, wait_seconds: float) -> Iterator[pb.AcquireLeaseResponse]:
        """What the ledger says until the memory is there, at most for so long. Leaving the iterator gives up."""
        request.holder.CopyFrom(self._holder)
        request.max_wait.CopyFrom(_duration(wait_seconds))
        call = self._stub.AcquireLease(request, timeout=wait_seconds + ANSWER_MARGIN_SECONDS)
        try:
            with self._translated():
                yield from call
        finally:
            call.cancel()

    def renew(
        self, leases: Iterable[pb.LeaseUse], sight: HostSight, timeout_seconds: float = CALL_TIMEOUT_SECONDS
    ) -> pb.RenewLeasesResponse:
        """Keep leases, and say what is seen; without leases only the latter."""
        request = pb.RenewLeasesRequest(holder=self._holder, leases=leases, sighting=sighting_message(sight))
        with self._translated():
            return self._stub.RenewLeases(request, timeout=timeout_seconds)

    def release(self, lease: lease_pb2.Lease) -> None:
        """Give a lease up. Raises LEASE_LOST when it is somebody else's by now."""
        request = pb.ReleaseLeaseRequest(
            holder=self._holder, lease_id=lease.lease_id, fencing_number=lease.fencing_number
        )
        with self._translated():
            self._stub.ReleaseLease(request, timeout=CALL_TIMEOUT_SECONDS)

    def hosts(self, host: str = "") -> list[pb.HostMemory]:
        """Hosts with their devices and leases; with `host` only that one, or none when the ledger has not seen it."""
        with self._translated():
            response = self._stub.ListHostMemory(pb.ListHostMemoryRequest(host=host), timeout=CALL_TIMEOUT_SECONDS)
        return list(response.hosts)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
            if found.reason is Reason.SERVICE_UNAVAILABLE:
                raise WeftError(found.reason, f"the mesh at {self._target} does not answer: {found.message}") from error
            raise found from error


def lease_use(lease: lease_pb2.Lease, processes: Iterable[ProcessId]) -> pb.LeaseUse:
    """How a program uses its lease: it may take all of it at any moment."""
    return pb.LeaseUse(
        lease_id=lease.lease_id,
        fencing_number=lease.fencing_number,
        processes=[process_id_message(process) for process in list(processes)[:MAX_USE_PROCESSES]],
        priority=lease.priority,
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration

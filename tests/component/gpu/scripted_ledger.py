"""A ledger that says what a test tells it to, and remembers what it was told."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import duration_pb2
from grpc_status import rpc_status

from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.kernel.channels.rpc import SERVER_OPTIONS, error_to_status
from weft.kernel.errors.error_tree import WeftError

pb = lease_service_pb2
RENEW_SECONDS = 0.1


@dataclass
class Script:
    """What is said and what was heard."""

    target: str = ""
    waits: list[str] = field(default_factory=list)
    """What is awaited, before anything else."""
    refusals: list[WeftError] = field(default_factory=list)
    """Each ends one call, after its `waits`."""
    is_lost: bool = False
    is_away: bool = False
    """Whether renewals fail."""
    is_away_after_uses: int | None = None
    """So many renewals of a lease are answered before that."""
    devices: tuple[int, ...] = (0, 1)
    known_hosts: list[pb.HostMemory] = field(default_factory=list)
    acquired: list[pb.AcquireLeaseRequest] = field(default_factory=list)
    renewed: list[pb.RenewLeasesRequest] = field(default_factory=list)
    released: list[pb.ReleaseLeaseRequest] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a caller gave up waiting."""
    hold: threading.Event | None = None
    """What a call that waits waits for."""

    def uses(self) -> list[pb.LeaseUse]:
        """Every renewal of a lease."""
        return [use for request in self.renewed for use in request.leases]


class _Leases(lease_service_pb2_grpc.LeaseServiceServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    def AcquireLease(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        script = self._script
        script.acquired.append(request)
        for detail in script.waits:
            yield pb.AcquireLeaseResponse(waiting=pb.WaitingForMemory(detail=detail))
        if script.hold is not None:
            if context.add_callback(script.hold.set):  # not where the caller disconnected already
                script.hold.wait(30.0)
            if not context.is_active():
                script.left.set()
                return
        if script.refusals:
            _fail(context, script.refusals.pop(0))
        shares = [lease_pb2.DeviceBytes(device_index=index, bytes=request.bytes) for index in script.devices]
        lease = lease_pb2.Lease(
            lease_id="lease-1", fencing_number=17, host=request.sighting.host, holder=request.holder, shares=shares
        )
        interval = duration_pb2.Duration()
        interval.FromMilliseconds(int(RENEW_SECONDS * 1000))
        yield pb.AcquireLeaseResponse(granted=pb.GrantedLease(lease=lease, renew_interval=interval))

    def RenewLeases(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._script.is_away:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        self._script.renewed.append(request)
        self._script.is_away = len(self._script.uses()) == self._script.is_away_after_uses
        lost = [use.lease_id for use in request.leases] if self._script.is_lost else []
        return pb.RenewLeasesResponse(lost_lease_ids=lost)

    def ReleaseLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._script.released.append(request)
        return pb.ReleaseLeaseResponse()

    def ListHostMemory(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ListHostMemoryResponse(hosts=self._script.known_hosts)


def _fail(context: Any, error: WeftError) -> None:
    context.abort_with_status(rpc_status.to_status(error_to_status(error)))


@contextmanager
def scripted_ledger() -> Iterator[Script]:
    """A ledger on a real gRPC server."""
    script = Script()
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=SERVER_OPTIONS)
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(_Leases(script), server)  # type: ignore[abstract]  # only what programs call
    script.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield script
    finally:
        server.stop(grace=None).wait()

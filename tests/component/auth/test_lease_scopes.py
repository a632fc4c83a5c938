"""In whose name a key holds accelerator memory: a guest's own, and never a runner's."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from kit.keys import KEY, as_key, ring
from registry_stage import registry_channel

from weft.api.registry.v1 import lease_pb2, lease_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub

SIGHT = lease_pb2.HostSighting(
    host="host-a",
    source=lease_pb2.HostSighting.SOURCE_NVML,
    devices=[lease_pb2.Device(index=0, id="gpu-0", name="gpu", total_bytes=2**34)],
)
Ask = Callable[["LeaseServiceAsyncStub", lease_pb2.LeaseHolder], Any]


def _renew(leases: "LeaseServiceAsyncStub", holder: lease_pb2.LeaseHolder) -> Any:
    request = pb.RenewLeasesRequest(holder=holder, session_id="a", sighting=SIGHT)
    return leases.RenewLeases(request, metadata=as_key(), timeout=5)


def _release(leases: "LeaseServiceAsyncStub", holder: lease_pb2.LeaseHolder) -> Any:
    request = pb.ReleaseLeaseRequest(holder=holder, session_id="a", lease_id="lease-1", fencing_number=1)
    return leases.ReleaseLease(request, metadata=as_key(), timeout=5)


def _holder(kind: lease_pb2.LeaseHolder.Kind.ValueType) -> lease_pb2.LeaseHolder:
    return lease_pb2.LeaseHolder(kind=kind, name="r1", incarnation="life-1")


@pytest.mark.parametrize("ask", [_renew, _release])
async def test_guest_key_cannot_use_leases_as_a_runner(tmp_path: Path, ask: Ask) -> None:
    async with registry_channel(tmp_path, ring({KEY: ["runners:create"]})) as channel:
        leases = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(channel))
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await ask(leases, _holder(lease_pb2.LeaseHolder.KIND_RUNNER))
        error = error_from_call(found.value, Reason.INTERNAL)
        assert (error.reason, "mesh:create" in error.message) == (Reason.PERMISSION_DENIED, True)
        assert not (await leases.ListHostMemory(pb.ListHostMemoryRequest(), metadata=as_key(), timeout=5)).hosts
        await ask(leases, _holder(lease_pb2.LeaseHolder.KIND_PROGRAM))


async def test_program_lease_of_another_holder_is_released_only_with_the_runner_edit_scope(tmp_path: Path) -> None:
    request = pb.ReleaseProgramLeaseRequest(lease_id="lease-1")
    for scope, reason in (("runners:create", Reason.PERMISSION_DENIED), ("runners:edit", Reason.NOT_FOUND)):
        folder = tmp_path / scope.partition(":")[2]
        folder.mkdir()
        async with registry_channel(folder, ring({KEY: [scope]})) as channel:
            leases = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(channel))
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await leases.ReleaseProgramLease(request, metadata=as_key(), timeout=5)
        assert error_from_call(found.value, Reason.INTERNAL).reason is reason

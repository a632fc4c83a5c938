"""Leases of runners that dial out: asked for over their links, each for itself alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from relay_harness import HOST, RUNNER, Laptop, Mesh, refusal, running_laptop, running_mesh_side, soon

from weft.api.registry.v1 import lease_pb2, lease_service_pb2_grpc, runner_session_service_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.channels.rpc import answering, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

RUNNER_KIND = lease_pb2.LeaseHolder.KIND_RUNNER


class NotingLeases(lease_service_pb2_grpc.LeaseServiceServicer):
    """Takes down what reaches the registry."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.go = asyncio.Event()
        self.left = asyncio.Event()

    async def AcquireLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            self.told.append(request)
            if request.purpose == "too-much":
                raise WeftError(Reason.INSUFFICIENT_MEMORY, "needs 99 GiB; h has 8 GiB")
            yield pb.AcquireLeaseResponse(waiting=pb.WaitingForMemory(detail="held by qwen"))
            try:
                await self.go.wait()
            except (asyncio.CancelledError, GeneratorExit):
                self.left.set()
                raise
            yield pb.AcquireLeaseResponse(granted=pb.GrantedLease(lease=lease_pb2.Lease(lease_id="l1")))

    async def RenewLeases(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.told.append(request)
        return pb.RenewLeasesResponse(lost_lease_ids=["l0"])

    async def ReleaseLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.told.append(request)
        return pb.ReleaseLeaseResponse()

    async def ReleaseEarlierLives(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.told.append(request)
        return pb.ReleaseEarlierLivesResponse(released_count=3)

    async def ListHostMemory(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.told.append(request)
        return pb.ListHostMemoryResponse()


@dataclass
class Joined:
    """A joined runner with an open session, and what it calls the registry's book by."""

    noting: NotingLeases
    book: Any
    laptop: Laptop
    mesh: Mesh

    def own(self, **changes: Any) -> dict[str, Any]:
        """The fields of a request for leases of its own, but for `changes`."""
        holder: dict[str, Any] = {"kind": RUNNER_KIND, "name": RUNNER, "incarnation": "life-1"}
        holder |= {key: changes.pop(key) for key in list(changes) if key in holder}
        return {"holder": lease_pb2.LeaseHolder(**holder), "session_id": self.laptop.session_id, **changes}


@pytest.fixture
async def joined(tmp_path: Path) -> AsyncIterator[Joined]:
    noting: NotingLeases = cast("Any", NotingLeases)()

    def add(server: grpc.aio.Server) -> None:
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(noting, server)

    async with running_mesh_side(tmp_path, add_to_registry=add) as mesh, running_laptop(mesh) as laptop:
        await laptop.open()
        async with open_channel(f"unix:{tmp_path}/laptop/runner.sock") as channel:
            yield Joined(noting, lease_service_pb2_grpc.LeaseServiceStub(channel), laptop, mesh)
            noting.go.set()


def seen(host: str = HOST) -> lease_pb2.HostSighting:
    """What a runner says that it sees on a host."""
    return lease_pb2.HostSighting(host=host, source=lease_pb2.HostSighting.SOURCE_NVML)


async def test_memory_wait_is_streamed_message_by_message(joined: Joined) -> None:
    call = joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(), **joined.own(purpose="m", bytes=5)))
    assert (await soon(call.read())).waiting.detail == "held by qwen"
    joined.noting.go.set()
    assert (await soon(call.read())).granted.lease.lease_id == "l1"
    assert await soon(call.read()) is grpc.aio.EOF
    assert [(request.purpose, request.bytes) for request in joined.noting.told] == [("m", 5)]


async def test_wait_cancelled_by_its_runner_is_cancelled_at_the_registry(joined: Joined) -> None:
    call = joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(), **joined.own()))
    await soon(call.read())
    call.cancel()
    await soon(joined.noting.left.wait())


async def test_lost_link_leaves_the_queue(joined: Joined) -> None:
    call = joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(), **joined.own()))
    await soon(call.read())
    await joined.laptop.dial_out.stop(0.0)
    await soon(joined.noting.left.wait())


async def test_renewals_and_releases_are_relayed(joined: Joined) -> None:
    renewed = await soon(joined.book.RenewLeases(pb.RenewLeasesRequest(sighting=seen(), **joined.own())))
    assert list(renewed.lost_lease_ids) == ["l0"]
    await soon(joined.book.ReleaseLease(pb.ReleaseLeaseRequest(**joined.own(lease_id="l1", fencing_number=7))))
    greeted = await soon(joined.book.ReleaseEarlierLives(pb.ReleaseEarlierLivesRequest(**joined.own())))
    assert greeted.released_count == 3
    assert joined.noting.told[1].fencing_number == 7


async def test_ledger_rejection_is_relayed_with_its_reason(joined: Joined) -> None:
    call = joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(), **joined.own(purpose="too-much")))
    error = await refusal(call.read())
    assert (error.reason, error.message) == (Reason.INSUFFICIENT_MEMORY, "needs 99 GiB; h has 8 GiB")


@pytest.mark.parametrize(
    "changes",
    [
        {"session_id": "session-of-another"},
        {"session_id": ""},
        {"name": "another"},
        {"incarnation": "life-0"},
        {"kind": lease_pb2.LeaseHolder.KIND_PROGRAM},
    ],
    ids="-".join,
)
async def test_link_cannot_use_leases_of_another_runner(joined: Joined, changes: dict[str, Any]) -> None:
    calls = (
        joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(), **joined.own(**changes))).read(),
        joined.book.RenewLeases(pb.RenewLeasesRequest(sighting=seen(), **joined.own(**changes))),
        joined.book.ReleaseLease(pb.ReleaseLeaseRequest(**joined.own(**changes))),
        joined.book.ReleaseEarlierLives(pb.ReleaseEarlierLivesRequest(**joined.own(**changes))),
    )
    for call in calls:
        assert (await refusal(call)).reason is Reason.PERMISSION_DENIED
    assert joined.noting.told == []


async def test_full_ledger_is_not_readable_over_a_link(joined: Joined) -> None:
    error = await refusal(joined.book.ListHostMemory(pb.ListHostMemoryRequest()))
    assert error.reason is Reason.UNSUPPORTED_OPERATION
    assert joined.noting.told == []


async def test_link_cannot_report_devices_of_another_host(joined: Joined) -> None:
    for host in (
        "gpu-box",
        "",
        HOST.upper(),
    ):
        calls = (
            joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(host), **joined.own())).read(),
            joined.book.RenewLeases(pb.RenewLeasesRequest(sighting=seen(host), **joined.own())),
        )
        for call in calls:
            error = await refusal(call)
            assert error.reason is Reason.PERMISSION_DENIED
            assert HOST in error.message
        assert joined.noting.told == []


async def test_link_reports_and_leases_by_the_host_that_the_registry_gave_it(joined: Joined) -> None:
    joined.mesh.registry.host = "anns-laptop (laptop)"
    await joined.laptop.sessions.OpenSession(
        runner_session_service_pb2.OpenSessionRequest(
            request_id="again", session_id=joined.laptop.session_id, runner=joined.mesh.registry.opened[0].runner
        )
    )
    stated = joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(), **joined.own()))
    assert (await refusal(stated.read())).reason is Reason.PERMISSION_DENIED
    given = joined.book.AcquireLease(pb.AcquireLeaseRequest(sighting=seen(joined.mesh.registry.host), **joined.own()))
    assert (await soon(given.read())).waiting.detail == "held by qwen"

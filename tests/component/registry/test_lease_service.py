"""LeaseService over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import kit.serving
import pytest
from kit.refusals import refused
from lease_stage import GIB, MARGIN, ScriptedCalls, SimulatedHost, Stage, granted_lease, wanted

from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import Holder, HolderKind
from registry_svc.ledger.servicer import LeaseServicer
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.store import SqlStore
from registry_svc.registry_config import LedgerConfig, RegistryConfig
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.api.registry.v1.lease_service_pb2 import AcquireLeaseRequest
from weft.api.registry.v1.runner_pb2 import Runner
from weft.api.registry.v1.runner_session_service_pb2 import OpenSessionRequest
from weft.gpu.snapshot import HostSnapshot, snapshot_message
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub

ROOM = 24 * GIB - MARGIN

LIMIT_SECONDS = 10.0


@dataclass
class Served:
    stage: Stage
    leases: "LeaseServiceAsyncStub"

    def asking(self, size: int, *, name: str = "r1", **asked: Any) -> lease_service_pb2.AcquireLeaseRequest:
        self.stage.runner(name)
        facts = {"request_id": f"{name}-once", "purpose": f"{name}-model", "session_id": f"session-of-{name}"}
        return lease_service_pb2.AcquireLeaseRequest(
            holder=runner(name), sighting=sighting(self.stage.host.look()), bytes=size, **{**facts, **asked}
        )

    def acquire(self, size: int, **asked: Any) -> Any:
        return self.leases.AcquireLease(self.asking(size, **asked))

    async def lease(self, size: int, **asked: Any) -> lease_pb2.Lease:
        responses = [response async for response in self.acquire(size, **asked)]
        assert responses[-1].WhichOneof("kind") == "granted"
        return cast("lease_pb2.Lease", responses[-1].granted.lease)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, Stage(SimulatedHost(totals=(24 * GIB, 24 * GIB)))) as served:
        yield served


@asynccontextmanager
async def serving(folder: Path, stage: Stage) -> AsyncIterator[Served]:
    async with stage:
        service = lease_service_pb2_grpc.add_LeaseServiceServicer_to_server, LeaseServicer(stage.ledger)
        async with kit.serving.served(folder / "leases.sock", service) as channel:
            yield Served(stage, cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(channel)))


def runner(name: str = "r1", life: str = "life-1") -> lease_pb2.LeaseHolder:
    return lease_pb2.LeaseHolder(kind=lease_pb2.LeaseHolder.KIND_RUNNER, name=name, incarnation=life)


def sighting(snapshot: HostSnapshot) -> lease_pb2.HostSighting:
    return snapshot_message(
        replace(snapshot, devices=tuple(replace(each, utilization=0.5) for each in snapshot.devices))
    )


def renewing(served: Served, lease: lease_pb2.Lease, **use: Any) -> lease_service_pb2.RenewLeasesRequest:
    return lease_service_pb2.RenewLeasesRequest(
        holder=runner(),
        session_id="session-of-r1",
        leases=[lease_service_pb2.LeaseUse(lease_id=lease.lease_id, fencing_number=lease.fencing_number, **use)],
        sighting=sighting(served.stage.host.look()),
    )


def releasing(lease: lease_pb2.Lease, name: str = "r1") -> lease_service_pb2.ReleaseLeaseRequest:
    return lease_service_pb2.ReleaseLeaseRequest(
        holder=runner(name), session_id=f"session-of-{name}", lease_id=lease.lease_id, fencing_number=1
    )


async def test_lease_life_cycle_from_grant_to_end(served: Served) -> None:
    (response,) = [each async for each in served.acquire(30 * GIB, priority=priority_pb2.PRIORITY_LOW, pinned=True)]
    granted = response.granted
    lease = granted.lease
    assert (granted.time_to_live.seconds, granted.renew_interval.seconds) == (30, 5)
    assert [(each.device_index, each.bytes) for each in lease.shares] == [(0, 15 * GIB), (1, 15 * GIB)]
    assert (lease.fencing_number, lease.host, lease.purpose, lease.holder) == (1, "host-a", "r1-model", runner())
    assert (lease.state, lease.priority, lease.pinned) == (
        lease_pb2.Lease.STATE_HELD,
        priority_pb2.PRIORITY_LOW,
        True,
    )
    process = served.stage.host.spawn((0, 15 * GIB), (1, 15 * GIB))
    pid = lease_pb2.ProcessId(pid=process.pid, start_ticks=process.start_ticks)
    renewal = renewing(served, lease, processes=[pid], filled=True, active_requests=2)
    renewal.leases[0].last_used_time.FromJsonString("2026-01-01T12:00:00Z")
    renewed = await served.leases.RenewLeases(renewal)
    assert (list(renewed.lost_lease_ids), list(renewed.watched_processes), renewed.next_within.seconds) == ([], [], 5)
    (host,) = (await served.leases.ListHostMemory(lease_service_pb2.ListHostMemoryRequest())).hosts
    assert (host.host, host.source, len(host.devices)) == ("host-a", lease_pb2.HostSighting.SOURCE_NVML, 2)
    assert host.devices[0].device.utilization == 0.5
    assert host.devices[0].booked_bytes == 15 * GIB
    assert host.devices[0].foreign_bytes == 0
    assert host.devices[0].free_bytes == ROOM - 15 * GIB
    assert host.leases[0].seen_bytes == 30 * GIB
    assert host.leases[0].active_requests == 2
    assert host.leases[0].last_used_time.ToJsonString() == "2026-01-01T12:00:00Z"
    await served.leases.ReleaseLease(releasing(lease))
    renewed = await served.leases.RenewLeases(renewal)
    assert list(renewed.lost_lease_ids) == [lease.lease_id]
    assert list(renewed.watched_processes) == [pid]
    served.stage.host.end(process)
    await served.stage.look()
    assert served.stage.leases() == []


async def test_waiter_receives_the_reason_and_then_the_lease(served: Served) -> None:
    lease = await served.lease(ROOM, device_indexes=[1])
    call = served.acquire(5 * GIB, name="r2", device_indexes=[1])
    async with asyncio.timeout(LIMIT_SECONDS):
        waiting = (await call.read()).waiting
        assert (waiting.needed_bytes, waiting.free_bytes, list(waiting.holders)) == (5 * GIB, 0, ["r1-model"])
        assert waiting.detail == "needs 5 GiB on host-a, 0 bytes free, held by r1-model (loading)"
        await served.leases.ReleaseLease(releasing(lease))
        await served.stage.pass_time(5.0)
        await served.stage.look()
        words = []
        while (response := await call.read()) is not grpc.aio.EOF:
            words.append(response.WhichOneof("kind"))
    assert words[-1] == "granted"
    assert set(words[:-1]) <= {"waiting"}


async def test_cancelled_call_leaves_the_queue(served: Served) -> None:
    await served.lease(ROOM, device_indexes=[0])
    call = served.acquire(GIB, name="r2", device_indexes=[0])
    await call.read()
    assert served.stage.ledger.hosts()[0].waiting_count == 1
    call.cancel()
    async with asyncio.timeout(LIMIT_SECONDS):
        while served.stage.ledger.hosts()[0].waiting_count:
            # Another call has come and gone on the same connection.
            await served.leases.ListHostMemory(lease_service_pb2.ListHostMemoryRequest())


async def test_holder_that_disconnects_keeps_its_lease_by_renewing_it(served: Served) -> None:
    call = served.acquire(GIB)
    lease = (await call.read()).granted.lease
    call.cancel()
    renewed = await served.leases.RenewLeases(renewing(served, lease))
    await served.stage.pass_time(3.0)
    assert list(renewed.lost_lease_ids) == []
    assert served.stage.states() == ["r1-model held"]


async def test_earlier_incarnations_can_be_released_over_grpc(served: Served) -> None:
    await served.lease(GIB)
    served.stage.runner("r1", "life-2")
    request = lease_service_pb2.ReleaseEarlierLivesRequest(holder=runner(life="life-2"), session_id="session-of-r1")
    assert (await served.leases.ReleaseEarlierLives(request)).released_count == 1
    assert served.stage.states() == ["r1-model releasing"]


async def test_program_needs_no_session(served: Served) -> None:
    holder = lease_pb2.LeaseHolder(kind=lease_pb2.LeaseHolder.KIND_PROGRAM, name="train it", incarnation="life-1")
    request = served.asking(GIB, session_id="", purpose="to train, slowly")
    request.holder.CopyFrom(holder)
    (response,) = [each async for each in served.leases.AcquireLease(request)]
    assert response.granted.lease.holder == holder
    assert served.stage.leases()[0].grant.holder == Holder(
        kind=HolderKind.PROGRAM, name="train it", incarnation="life-1"
    )


async def test_errors_have_their_reasons(served: Served) -> None:
    with refused(Reason.INSUFFICIENT_MEMORY) as errors:
        await served.lease(100 * GIB)
    assert "at most 47 GiB" in errors[0].message
    lease = await served.lease(GIB, request_id="another")
    served.stage.runner("r2")
    with refused(Reason.LEASE_LOST):
        await served.leases.ReleaseLease(releasing(lease, "r2"))


async def test_invalid_field_is_reported(served: Served) -> None:
    request = served.asking(GIB)
    request.sighting.devices[1].total_bytes = 0
    with refused(Reason.INVALID_ARGUMENT) as errors:
        _ = [each async for each in served.leases.AcquireLease(request)]
    error = errors[0]
    assert isinstance(error, FieldError)
    assert error.field == "sighting.devices[1].total_bytes"
    with refused(Reason.INVALID_ARGUMENT):
        await served.leases.ListHostMemory(lease_service_pb2.ListHostMemoryRequest(host="x" * 256))


def opening(life: str, session_id: str = "") -> OpenSessionRequest:
    return OpenSessionRequest(
        request_id=f"open-{life}",
        session_id=session_id,
        runner=Runner(name="r1", incarnation=life, address="unix:/run/r1", host="host-a", runtime="fake"),
    )


def request(life: str, session_id: str) -> AcquireLeaseRequest:
    holder = Holder(kind=HolderKind.RUNNER, name="r1", incarnation=life)
    asked = {"request_id": f"load-{life}", "session_id": session_id, "purpose": "m1"}
    return wanted(holder, GIB, SimulatedHost().look(), **asked)


async def test_runner_leases_memory_with_its_open_session() -> None:
    store, clock = SqlStore("sqlite://"), SystemClock()
    core = RegistryCore(store, clock, RegistryConfig(database_url="sqlite://"))
    config = LedgerConfig(device_margin_mb=512)
    ledger = Ledger(LeaseStore(store), clock, config, ScriptedCalls(), core.of_runner)
    await core.start()
    await ledger.start()
    try:
        roster = SessionManager(core)
        session = await roster.open_session(opening("life-1"))
        async with aclosing(ledger.acquire(request("life-1", session.id))) as words:
            (granted,) = [word async for word in words]
        assert (await LeaseStore(store).load()).grants == (granted_lease(ledger, granted).grant,)

        again = await roster.open_session(opening("life-2", session.id))
        with refused(Reason.PERMISSION_DENIED):
            await anext(ledger.acquire(request("life-1", again.id)))
        present = Holder(kind=HolderKind.RUNNER, name="r1", incarnation="life-2")
        assert await ledger.release_earlier_lives(present, again.id) == 1
    finally:
        await ledger.stop(1.0)
        await core.stop(1.0)

"""An operator releases the lease of a program: the program is told, the memory stays reserved until it is free."""

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from kit.refusals import refused
from lease_stage import GIB, SimulatedHost, Stage, program, use, wanted
from registry_harness import RunningRegistry

from registry_svc.ledger.policy.leases import LeaseState
from weft.api.operations.v1 import operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import lease_pb2, lease_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub


async def test_program_is_notified_and_its_memory_reserved_until_seen_free(stage: Stage) -> None:
    lease, process = await stage.loaded(program(), 20 * GIB)
    released = await stage.ledger.release_program_lease(lease.grant.id)
    assert released.state == lease_pb2.Lease.STATE_RELEASING
    waiting = stage.acquire(stage.runner(), 20 * GIB)
    assert (await stage.renew(program(), use(lease, process))).lost_lease_ids == (lease.grant.id,)
    await stage.pass_time(1.0)
    assert waiting.granted is None
    stage.host.end(process)
    await stage.look()
    await stage.pass_time(1.0)
    assert waiting.granted is not None


async def test_orphaned_lease_stays_released_after_a_restart() -> None:
    async with Stage(restart_grace_seconds=0.0) as stage:
        lease, process = await stage.loaded(program(), GIB)
        await stage.pass_time(31.0)
        assert stage.states() == ["m1 orphaned"]
        await stage.ledger.release_program_lease(lease.grant.id)
        await stage.restart(politely=False)
        assert stage.states() == ["m1 releasing"]
        assert (await stage.renew(program(), use(lease, process))).lost_lease_ids == (lease.grant.id,)


async def test_release_of_a_model_lease_is_rejected_and_suggests_how_to_free_it() -> None:
    async with Stage(restart_grace_seconds=0.0) as stage:
        lease, _ = await stage.loaded(stage.runner(), GIB)
        with pytest.raises(WeftError, match="the model m1 on the runner r1; unload it: weft unload m1") as refused:
            await stage.ledger.release_program_lease(lease.grant.id)
        assert refused.value.reason is Reason.RESOURCE_IN_USE
        await stage.pass_time(31.0)
        with pytest.raises(WeftError, match="which sends no heartbeats; it ends when"):
            await stage.ledger.release_program_lease(lease.grant.id)
        assert [each.state for each in stage.leases()] == [LeaseState.ORPHANED]


async def test_ended_lease_is_not_found_and_a_second_release_changes_nothing(stage: Stage) -> None:
    lease = await stage.lease(program(), GIB)
    first = await stage.ledger.release_program_lease(lease.grant.id)
    since = stage.leases()[0].since
    assert await stage.ledger.release_program_lease(lease.grant.id) == first
    assert stage.leases()[0].since == since
    with refused(Reason.NOT_FOUND):
        await stage.ledger.release_program_lease("lease-none")


async def test_grpc_release_is_audited_once_and_rejections_are_not(mesh: RunningRegistry) -> None:
    leases = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(mesh.channel))
    call: Any = leases.AcquireLease(wanted(program(), GIB, SimulatedHost().look(), request_id="r", purpose="p"))
    granted = [response.granted.lease async for response in call][-1]
    for _ in range(2):
        request = pb.ReleaseProgramLeaseRequest(lease_id=granted.lease_id, requested_by="cli:ann@box")
        answer = await leases.ReleaseProgramLease(request)
        assert answer.lease.state == lease_pb2.Lease.STATE_RELEASING
    with refused(Reason.NOT_FOUND):
        await leases.ReleaseProgramLease(pb.ReleaseProgramLeaseRequest(lease_id="lease-none"))
    audit: Any = operation_service_pb2_grpc.OperationServiceStub(mesh.channel)
    (entry,) = (await audit.ListAuditEntries(operation_service_pb2.ListAuditEntriesRequest())).entries
    assert (entry.event, entry.actor) == ("lease.release_requested", "cli:ann@box")
    detail = json.loads(entry.detail)
    assert (detail["lease"], detail["holder"]) == (granted.lease_id, "train")

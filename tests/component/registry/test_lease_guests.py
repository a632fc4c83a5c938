"""Runners that joined over a link say what they like: where somebody else is at home, their word ends nothing."""

from dataclasses import replace

from lease_stage import GIB, SimulatedHost, Stage, renew, renewal

from registry_svc.ledger.lease_table import DEVICES_KEPT_SECONDS
from registry_svc.ledger.policy.leases import Holder
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessSnapshot


def _guest(stage: Stage, name: str = "guest") -> Holder:
    stage.guests.add(name)
    return stage.runner(name)


def _lie(stage: Stage) -> HostSnapshot:
    """All processes are gone, nothing is in use, and there is far more memory than there is."""
    seen = stage.host.look(stage.host.held)
    device = DeviceSnapshot(index=0, id="GPU-0", name="lie", total_bytes=512 * GIB, used_bytes=0)
    gone = tuple(ProcessSnapshot(process=each.process, alive=False) for each in seen.processes)
    return replace(seen, devices=(device,), processes=gone)


async def _tell(stage: Stage, holder: Holder, snapshot: HostSnapshot) -> None:
    await renew(stage.ledger, renewal(holder, (), snapshot))
    await stage.settle()


async def test_false_reports_of_a_joined_runner_end_no_foreign_lease_and_free_no_memory() -> None:
    async with Stage(SimulatedHost((24 * GIB,))) as stage:
        resident, guest = stage.runner("resident"), _guest(stage)
        lease, _ = await stage.loaded(resident, 20 * GIB)
        await stage.release(lease)
        waiting = stage.acquire(stage.runner("next"), 20 * GIB)
        for _ in range(3):
            await _tell(stage, guest, _lie(stage))
            await stage.pass_time(1.0)
        assert stage.states() == ["m1 releasing"]
        assert waiting.granted is None
        # The memory of a runner that is dead and silent is not given away on such a word either.
        await stage.pass_time(DEVICES_KEPT_SECONDS + 1)
        await _tell(stage, guest, _lie(stage))
        await stage.pass_time(1.0)
        assert stage.states() == ["m1 releasing"]


async def test_reports_of_joined_runners_are_trusted_on_their_own_host() -> None:
    async with Stage(SimulatedHost((24 * GIB,))) as stage:
        guest = _guest(stage)
        lease, process = await stage.loaded(guest, 20 * GIB)
        await stage.release(lease)
        stage.host.end(process)
        await stage.pass_time(1.0)
        await _tell(stage, guest, stage.host.look([process]))
        await stage.pass_time(1.0)
        assert stage.states() == []
        assert (await stage.lease(_guest(stage, "other"), 20 * GIB)).grant.holder.name == "other"


async def test_joined_runner_on_a_shared_host_gets_leases_based_on_resident_reports() -> None:
    async with Stage(SimulatedHost((24 * GIB,))) as stage:
        resident, guest = stage.runner("resident"), _guest(stage)
        await stage.loaded(resident, 10 * GIB)
        assert (await stage.lease(guest, 10 * GIB)).grant.holder == guest
        refused = stage.acquire(guest, 10 * GIB, snapshot=_lie(stage))
        await stage.settle()
        assert refused.granted is None

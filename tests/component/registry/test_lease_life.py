"""The life of a lease: granted, renewed, given up, orphaned, over."""

from dataclasses import replace
from typing import Any

import pytest
from kit.refusals import refused
from lease_stage import GIB, MARGIN, SimulatedHost, Stage, granted_lease, program, renew, renewal, session_id, use

from registry_svc.ledger import lease_table, wait_queue
from registry_svc.ledger.lease_table import DEVICES_KEPT_SECONDS
from registry_svc.ledger.policy.leases import Holder, HolderKind
from registry_svc.mesh.unowned import UnownedModel
from weft.api.registry.v1.lease_service_pb2 import LeaseUse
from weft.documents.codec import document_of
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.doctor import unowned_text
from weft_app.cli.records import lease_rows

ROOM = 24 * GIB - MARGIN


async def test_ledger_without_leases_sleeps(stage: Stage) -> None:
    await stage.settle()
    assert stage.clock.sleepers == 0
    lease = await stage.lease(stage.runner(), GIB)
    assert stage.clock.sleepers == 1
    await stage.release(lease)
    await stage.pass_time(5.0)
    await stage.look()
    await stage.pass_time(1.0)
    assert stage.clock.sleepers == 0
    await stage.lease(stage.runner(), GIB)
    assert stage.clock.sleepers == 1
    await stage.restart()
    await stage.settle()
    assert stage.clock.sleepers == 1


async def test_same_request_returns_the_same_lease_while_it_is_held(stage: Stage) -> None:
    first = await stage.lease(stage.runner(), GIB, request_id="once")
    assert (await stage.lease(stage.runner(), GIB, request_id="once")).grant == first.grant
    assert (await stage.lease(stage.runner("r2"), GIB, request_id="once")).grant.id != first.grant.id
    await stage.release(first)
    assert (await stage.lease(stage.runner(), GIB, request_id="once")).grant.id != first.grant.id


async def test_unconfirmed_grant_of_a_lost_caller_is_released(stage: Stage) -> None:
    words = stage.ledger.acquire(stage.request(stage.runner(), GIB))
    await anext(words)
    await words.aclose()
    # It may have been told with the last bytes of a connection that was closed then.
    await stage.settle()
    assert stage.states() == ["m1 held"]
    await stage.pass_time(2.0)
    assert stage.states() == ["m1 releasing"]
    await stage.pass_time(5.0)
    await stage.look()
    assert stage.states() == []


async def test_renewed_lease_is_not_released_when_its_call_is_cancelled_late(stage: Stage) -> None:
    words = stage.ledger.acquire(stage.request(stage.runner(), GIB))
    granted = await anext(words)
    lease = granted_lease(stage.ledger, granted)
    await words.aclose()
    await stage.settle()
    await stage.renew(stage.runner(), use(lease))
    await stage.pass_time(2.0)
    assert stage.states() == ["m1 held"]


async def test_lease_returned_to_a_repeated_call_is_not_released_by_the_first(stage: Stage) -> None:
    first = stage.ledger.acquire(stage.request(stage.runner(), GIB, request_id="once"))
    await anext(first)
    await stage.lease(stage.runner(), GIB, request_id="once")
    await first.aclose()
    await stage.pass_time(2.0)
    assert stage.states() == ["m1 held"]


async def test_lease_of_a_lost_call_that_a_repeated_call_got_is_not_released(stage: Stage) -> None:
    first = stage.ledger.acquire(stage.request(stage.runner(), GIB, request_id="once"))
    await anext(first)
    await first.aclose()
    await stage.pass_time(0.5)
    lease = await stage.lease(stage.runner(), GIB, request_id="once")
    # The holder renews after its interval, later than the first call would have.
    await stage.pass_time(2.0)
    assert stage.states() == ["m1 held"]
    assert (await stage.renew(stage.runner(), use(lease))).lost_lease_ids == ()


async def test_snapshots_are_requested_frequently_after_a_release(stage: Stage) -> None:
    process, kept = ProcessId(41, 1), await stage.lease(stage.runner(), GIB)
    lease = await stage.lease(stage.runner(), GIB)
    await stage.renew(stage.runner(), use(kept), use(lease, process))
    assert (await stage.renew(stage.runner(), use(kept), use(lease, process))).next_within_seconds == 5.0
    await stage.release(lease)
    assert (await stage.renew(stage.runner(), use(kept))).next_within_seconds == 0.25
    for _ in range(5):
        await stage.pass_time(2.0)
        last = await stage.renew(stage.runner(), use(kept))
    assert last.next_within_seconds == 5.0, "one that hangs is not looked for four times a second for ever"


async def test_leases_are_not_orphaned_during_the_restart_grace(stage: Stage) -> None:
    lease, process = await stage.loaded(stage.runner(), GIB)
    await stage.restart()
    await stage.pass_time(89.0)
    assert stage.states() == ["m1 held"]
    assert (await stage.renew(stage.runner(), use(lease, process))).lost_lease_ids == ()
    await stage.pass_time(31.0)
    assert stage.states() == ["m1 orphaned"]


async def test_registry_resuming_from_a_freeze_orphans_no_lease() -> None:
    async with Stage(restart_grace_seconds=60.0) as stage:
        await stage.loaded(stage.runner(), GIB)
        await stage.pass_time(100.0)
        assert stage.states() == ["m1 orphaned"]
        other, process = await stage.loaded(stage.runner("r2"), GIB, purpose="m2")
        stage.clock.freeze(120.0)
        await stage.pass_time(1.0)
        assert stage.states()[-1] == "m2 held"
        assert (await stage.renew(stage.runner("r2"), use(other, process))).lost_lease_ids == ()


@pytest.mark.parametrize("wrong", ["number", "incarnation", "holder", "unknown", "released"])
async def test_renewal_of_a_foreign_lease_is_lost(stage: Stage, wrong: str) -> None:
    lease = await stage.lease(stage.runner(), GIB)
    holder: Holder = lease.grant.holder
    how: dict[str, Any] = {}
    if wrong == "number":
        how["fencing_number"] = lease.grant.fencing_number - 1
    elif wrong == "incarnation":
        holder = stage.runner("r1", "life-2")
    elif wrong == "holder":
        holder = stage.runner("r2")
    elif wrong == "unknown":
        how["lease_id"] = "lease-unknown"
    else:
        await stage.release(lease)
    use_ = use(lease)
    changed = {"lease_id": use_.lease_id, "fencing_number": use_.fencing_number, **how}
    answer = await stage.renew(holder, LeaseUse(**changed))
    assert answer.lost_lease_ids == (changed["lease_id"],)


async def test_release_of_a_foreign_lease_is_rejected(stage: Stage) -> None:
    lease = await stage.lease(stage.runner(), GIB)
    id_, number = lease.grant.id, lease.grant.fencing_number
    for holder, of in ((stage.runner("r2"), number), (stage.runner(), number + 1), (program("r1"), number)):
        with refused(Reason.LEASE_LOST):
            await stage.ledger.release(holder, session_id(holder), id_, of)
    assert stage.states() == ["m1 held"]


async def test_releasing_an_ended_lease_is_not_an_error(stage: Stage) -> None:
    holder = stage.runner()
    await stage.ledger.release(holder, session_id(holder), "lease-gone", 1)
    lease = await stage.lease(holder, GIB)
    await stage.release(lease)
    await stage.release(lease)
    assert stage.states() == ["m1 releasing"]


async def test_calls_for_a_runner_require_its_session(stage: Stage) -> None:
    lease = await stage.lease(stage.runner(), GIB)
    holder = lease.grant.holder
    stranger = Holder(kind=HolderKind.RUNNER, name="nobody", incarnation="life-1")
    refusals = [
        stage.ledger.release(holder, "a-guess", lease.grant.id, lease.grant.fencing_number),
        stage.ledger.release_earlier_lives(stage.runner("r1", "life-2"), "a-guess"),
        stage.ledger.release_earlier_lives(stranger, session_id(stranger)),
        anext(stage.ledger.acquire(stage.request(holder, GIB, session_id="a-guess"))),
    ]
    for refusal in refusals:
        with refused(Reason.PERMISSION_DENIED):
            await refusal
    assert stage.states() == ["m1 held"]


async def test_starting_runner_releases_only_leases_of_its_earlier_incarnations(stage: Stage) -> None:
    for name, life in (("r1", "life-1"), ("r1", "life-2"), ("r2", "life-1")):
        await stage.lease(stage.runner(name, life), GIB, purpose=f"{name}-{life}")
    await stage.lease(program("r1"), GIB, purpose="program")
    await stage.lease(stage.runner("r1", "life-3"), GIB, purpose="r1-life-3")
    present = stage.runner("r1", "life-3")
    assert await stage.ledger.release_earlier_lives(present, session_id(present)) == 2
    assert stage.states() == [
        "r1-life-1 releasing",
        "r1-life-2 releasing",
        "r2-life-1 held",
        "program held",
        "r1-life-3 held",
    ]
    assert await stage.ledger.release_earlier_lives(present, session_id(present)) == 0


async def test_stop_notifies_every_waiter(stage: Stage) -> None:
    await stage.lease(stage.runner(), ROOM)
    waits = stage.acquire(stage.runner("r2"), GIB)
    await stage.settle()
    await stage.ledger.stop(1.0)
    await stage.settle()
    assert waits.reason is Reason.SHUTTING_DOWN
    with pytest.raises(WeftError, match="not running"):
        await stage.renew(stage.runner())


async def test_processes_per_lease_are_limited(stage: Stage) -> None:
    lease = await stage.lease(stage.runner(), GIB)
    for batch in range(4):
        await stage.renew(stage.runner(), use(lease, *(ProcessId(1 + batch * 256 + pid, 1) for pid in range(256))))
    with refused(Reason.TOO_MANY_RESOURCES):
        await stage.renew(stage.runner(), use(lease, ProcessId(5_000, 1)))


async def test_number_of_hosts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "MAX_HOSTS", 1)
    async with Stage() as stage:
        await stage.renew(stage.runner())
        with refused(Reason.TOO_MANY_RESOURCES):
            await renew(stage.ledger, renewal(program(), (), HostSnapshot(host="host-b", source=Source.NVML)))


async def test_unobserved_hosts_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "MAX_HOSTS", 1)
    async with Stage(orphan_keep_seconds=100.0) as stage:
        await stage.renew(stage.runner())
        await stage.pass_time(101.0)
        stage.host.name = "host-b"
        await stage.renew(stage.runner())
        assert [host.host for host in stage.ledger.hosts()] == ["host-b"]


async def test_renewal_beside_a_live_orphan_does_not_wake_the_ledger() -> None:
    async with Stage(restart_grace_seconds=0.0) as stage:
        _, process = await stage.loaded(stage.runner(), GIB)
        await stage.pass_time(31.0)
        await stage.look()
        assert stage.states() == ["m1 orphaned"]
        observer = stage.runner("observer")
        await renew(stage.ledger, renewal(observer, (), stage.host.look([process])))
        assert not stage.ledger._wake.is_set(), "hosts with an orphan would keep the registry busy"
        stage.host.end(process)
        await renew(stage.ledger, renewal(observer, (), stage.host.look([process])))
        assert stage.ledger._wake.is_set()
        await stage.settle()
        assert stage.states() == []


def unowned(stage: Stage) -> dict[str, bool]:
    return {lease.purpose: lease.unowned for host in stage.ledger.hosts() for lease in host.leases}


async def test_lease_of_an_unpublished_model_is_unowned(stage: Stage) -> None:
    runner = stage.runner()
    await stage.loaded(runner, GIB, purpose="m1")
    await stage.loaded(runner, GIB, purpose="m2")
    await stage.loaded(program(), GIB, purpose="training")
    assert unowned(stage) == {"m1": False, "m2": False, "training": False}
    stage.withdrawn.add(("r1", "m1"))
    assert unowned(stage) == {"m1": True, "m2": False, "training": False}
    assert stage.ledger.unowned_models() == [UnownedModel("r1", "m1")]
    (message,) = stage.ledger.hosts()
    assert [lease.purpose for lease in message.leases if lease.unowned] == ["m1"]
    assert unowned_text(lease_rows([document_of(message)])) == "1 GiB on host-a for m1 of r1"


async def test_orphaned_lease_is_unowned_and_a_releasing_one_is_not(stage: Stage) -> None:
    runner = stage.runner()
    silent, process = await stage.loaded(runner, GIB, purpose="m1")
    await stage.pass_time(200.0)
    assert (stage.states(), unowned(stage)) == (["m1 orphaned"], {"m1": True})
    assert stage.ledger.unowned_models() == [], "its holder cannot be asked to unload it"
    await stage.renew(runner, use(silent, process))
    assert unowned(stage) == {"m1": False}
    stage.withdrawn.add(("r1", "m1"))
    await stage.release(silent)
    assert unowned(stage) == {"m1": False}


MOST = 3


async def test_one_holder_cannot_take_every_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_queue, "MAX_LEASES_PER_HOLDER", MOST)
    async with Stage(SimulatedHost((24 * GIB,)), max_leases=10) as stage:
        liar, honest = stage.runner("liar"), stage.runner("honest")
        for _ in range(MOST):
            await stage.lease(liar, 1)
        one_more = stage.acquire(liar, 1)
        await stage.settle()
        assert one_more.error is not None
        assert one_more.error.reason is Reason.TOO_MANY_RESOURCES
        assert "liar" in one_more.error.message
        assert (await stage.lease(honest, GIB)).grant.holder == honest


async def test_waits_count_toward_the_lease_limit_of_a_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_queue, "MAX_LEASES_PER_HOLDER", MOST)
    async with Stage(SimulatedHost((24 * GIB,))) as stage:
        liar, asked = stage.runner("liar"), {"request_id": "again"}
        await stage.loaded(stage.runner("honest"), 20 * GIB, active_requests=1)
        waits = [stage.acquire(liar, 20 * GIB) for _ in range(MOST - 1)]
        waits.append(stage.acquire(liar, 20 * GIB, **asked))
        await stage.settle()
        assert [each.error for each in waits] == [None] * MOST
        one_more = stage.acquire(liar, 20 * GIB)
        await stage.settle()
        assert one_more.reason is Reason.TOO_MANY_RESOURCES
        again = stage.acquire(liar, 20 * GIB, **asked)
        await stage.settle()
        assert (again.error, waits[-1].reason) == (None, Reason.CANCELLED)


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


async def test_joined_runner_gets_no_memory_of_a_host_that_others_observe_and_its_earlier_leases_do_not_count() -> None:
    async with Stage(SimulatedHost((24 * GIB,))) as stage:
        guest = _guest(stage)
        early = await stage.lease(guest, 20 * GIB)
        assert early.grant.holder == guest
        resident = stage.runner("resident")
        await _tell(stage, resident, stage.host.look(stage.host.held))
        refused = stage.acquire(guest, 2 * GIB, snapshot=_lie(stage))
        await stage.settle()
        assert refused.error is not None
        assert refused.error.reason is Reason.PERMISSION_DENIED
        assert (await stage.lease(resident, 20 * GIB)).grant.holder == resident

"""Waiting for memory: in which order, for how long, and who gives way."""

import asyncio

from lease_stage import GIB, MARGIN, SimulatedHost, Stage, session_id, use

from registry_svc.ledger.policy.leases import LeaseState
from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest
from weft.gpu.snapshot import HostSnapshot, Source
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

ROOM = 24 * GIB - MARGIN


async def test_wait_timeout_reports_who_holds_the_memory(stage: Stage) -> None:
    await stage.loaded(stage.runner(), ROOM, active_requests=1, purpose="qwen")
    waits = stage.acquire(stage.runner("r2"), GIB, purpose="llama", max_wait_seconds=10.0)
    await stage.settle()
    for _ in range(10):
        assert waits.error is None
        await stage.pass_time(1.0)
        await stage.renew(stage.runner())
    assert waits.error is not None
    assert waits.error.reason is Reason.INSUFFICIENT_MEMORY
    assert "qwen (busy)" in waits.error.message
    assert stage.ledger.hosts()[0].waiting_count == 0


async def test_waiter_receives_its_queue_position(stage: Stage) -> None:
    await stage.lease(stage.runner(), 20 * GIB)
    waits = [stage.acquire(stage.runner("r2"), size * GIB) for size in (9, 1)]
    await stage.settle()
    assert waits[0].words[-1].detail == "needs 9 GiB on host-a, 3.5 GiB free, held by m1 (loading)"
    assert waits[1].words[-1].detail.endswith("held by m1 (loading); 1 ahead of it in the queue")


async def test_zero_wait_is_a_single_attempt(stage: Stage) -> None:
    await stage.lease(stage.runner(), ROOM - GIB)
    assert (await stage.lease(stage.runner("r2"), GIB, max_wait_seconds=0.0)).grant.shares == ((0, GIB),)
    refused = stage.acquire(stage.runner("r3"), GIB, max_wait_seconds=0.0)
    await stage.settle()
    assert refused.reason is Reason.INSUFFICIENT_MEMORY


async def test_request_larger_than_the_host_is_rejected_immediately() -> None:
    async with Stage(SimulatedHost(totals=(24 * GIB, 24 * GIB))) as stage:
        for asked in ({"max_devices": 1}, {"device_indexes": frozenset({1})}):
            refused = stage.acquire(stage.runner(), ROOM + 1, **asked)
            await stage.settle()
            assert refused.error is not None
            assert refused.error.reason is Reason.INSUFFICIENT_MEMORY
            assert "at most 23.5 GiB" in refused.error.message
        assert (await stage.lease(stage.runner(), ROOM + 2)).grant.shares == ((0, ROOM // 2 + 1), (1, ROOM // 2 + 1))


async def test_host_without_devices_has_nothing_to_lease() -> None:
    async with Stage(SimulatedHost(totals=())) as stage:
        refused = stage.acquire(stage.runner(), GIB)
        await stage.settle()
        assert refused.reason is Reason.NOT_FOUND
        assert stage.ledger.hosts() == []


async def test_unknown_device_is_rejected_by_name(stage: Stage) -> None:
    refused = stage.acquire(stage.runner(), GIB, device_indexes=frozenset({3}))
    await stage.settle()
    assert isinstance(refused.error, FieldError)
    assert refused.error.field == "device_indexes"


async def test_queue_length_is_limited() -> None:
    async with Stage(max_waiting=2) as stage:
        await stage.lease(stage.runner(), ROOM)
        waits = [stage.acquire(stage.runner("r2"), GIB) for _ in range(3)]
        await stage.settle()
        assert [each.error and each.error.reason for each in waits] == [None, None, Reason.TOO_MANY_RESOURCES]


async def test_number_of_leases_is_limited() -> None:
    async with Stage(max_leases=2) as stage:
        for _ in range(2):
            await stage.lease(stage.runner(), 1)
        refused = stage.acquire(stage.runner(), 1)
        await stage.settle()
        assert refused.reason is Reason.TOO_MANY_RESOURCES


async def test_repeated_call_keeps_the_queue_position(stage: Stage) -> None:
    blocking = await stage.lease(stage.runner(), ROOM)
    first = stage.acquire(stage.runner("r2"), ROOM, request_id="once")
    await stage.settle()
    behind = stage.acquire(stage.runner("r3"), ROOM)
    await stage.settle()
    again = stage.acquire(stage.runner("r2"), ROOM, request_id="once")
    await stage.settle()
    assert first.reason is Reason.CANCELLED
    await stage.release(blocking)
    await stage.pass_time(6.0)
    await stage.look()
    assert again.granted is not None
    assert behind.granted is None


async def test_snapshots_are_requested_frequently_while_a_request_waits(stage: Stage) -> None:
    lease, process = await stage.loaded(stage.runner(), ROOM)
    assert (await stage.renew(stage.runner(), use(lease, process))).next_within_seconds == 5.0
    stage.acquire(stage.runner("r2"), GIB)
    await stage.settle()
    assert (await stage.renew(stage.runner(), use(lease, process))).next_within_seconds == 0.25


async def test_idle_model_is_evicted_and_its_memory_goes_to_the_requester(stage: Stage) -> None:
    lease, process = await stage.loaded(stage.runner(), ROOM, purpose="old")

    async def give_way(_: EvictionRequest) -> EvictionAnswer:
        stage.host.end(process)
        await stage.release(lease)
        return EvictionAnswer.GIVEN_UP

    stage.calls.answer = give_way
    waits = stage.acquire(stage.runner("r2"), ROOM, purpose="new", priority=Priority.LOW)
    await stage.settle()
    assert stage.calls.asked == []  # NORMAL does not give way to LOW
    await waits.cancel()
    waits = stage.acquire(stage.runner("r2"), ROOM, purpose="new")
    await stage.settle()
    asked = EvictionRequest(
        runner="r1", model="old", lease_id=lease.grant.id, priority=Priority.NORMAL, wanted_by="new"
    )
    assert stage.calls.asked == [asked]
    await stage.look()
    assert waits.granted is not None


async def test_refusing_holder_is_skipped_and_other_requests_are_granted() -> None:
    async with Stage(SimulatedHost(totals=(24 * GIB, 24 * GIB))) as stage:
        first, _ = await stage.loaded(stage.runner("r1"), 20 * GIB, purpose="first", device_indexes=frozenset({0}))
        second, process = await stage.loaded(
            stage.runner("r2"), 3 * GIB, purpose="second", device_indexes=frozenset({0})
        )
        answers = asyncio.Queue[EvictionAnswer]()

        async def answer(_: EvictionRequest) -> EvictionAnswer:
            return await answers.get()

        stage.calls.answer = answer
        waits = stage.acquire(stage.runner("r3"), 3 * GIB, device_indexes=frozenset({0}))
        await stage.pass_time(3.0)
        assert [each.model for each in stage.calls.asked] == ["first"]
        # Nobody is held up by a runner that takes its time.
        assert (await stage.lease(stage.runner("r4"), GIB)).grant.shares == ((1, GIB),)
        answers.put_nowait(EvictionAnswer.REFUSED)
        await stage.settle()
        assert [each.model for each in stage.calls.asked] == ["first", "second"]
        stage.host.end(process)
        await stage.release(second)
        answers.put_nowait(EvictionAnswer.GIVEN_UP)
        await stage.look()
        assert waits.granted is not None
        assert stage.ledger._table.lease(first.grant.id) is not None


async def test_unresponsive_runner_does_not_block_the_queue(stage: Stage) -> None:
    await stage.loaded(stage.runner("r1"), 12 * GIB, purpose="first")
    await stage.loaded(stage.runner("r2"), 11 * GIB, purpose="second")

    async def never(_: EvictionRequest) -> EvictionAnswer:
        await asyncio.Event().wait()
        return EvictionAnswer.GIVEN_UP

    stage.calls.answer = never
    stage.acquire(stage.runner("r3"), 11 * GIB)
    for _ in range(13):
        await stage.pass_time(5.0)
        for name in ("r1", "r2"):
            held = [each for each in stage.leases() if each.grant.holder.name == name]
            await stage.renew(stage.runner(name), *(use(each, *each.grant.processes) for each in held))
    assert [each.model for each in stage.calls.asked] == ["first", "second"]


async def test_hosts_list_devices_leases_and_waiters(stage: Stage) -> None:
    lease, _ = await stage.loaded(stage.runner(), 20 * GIB)
    stage.host.spawn((0, GIB))
    stage.acquire(stage.runner("r2"), 10 * GIB)
    await stage.look()
    (host,) = stage.ledger.hosts()
    assert (host.host, Source(host.source), host.waiting_count) == ("host-a", Source.NVML, 1)
    account = host.devices[0]
    assert (account.booked_bytes, account.foreign_bytes, account.free_bytes, account.margin_bytes) == (
        20 * GIB,
        GIB,
        3 * GIB - MARGIN,
        MARGIN,
    )
    assert [(each.lease_id, each.seen_bytes) for each in host.leases] == [(lease.grant.id, 20 * GIB)]
    assert stage.ledger.hosts("elsewhere") == []


async def test_waiter_sees_that_the_blocking_lease_has_no_heartbeat() -> None:
    async with Stage(restart_grace_seconds=0.0) as stage:
        await stage.loaded(stage.runner(), ROOM, purpose="qwen")
        waits = stage.acquire(stage.runner("r2"), GIB)
        await stage.pass_time(31.0)
        assert "qwen (no heartbeat)" in waits.words[-1].detail
        assert stage.leases()[0].state is LeaseState.ORPHANED


async def test_holder_without_visible_devices_gets_none_and_hides_none_from_others(stage: Stage) -> None:
    lease, process = await stage.loaded(stage.runner(), GIB)
    blind = HostSnapshot(host="host-a", source=Source.NVML)
    refused = stage.acquire(stage.runner("r2"), GIB, snapshot=blind)
    await stage.settle()
    assert refused.reason is Reason.NOT_FOUND
    assert stage.ledger.hosts()[0].devices[0].booked_bytes == GIB
    await stage.pass_time(60.0)
    stage.acquire(stage.runner("r2"), GIB, snapshot=blind)
    await stage.settle()
    assert stage.ledger.hosts() == []
    await stage.renew(stage.runner(), use(lease, process))
    assert stage.ledger.hosts()[0].devices[0].booked_bytes == GIB


async def test_wait_of_an_earlier_incarnation_is_cancelled(stage: Stage) -> None:
    await stage.lease(stage.runner("r0"), ROOM)
    earlier = stage.acquire(stage.runner("r1", "life-1"), GIB)
    await stage.settle()
    present = stage.runner("r1", "life-2")
    later = stage.acquire(present, GIB)
    await stage.settle()
    assert await stage.ledger.release_earlier_lives(present, session_id(present)) == 0
    await stage.settle()
    assert earlier.reason is Reason.CANCELLED
    assert later.error is None


async def test_wait_ends_even_if_its_host_was_purged() -> None:
    async with Stage(orphan_keep_seconds=5.0) as stage:
        stage.host.spawn((0, ROOM))
        waits = stage.acquire(stage.runner(), GIB, max_wait_seconds=10.0)
        await stage.pass_time(9.0)
        assert stage.ledger.hosts() == []
        still_waits = waits.error is None
        assert still_waits
        await stage.pass_time(2.0)
        assert waits.reason is Reason.INSUFFICIENT_MEMORY

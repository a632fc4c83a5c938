"""What is offered to the scheduler, when, and in which order."""

import asyncio
from dataclasses import replace

from kit.fleet import model_view, runner_view
from kit.refusals import refused
from task_harness import TENANT, TaskBench, chat_spec, task_bench

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.task_records import TaskLease
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

NO_MODEL = WeftError(Reason.MODEL_NOT_FOUND, "no model is called qwen")
NO_IMAGES = WeftError(Reason.UNSUPPORTED_OPERATION, "no model of the pool reads images")


def a_view(*, models: frozenset[str] = frozenset({"qwen"})) -> FleetView:
    return FleetView(1, {"laptop": runner_view("laptop")}, {name: model_view(name, "laptop") for name in models})


async def refuse(bench: TaskBench, error: WeftError) -> None:
    call = await bench.calls.next()
    call.refuse(error)
    async with asyncio.timeout(10):
        await call.left.wait()
    await bench.settle()


async def test_rejections_do_not_count_as_attempts_and_backoff_doubles_up_to_thirty_seconds() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            await refuse(bench, NO_MODEL)
            await bench.advance(pause - 0.1)
            assert bench.calls.unseen == 0
            await bench.advance(0.2)
        await bench.calls.next()
        waiting = await bench.get(task.id)
        assert (waiting.state, waiting.attempt) == (task_pb2.TASK_STATE_PENDING, 0)


async def test_tasks_rejected_together_back_off_together_and_then_one_retries_for_all() -> None:
    async with task_bench(limits=TaskLimits(offers_per_lane=4)) as bench:
        for _ in range(6):
            await bench.submit()
        await bench.settle()
        for pause, offered in ((1.0, 4), (2.0, 1)):
            assert bench.calls.unseen == offered
            for _ in range(offered):
                await refuse(bench, NO_MODEL)
            await bench.advance(pause - 0.1)
            assert bench.calls.unseen == 0
            await bench.advance(0.2)
        assert bench.calls.unseen == 1
        await (await bench.calls.next()).grant()
        await bench.settle()
        assert bench.calls.unseen == 4


async def test_later_rejection_does_not_extend_the_backoff_of_earlier_tasks() -> None:
    async with task_bench(limits=TaskLimits(offers_per_lane=1)) as bench:
        first = await bench.submit()
        await refuse(bench, NO_IMAGES)
        await bench.advance(0.9)
        await bench.submit()
        await refuse(bench, NO_IMAGES)
        await bench.advance(0.2)
        assert (await bench.calls.next()).task.id == first.id


async def test_retry_after_of_a_rejection_is_honored() -> None:
    async with task_bench() as bench:
        await bench.submit()
        await refuse(bench, WeftError(Reason.QUEUE_FULL, "full", retry_after_seconds=12))
        await bench.advance(11.9)
        assert bench.calls.unseen == 0
        await bench.advance(0.2)
        await bench.calls.next()


async def test_load_changes_of_the_mesh_do_not_end_a_backoff() -> None:
    async with task_bench() as bench:
        view = a_view()
        bench.service.engine.mesh_changed(view)
        await bench.submit()
        await refuse(bench, NO_MODEL)
        await bench.advance(1)
        await refuse(bench, NO_MODEL)
        runner = replace(view.runners["laptop"], max_requests=3)
        bench.service.engine.mesh_changed(replace(view, revision=2, runners={"laptop": runner}))
        await bench.settle()
        assert bench.calls.unseen == 0
        gone = replace(view.runners["laptop"], draining=True)
        bench.service.engine.mesh_changed(replace(view, revision=3, runners={"laptop": gone}))
        await bench.settle()
        await bench.calls.next()


async def test_frequent_mesh_changes_are_coalesced() -> None:
    async with task_bench() as bench:
        await bench.submit()
        offers = 0
        for number in range(20):
            bench.service.engine.mesh_changed(a_view(models=frozenset({f"m{number}"})))
            await bench.advance(0.1)
            while bench.calls.unseen:
                await refuse(bench, NO_MODEL)
                offers += 1
        assert 2 <= offers <= 5


async def test_permanent_rejection_fails_the_task() -> None:
    reason = Reason.PERMISSION_DENIED
    async with task_bench() as bench:
        task = await bench.submit()
        await refuse(bench, WeftError(reason, "never"))
        failed = await bench.until(task.id, task_pb2.TASK_STATE_FAILED)
        assert (Reason(failed.error.reason), failed.error.message) == (reason, "never")


async def test_unservable_task_does_not_block_other_tasks_of_its_lane() -> None:
    async with task_bench(limits=TaskLimits(offers_per_lane=1)) as bench:
        hard = await bench.submit()
        await refuse(bench, NO_IMAGES)
        easy = await bench.submit()
        call = await bench.calls.next()
        assert call.task.id == easy.id
        await call.grant()
        await bench.advance(1)
        assert (await bench.calls.next()).task.id == hard.id


async def test_offers_per_lane_are_limited_and_the_next_follows_a_claim() -> None:
    async with task_bench(limits=TaskLimits(offers_per_lane=2)) as bench:
        tasks = [await bench.submit() for _ in range(5)]
        first, second = await bench.calls.next(), await bench.calls.next()
        await bench.settle()
        assert bench.calls.unseen == 0
        assert [first.task.id, second.task.id] == [task.id for task in tasks[:2]]
        await first.grant()
        assert (await bench.calls.next()).task.id == tasks[2].id


async def test_long_backlog_of_one_tenant_does_not_starve_another() -> None:
    async with task_bench(limits=TaskLimits(max_running=2)) as bench:
        for _ in range(6):
            await bench.submit()
        await bench.submit(tenant="bob")
        await bench.settle()
        offered = [call.task.lane.tenant for call in bench.calls.made]
        assert "bob" in offered


async def test_concurrent_attempts_are_limited_and_the_next_starts_when_one_ends() -> None:
    async with task_bench(limits=TaskLimits(max_running=1)) as bench:
        first = await bench.submit()
        one = await bench.calls.next()
        second = await bench.submit()
        two = await bench.calls.next()
        await one.grant()
        two.granted.set()
        async with asyncio.timeout(10):
            await two.left.wait()
        await bench.settle()
        assert not two.claimed.is_set()
        assert bench.calls.unseen == 0
        one.finish()
        await bench.until(first.id, task_pb2.TASK_STATE_COMPLETED)
        again = await bench.calls.next()
        assert again.task.id == second.id
        await again.grant()


async def test_lanes_waiting_for_slots_make_room_for_lanes_without_offers() -> None:
    async with task_bench(limits=TaskLimits(max_lanes=2, poll_interval_seconds=5.0)) as bench:
        for number in range(5):
            await bench.submit(chat_spec(f"m{number}"))
        await bench.advance(60)
        assert {call.task.lane.model for call in bench.calls.made} == {f"m{number}" for number in range(5)}
        waiting = [call for call in bench.calls.made if not call.left.is_set()]
        assert len({call.task.lane for call in waiting}) <= 2
        await waiting[-1].grant()


async def test_read_ahead_bytes_are_limited_and_every_lane_still_has_a_task() -> None:
    words = "x" * 10_000
    limits = TaskLimits(max_peeked_bytes=25_000, peeked_per_lane=32, offers_per_lane=4)
    async with task_bench(limits=limits) as bench:
        for model in ("a", "b"):
            for _ in range(6):
                await bench.service.tasks.submit(
                    TENANT, task_service_pb2.SubmitTaskRequest(spec=chat_spec(model, words))
                )
        await bench.settle()
        assert {call.task.lane.model for call in bench.calls.made} == {"a", "b"}
        assert len(bench.calls.made) <= 4
        for _ in range(12):
            call = await bench.calls.next()
            await call.grant()
        assert bench.calls.unseen == 0


async def test_task_claimed_by_another_router_frees_the_slot_and_rereads_the_lane() -> None:
    async with task_bench(limits=TaskLimits(offers_per_lane=1)) as bench:
        taken, free = await bench.submit(), await bench.submit()
        call = await bench.calls.next()
        now = bench.clock.utc_now().timestamp()
        assert await bench.store.claim(taken.id, "router-other", now, now + 15) is not None
        call.granted.set()
        async with asyncio.timeout(10):
            await call.left.wait()
        assert not call.claimed.is_set()
        assert (await bench.calls.next()).task.id == free.id
        assert bench.store.claims == [TaskLease(taken.id, "router-other", 1)]


async def test_tasks_without_an_event_are_found_by_polling() -> None:
    async with task_bench() as bench:
        async with task_bench(clock=bench.clock, store=bench.store) as other:
            # The other router stops before it has offered anything.
            await other.service.stop(0)
            task = await other.submit()
        await bench.advance(60)
        assert (await bench.calls.next()).task.id == task.id


async def test_database_outage_only_delays_tasks() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        call = await bench.calls.next()
        bench.store.database.is_failing = True
        call.granted.set()
        await bench.advance(10)
        assert not call.claimed.is_set()
        with refused(Reason.SERVICE_UNAVAILABLE):
            await bench.submit()
        bench.store.database.is_failing = False
        await bench.advance(10)
        again = await bench.calls.next()
        await again.grant()
        again.finish()
        assert (await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)).attempt == 1


async def test_idle_routers_poll_rarely() -> None:
    async with task_bench() as bench:
        await bench.submit()
        await bench.calls.next()
        await bench.settle()
        before = bench.store.lane_reads
        await bench.advance(60)
        assert bench.store.lane_reads - before <= 12 + 1

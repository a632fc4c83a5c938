"""Watching a task: what a watcher sees, in which order, and where it goes on."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kit.refusals import refused
from task_harness import TENANT, Watch, task_bench, text

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.tenant_watch import MERGE_SECONDS
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import event_number
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

DIED = WeftError(Reason.SERVER_DIED, "the server died")


def words_of(piece: object) -> list[str]:
    assert isinstance(piece, task_pb2.TaskPiece)
    return [event.delta.text for event in piece.output.events]


async def a_task(watch: Watch) -> task_pb2.Task:
    news = await watch.next()
    assert isinstance(news, task_pb2.Task)
    return news


async def test_watcher_receives_every_change_every_chunk_and_finally_the_end() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        watch = bench.watch(task.id)
        assert (await a_task(watch)).state == task_pb2.TASK_STATE_PENDING
        call = await bench.calls.next()
        await call.grant()
        assert (await a_task(watch)).state == task_pb2.TASK_STATE_RUNNING
        call.say(text("one"))
        assert words_of(await watch.next()) == ["one"], "the first content is written at once"
        call.say(text("two"))
        await bench.advance(0.05)
        assert words_of(await watch.next()) == ["two"]
        call.finish()
        piece, end = await watch.rest()
        assert words_of(piece) == [""]
        assert isinstance(end, task_pb2.Task)
        assert end.state == task_pb2.TASK_STATE_COMPLETED


async def test_watcher_of_an_ended_task_receives_all_of_it() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.say(text("one"))
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        first, piece, end = await bench.watch(task.id).rest()
        assert words_of(piece) == ["one", ""]
        assert first == end


async def test_watcher_resumes_after_a_given_event() -> None:
    async with task_bench(limits=TaskLimits(max_piece_bytes=1)) as bench:
        task, call = await bench.begun()
        call.say(text("one"), text("two"), text("three"))
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        news = await bench.watch(task.id, event_number(1, 2)).rest()
        assert [words_of(piece) for piece in news if isinstance(piece, task_pb2.TaskPiece)] == [["three"], [""]]
        nothing_new = await bench.watch(task.id, event_number(1, 4)).rest()
        assert [type(each) for each in nothing_new] == [task_pb2.Task, task_pb2.Task]


async def test_watcher_of_a_lost_attempt_gets_the_new_one_from_its_start() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        watch = bench.watch(task.id)
        await a_task(watch)
        call.say(text("half"))
        assert words_of(await watch.next()) == ["half"]
        call.fail(DIED)
        assert (await a_task(watch)).state == task_pb2.TASK_STATE_PENDING
        await bench.advance(1)
        again = await bench.calls.next()
        await again.grant()
        running = await a_task(watch)
        assert (running.state, running.attempt) == (task_pb2.TASK_STATE_RUNNING, 2)
        again.say(text("whole"))
        piece = await watch.next()
        assert words_of(piece) == ["whole"]
        assert isinstance(piece, task_pb2.TaskPiece)
        assert piece.last_event == event_number(2, 1)
        again.finish()
        await watch.rest()
        # Whoever comes back with an event of the lost attempt gets the new one from its beginning.
        news = await bench.watch(task.id, event_number(1, 1)).rest()
        assert [words_of(each) for each in news if isinstance(each, task_pb2.TaskPiece)] == [["whole"], [""]]


async def test_cancelled_task_ends_its_watch() -> None:
    async with task_bench() as bench:
        task, _ = await bench.begun()
        watch = bench.watch(task.id)
        await a_task(watch)
        rest = asyncio.create_task(watch.rest())
        await bench.settle()
        await bench.service.tasks.cancel(TENANT, task.id)
        (end,) = await rest
        assert isinstance(end, task_pb2.Task)
        assert end.state == task_pb2.TASK_STATE_CANCELLED


async def test_lost_events_are_found_by_polling() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        await bench.calls.next()
        watch = bench.watch(task.id)
        await a_task(watch)
        rest = asyncio.create_task(watch.rest())
        await bench.settle()
        await bench.store.cancel(TENANT, task.id, bench.clock.utc_now().timestamp())
        await bench.advance(1.9)
        assert not rest.done()
        await bench.advance(0.2)
        (end,) = await rest
        assert isinstance(end, task_pb2.Task)


async def test_watch_of_all_tasks_has_each_of_several_new_ones_beyond_its_page() -> None:
    async with task_bench() as bench, aclosing(bench.service.tasks.watch_all(TENANT, past_count=1)) as news:
        assert (await anext(news)).synced
        tasks = [await bench.submit() for _ in range(3)]
        found = asyncio.create_task(_ids(news, len(tasks)))
        await bench.advance(MERGE_SECONDS)
        assert found.done()
        assert sorted(await found) == sorted(task.id for task in tasks)


async def _ids(news: AsyncGenerator[task_service_pb2.WatchTasksResponse], count: int) -> list[str]:
    return [(await anext(news)).task.id for _ in range(count)]


async def test_watch_of_all_tasks_reports_those_that_a_sweep_purges() -> None:
    limits = TaskLimits(max_kept_per_tenant=1)
    async with task_bench(limits=limits) as bench, aclosing(bench.service.tasks.watch_all(TENANT)) as news:
        ended = []
        for _ in range(2):
            task, call = await bench.begun()
            call.finish()
            await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
            await bench.advance(1)
            ended.append(task.id)
        deleted = asyncio.create_task(_first_deleted(news))
        await bench.advance(310)
        await bench.advance(MERGE_SECONDS)
        assert deleted.done()
        assert await deleted == ended[0]


async def _first_deleted(news: AsyncGenerator[task_service_pb2.WatchTasksResponse]) -> str:
    return await anext(found.deleted_id async for found in news if found.deleted_id)


async def test_task_deleted_during_a_watch_ends_it_with_an_error() -> None:
    async with task_bench() as bench:
        task, _ = await bench.begun()
        watch = bench.watch(task.id)
        await a_task(watch)
        rest = asyncio.create_task(watch.rest())
        await bench.settle()
        await bench.store.database.change("DELETE FROM tasks")
        await bench.advance(2)
        with refused(Reason.NOT_FOUND):
            await rest


async def test_watchers_are_limited_and_a_leaving_one_makes_room() -> None:
    async with task_bench(limits=TaskLimits(max_watches=1)) as bench:
        task = await bench.submit()
        watch = bench.watch(task.id)
        await a_task(watch)
        with refused(Reason.TOO_MANY_RESOURCES):
            await bench.watch(task.id).next()
        await watch.close()
        other = bench.watch(task.id)
        await a_task(other)
        await other.close()


async def test_leaving_watcher_does_not_end_the_task() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        watch = bench.watch(task.id)
        await a_task(watch)
        await watch.close()
        assert not bench.service.events.is_watched(task.id)
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)


async def test_watch_reports_a_database_failure() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        watch = bench.watch(task.id)
        await a_task(watch)
        rest = asyncio.create_task(watch.rest())
        await bench.settle()
        bench.store.database.is_failing = True
        await bench.advance(2)
        with refused(Reason.SERVICE_UNAVAILABLE):
            await rest

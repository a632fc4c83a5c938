"""Batches that are kept, on every kind of database that a router may have."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from kit.messages import LineCounts, counts_of
from kit.refusals import refusal_of
from stored_batches import DAY_SECONDS, NEW_FILE, World, content, line, lines, many, output, running

from router_svc.durable.batches.batch_servicer import CHUNK_LINES, MAX_LANES_PUBLISHED
from router_svc.durable.batches.batch_sql import BatchStore
from router_svc.durable.tasks.sql_rows import STAGED
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import ItemEnded, Lane, LaneFilled, ManyChanged, TasksEnded
from router_svc.durable.uploads import UPLOAD_LIMIT_SECONDS
from weft.api.common.v1 import priority_pb2
from weft.api.router.v1 import batch_service_pb2, file_service_pb2, task_pb2
from weft.durable.batches import BATCH_OUTPUT
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import datetime_of, optional_datetime

pytest_plugins = ("database_fixtures",)

OUTPUT_FILE = file_service_pb2.File(tenant="ann", name="out.jsonl", purpose="batch_output")


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with running(database_url) as world:
        yield world


async def nothing_is_left(world: World) -> None:
    assert [await world.count(table) for table in ("batches", "tasks", "task_specs")] == [0, 0, 0]


async def test_batch_survives_a_restart_and_its_lines_queue_at_durable_priority(database_url: str) -> None:
    async with running(database_url) as world:
        new = world.new_batch(metadata={"for": "Ännchen"})
        made = await world.batches.create(new, lines(line("a"), line("b", model="phi"), line("c")), caller="key:abc")
        assert set(world.news) == {LaneFilled(Lane(model, "ann", Priority.DURABLE)) for model in ("qwen", "phi")}
    async with running(database_url) as world:
        assert await world.batches.get("ann", made.id) == made
        assert (made.state, counts_of(made)) == (batch_service_pb2.BATCH_STATE_IN_PROGRESS, LineCounts(total=3))
        assert (made.endpoint, made.input_file, dict(made.metadata)) == (new.endpoint, "file-1", {"for": "Ännchen"})
        columns = ("line", "custom_id", "model", "state", "band", "caller")
        assert sorted(await world.rows("tasks", *columns)) == [
            (0, "a", "qwen", task_pb2.TASK_STATE_PENDING, Priority.DURABLE, "key:abc"),
            (1, "b", "phi", task_pb2.TASK_STATE_PENDING, Priority.DURABLE, "key:abc"),
            (2, "c", "qwen", task_pb2.TASK_STATE_PENDING, Priority.DURABLE, "key:abc"),
        ]
        ends = datetime_of(new.window_end_time).timestamp()
        assert set(await world.rows("tasks", "expires_at", "window_ends_at", "tenant")) == {(ends, ends, "ann")}


async def test_batch_is_invisible_and_its_lines_do_not_start_until_all_lines_are_stored(world: World) -> None:
    states: list[Sequence[object]] = []

    async def slow() -> AsyncIterator[batch_service_pb2.BatchLine]:
        for number in range(2 * CHUNK_LINES + 1):
            yield line(f"line-{number}")
        states.append(await world.rows("tasks", "state"))
        assert list((await world.batches.list_page("ann")).batches) == []
        assert world.news == []

    made = await world.batches.create(world.new_batch(), slow())
    assert states == [[(STAGED,)] * 2 * CHUNK_LINES]
    assert await world.rows("tasks", "state") == [(task_pb2.TASK_STATE_PENDING,)] * (2 * CHUNK_LINES + 1)
    assert [batch.id for batch in (await world.batches.list_page("ann")).batches] == [made.id]


async def test_batch_with_errors_is_stored_as_failed_without_lines(world: World) -> None:
    errors = (
        batch_service_pb2.BatchLineError(code="invalid_json", message="x" * 2_000, line=3, field="body"),
        batch_service_pb2.BatchLineError(code="a", message=""),
    )
    made = await world.batches.create(world.new_batch(errors=errors), lines())
    found = await world.batches.get("ann", made.id)
    assert found == made
    assert (found.state, optional_datetime(found, "end_time"), counts_of(found)) == (
        batch_service_pb2.BATCH_STATE_FAILED,
        datetime_of(found.create_time),
        LineCounts(),
    )
    assert tuple(found.errors) == (
        batch_service_pb2.BatchLineError(code="invalid_json", message="x" * 1_000, line=3, field="body"),
        errors[1],
    )
    assert await world.batches.cancel("ann", made.id) == found
    await refusal_of(Reason.RESOURCE_IN_USE, world.batches.finish("ann", made.id, output_file="", error_file=""))
    await refusal_of(Reason.INVALID_ARGUMENT, world.batches.create(world.new_batch(errors=errors), many(1)))
    too_many = world.new_batch(errors=(batch_service_pb2.BatchLineError(code="a", message="b"),) * 101)
    await refusal_of(Reason.INVALID_ARGUMENT, world.batches.create(too_many, lines()))


async def test_invalid_line_is_reported_and_nothing_is_stored(world: World) -> None:
    wrong = line("b")
    wrong.spec.options.priority = priority_pb2.PRIORITY_HIGH
    empty = batch_service_pb2.BatchLine(custom_id="b", spec=line("b").spec.__class__(model="qwen"))
    for bad, field in (
        (line("a"), "lines[1].custom_id"),
        (line(""), "lines[1].custom_id"),
        (line("x" * 257), "lines[1].custom_id"),
        (line("a\0"), "lines[1].custom_id"),
        (line("b", model="no such/name"), "lines[1].spec.model"),
        (wrong, "lines[1].spec.options.priority"),
        (empty, "lines[1].spec.payload"),
    ):
        words = await refusal_of(
            Reason.INVALID_ARGUMENT, world.batches.create(world.new_batch(), lines(line("a"), bad))
        )
        assert words.startswith(f"{field}: ")
    assert "lines" in await refusal_of(Reason.INVALID_ARGUMENT, world.batches.create(world.new_batch(), lines()))
    await nothing_is_left(world)


async def test_invalid_batch_is_rejected(world: World) -> None:
    for field, value in (
        ("endpoint", ""),
        ("endpoint", "x" * 65),
        ("input_file", "a\0b"),
        ("metadata", {str(number): "" for number in range(17)}),
        ("metadata", {"": "a"}),
        ("metadata", {"x" * 65: "a"}),
        ("metadata", {"a": "x" * 513}),
        ("window_end_time", world.clock.utc_now()),
        ("window_end_time", world.clock.utc_now() + timedelta(days=8)),
    ):
        words = await refusal_of(
            Reason.INVALID_ARGUMENT, world.batches.create(world.new_batch(**{field: value}), many(1))
        )
        assert words.startswith("batch.")


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(hours=-1)])
async def test_clock_of_a_caller_neither_shortens_a_window_nor_refuses_it(world: World, ahead: timedelta) -> None:
    now, week = world.clock.utc_now(), timedelta(days=7)
    new = world.new_batch(create_time=now + ahead, window_end_time=now + ahead + week)
    made = await world.batches.create(new, many(1))
    assert (datetime_of(made.create_time), datetime_of(made.window_end_time)) == (now, now + week)


async def test_line_batch_and_open_task_limits_are_enforced(database_url: str) -> None:
    async with running(database_url, max_lines=3, max_batches_per_tenant=3, max_open_per_tenant=4) as world:
        words = await refusal_of(Reason.REQUEST_TOO_LARGE, world.batches.create(world.new_batch(), many(4)))
        assert words == "lines: must be at most 3"
        first = await world.batches.create(world.new_batch(), many(3))
        words = await refusal_of(Reason.TOO_MANY_RESOURCES, world.batches.create(world.new_batch(), many(2)))
        assert "4 tasks" in words
        await world.batches.create(world.new_batch(tenant="bob"), many(3))
        await world.claim(first.id, [0])
        await world.end(first.id, task_pb2.TASK_STATE_COMPLETED, [1])
        await refusal_of(Reason.TOO_MANY_RESOURCES, world.batches.create(world.new_batch(), many(3)))
        for _ in range(2):
            await world.batches.create(world.new_batch(), many(1))
        words = await refusal_of(Reason.TOO_MANY_RESOURCES, world.batches.create(world.new_batch(), many(1)))
        assert "3 batches" in words


async def test_line_counts_are_computed_until_the_batch_ends_and_then_stored(database_url: str) -> None:
    async with running(database_url, sweep_interval_seconds=2 * DAY_SECONDS) as world:
        made = await world.batches.create(world.new_batch(), many(6))
        await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [0, 1])
        await world.end(made.id, task_pb2.TASK_STATE_CANCELLED, [2])
        await world.claim(made.id, [3])
        found = await world.batches.get("ann", made.id)
        assert found.state == batch_service_pb2.BATCH_STATE_IN_PROGRESS
        assert counts_of(found) == LineCounts(total=6, completed=2, cancelled=1)
        slow = {"error_reason": Reason.DEADLINE_EXCEEDED.value, "error_message": "it ran too long"}
        await world.end(made.id, task_pb2.TASK_STATE_FAILED, [3], **slow)
        await world.end(made.id, task_pb2.TASK_STATE_FAILED, [4], error_reason=Reason.WORKER_LOST.value)
        await world.clock.advance(DAY_SECONDS)
        await world.end(
            made.id, task_pb2.TASK_STATE_FAILED, [5], attempt=0, error_reason=Reason.DEADLINE_EXCEEDED.value
        )
        ended_at = world.clock.utc_now()
        await world.clock.advance(10)
        for _ in range(2):
            [listed] = (await world.batches.list_page("ann")).batches
            found = await world.batches.get("ann", made.id)
            assert found == listed
            assert (found.state, optional_datetime(found, "lines_end_time")) == (
                batch_service_pb2.BATCH_STATE_FINALIZING,
                ended_at,
            )
            assert counts_of(found) == LineCounts(total=6, completed=2, failed=2, cancelled=1, expired=1)
            await world.database.change("DELETE FROM tasks")


async def test_sweep_counts_lines_of_batches_that_are_not_polled(world: World) -> None:
    made = await world.batches.create(world.new_batch(), many(2))
    await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [0, 1])
    await world.clock.advance(301, sleepers=1)
    ((state, stored),) = await world.rows("batches", "state", "batch")
    assert state == batch_service_pb2.BATCH_STATE_FINALIZING
    assert batch_service_pb2.Batch.FromString(stored).completed_count == 2


async def test_cancel_ends_every_unfinished_line_and_its_attempt(world: World) -> None:
    made = await world.batches.create(world.new_batch(), many(4))
    await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [0])
    await world.claim(made.id, [1])
    world.news.clear()
    now = world.clock.utc_now()
    found = await world.batches.cancel("ann", made.id)
    assert (found.state, optional_datetime(found, "cancel_time"), optional_datetime(found, "lines_end_time")) == (
        batch_service_pb2.BATCH_STATE_FINALIZING,
        now,
        now,
    )
    assert counts_of(found) == LineCounts(total=4, completed=1, cancelled=3)
    assert [each for each in world.news if not isinstance(each, TasksEnded)] == [ManyChanged(), ItemEnded(made.id)]
    assert await world.rows("task_attempts", "ended_at", "reason") == [(now.timestamp(), Reason.CANCELLED.value)]
    columns = ("state", "owner", "lease_until")
    assert sorted(await world.rows("tasks", *columns)) == [(3, "", None)] + [(5, "", None)] * 3
    await world.clock.advance(10)
    assert await world.batches.cancel("ann", made.id) == found


@pytest.mark.slow("a large batch")
async def test_cancel_of_a_large_batch_reaches_its_last_line(world: World) -> None:
    made = await world.batches.create(world.new_batch(), many(2_500))
    found = await world.batches.cancel("ann", made.id)
    assert counts_of(found) == LineCounts(total=2_500, cancelled=2_500)


async def test_interrupted_cancellation_is_completed_after_a_restart(database_url: str) -> None:
    async with running(database_url) as world:
        made = await world.batches.create(world.new_batch(), many(3))
        now = world.clock.utc_now().timestamp()
        assert await BatchStore(world.database).mark_cancelled(made.id, now)
    async with running(database_url) as world:
        assert counts_of(await world.batches.get("ann", made.id)) == LineCounts(total=3, cancelled=3)
        assert [each for each in world.news if not isinstance(each, TasksEnded)] == [ManyChanged(), ItemEnded(made.id)]


async def test_results_are_in_line_order_with_answers_and_requests(world: World) -> None:
    given = [line(f"line-{index}", origin=b"%d" % index) for index in range(200)]
    made = await world.batches.create(world.new_batch(), lines(*given))
    await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, range(150), attempt=2)
    await world.answer(made.id, 3, "lost", attempt=1)
    await world.answer(made.id, 3, "well", " done", attempt=2)
    await world.end(
        made.id, task_pb2.TASK_STATE_FAILED, [150], error_reason=Reason.WORKER_LOST.value, error_message="gone"
    )
    await world.answer(made.id, 150, "half")
    found = await world.results(made.id)
    assert [(result.custom_id, result.origin) for result in found] == [
        (each.custom_id, each.spec.origin) for each in given
    ]
    assert found[3].outputs == (output("well"), output(" done"))
    assert [result.outputs for result in found if result.outputs] == [found[3].outputs]
    failed = found[150].task
    assert (failed.state, failed.line, failed.batch) == (task_pb2.TASK_STATE_FAILED, 150, made.id)
    assert (Reason(failed.error.reason), failed.error.message) == (Reason.WORKER_LOST, "gone")
    assert found[199].task.state == task_pb2.TASK_STATE_PENDING


async def test_results_of_purged_lines_are_missing_and_the_counts_remain(world: World) -> None:
    made = await world.batches.create(world.new_batch(), many(3))
    await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, range(3))
    counted = await world.batches.get("ann", made.id)
    reading = world.batches.results("ann", made.id)
    await anext(reading)
    await world.database.change("DELETE FROM tasks WHERE line = 1")
    assert [result.custom_id for result in await world.results(made.id)] == ["line-0", "line-2"]
    assert await world.batches.get("ann", made.id) == counted
    await reading.aclose()


async def test_long_answers_are_read_a_few_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_svc.durable.batches.batch_servicer.MAX_READ_BYTES", 1_000)
    made = await world.batches.create(
        world.new_batch(), lines(*(line(str(index), origin=bytes(400 * index)) for index in range(6)))
    )
    await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, range(6))
    for index in range(6):
        await world.answer(made.id, index, "x" * 300)
    found = await world.results(made.id)
    assert [(len(result.origin), result.outputs) for result in found] == [
        (400 * index, (output("x" * 300),)) for index in range(6)
    ]


async def test_first_finish_wins_and_later_ones_return_it_unchanged(world: World) -> None:
    made = await world.batches.create(world.new_batch(), many(1))
    files = [(await world.files.save(OUTPUT_FILE, content(b"a"))).id for _ in range(2)]
    await refusal_of(Reason.RESOURCE_IN_USE, world.batches.finish("ann", made.id, output_file=files[0], error_file=""))
    await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [0])
    finished = await world.batches.finish("ann", made.id, output_file=files[0], error_file="")
    assert (finished.state, finished.output_file, finished.error_file) == (
        batch_service_pb2.BATCH_STATE_FINISHED,
        files[0],
        "",
    )
    assert optional_datetime(finished, "end_time") == world.clock.utc_now()
    assert await world.batches.finish("ann", made.id, output_file=files[1], error_file=files[1]) == finished
    assert await world.batches.get("ann", made.id) == finished
    assert await world.batches.cancel("ann", made.id) == finished


async def test_results_must_be_in_result_files_of_the_same_tenant(world: World) -> None:
    made = await world.batches.create(world.new_batch(), many(1))
    await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [0])
    bobs = await world.files.save(file_service_pb2.File(tenant="bob", name="b", purpose="batch_output"), content(b"b"))
    uploaded = await world.files.save(NEW_FILE, content(b"a"))
    for file_id in ("file-none", bobs.id, uploaded.id, "a\0"):
        words = await refusal_of(
            Reason.INVALID_ARGUMENT, world.batches.finish("ann", made.id, output_file="", error_file=file_id)
        )
        assert words.startswith("error_file: ")
    assert (await world.batches.get("ann", made.id)).state == batch_service_pb2.BATCH_STATE_FINALIZING


async def test_tenant_reads_and_changes_only_its_own_batches(world: World) -> None:
    made = await world.batches.create(world.new_batch(), many(1))
    missing = await refusal_of(Reason.NOT_FOUND, world.batches.get("ann", "batch-none"))
    for asked in (
        world.batches.get("bob", made.id),
        world.batches.cancel("bob", made.id),
        world.batches.finish("bob", made.id, output_file="", error_file=""),
        world.results(made.id, "bob"),
        world.batches.list_page("bob", after=made.id),
    ):
        assert (await refusal_of(Reason.NOT_FOUND, asked)).replace(made.id, "batch-none") == missing
    for batch_id in ("", "a\0b", "x" * 500):
        await refusal_of(Reason.INVALID_ARGUMENT, world.batches.get("ann", batch_id))
    assert list((await world.batches.list_page("bob")).batches) == []
    assert counts_of(await world.batches.get("ann", made.id)) == LineCounts(total=1)


async def test_batches_are_listed_newest_first_in_pages(world: World) -> None:
    made = [await world.batches.create(world.new_batch(), many(1)) for _ in range(3)]
    page = await world.batches.list_page("ann", limit=2)
    assert ([batch.id for batch in page.batches], page.has_more) == ([made[2].id, made[1].id], True)
    page = await world.batches.list_page("ann", after=made[1].id, limit=2)
    assert ([batch.id for batch in page.batches], page.has_more) == ([made[0].id], False)
    for limit in (-1, 101):
        await refusal_of(Reason.INVALID_ARGUMENT, world.batches.list_page("ann", limit=limit))


async def test_ended_batch_is_purged_after_its_retention_and_its_files_remain(database_url: str) -> None:
    async with running(database_url, keep_batch_seconds=1_000.0, sweep_interval_seconds=300.0) as world:
        finished, unwritten, open_one = [await world.batches.create(world.new_batch(), many(1)) for _ in range(3)]
        failed = await world.batches.create(
            world.new_batch(errors=[batch_service_pb2.BatchLineError(code="a", message="b")]), lines()
        )
        for batch in (finished, unwritten):
            await world.end(batch.id, task_pb2.TASK_STATE_COMPLETED, [0])
            await world.batches.get("ann", batch.id)
        kept = await world.files.save(OUTPUT_FILE, content(b"a"))
        await world.batches.finish("ann", finished.id, output_file=kept.id, error_file="")
        await world.clock.advance(999, sleepers=1)
        assert await world.count("batches") == 4
        await world.clock.advance(300, sleepers=1)
        for batch in (finished, unwritten, failed):
            await refusal_of(Reason.NOT_FOUND, world.batches.get("ann", batch.id))
        assert (await world.batches.get("ann", open_one.id)).state == batch_service_pb2.BATCH_STATE_IN_PROGRESS
        assert (await world.files.get("ann", kept.id)).id == kept.id


async def test_batch_with_a_slow_upload_is_abandoned(world: World) -> None:
    async def slow() -> AsyncIterator[batch_service_pb2.BatchLine]:
        for number in range(CHUNK_LINES + 1):
            yield line(f"line-{number}")
        await world.clock.advance(UPLOAD_LIMIT_SECONDS + 600, sleepers=1)

    await refusal_of(Reason.DEADLINE_EXCEEDED, world.batches.create(world.new_batch(), slow()))
    await nothing_is_left(world)


async def test_lines_of_too_many_models_publish_one_bulk_change_event(world: World) -> None:
    given = [line(str(number), model=f"model-{number}") for number in range(MAX_LANES_PUBLISHED + 1)]
    await world.batches.create(world.new_batch(), lines(*given))
    assert world.news == [ManyChanged()]


async def test_batch_is_rejected_if_another_one_fills_the_open_task_limit_during_upload(database_url: str) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[batch_service_pb2.BatchLine]:
        yield line("a")
        begun.set()
        await go_on.wait()
        yield line("b")

    async with running(database_url, max_open_per_tenant=3) as world:
        first = asyncio.create_task(world.batches.create(world.new_batch(), slow()))
        await begun.wait()
        await world.batches.create(world.new_batch(), many(2))
        go_on.set()
        words = await refusal_of(Reason.TOO_MANY_RESOURCES, first)
        assert "more than 3 tasks" in words
        assert await world.count("tasks") == 2
        assert await world.count("batches") == 1


RESULTS = file_service_pb2.File(tenant="ann", name="batch-1_output.jsonl", purpose=BATCH_OUTPUT)


async def test_results_of_early_lines_are_retained_until_the_result_file_is_written(database_url: str) -> None:
    async with running(database_url) as world:

        async def forgotten() -> int:
            await world.clock.advance(100)
            now = world.clock.utc_now().timestamp()
            return len(await SqlTaskStore(world.database).purge_ended(now, 10))

        made = await world.batches.create(world.new_batch(), many(2))
        await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [0])
        assert await forgotten() == 0
        await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [1])
        assert await forgotten() == 0
        finalizing = await world.batches.get("ann", made.id)
        assert (finalizing.state, finalizing.completed_count) == (batch_service_pb2.BATCH_STATE_FINALIZING, 2)
        assert await forgotten() == 0
        kept = await world.files.save(RESULTS, content(b"a"))
        await world.batches.finish("ann", made.id, output_file=kept.id, error_file="")
        assert await forgotten() == 2


async def test_result_file_is_as_long_as_the_answers(database_url: str) -> None:
    async with running(database_url, max_file_bytes=10, max_tenant_file_bytes=30) as world:
        assert (await world.files.save(RESULTS, content(bytes(20)))).byte_count == 20
        await refusal_of(Reason.TOO_MANY_RESOURCES, world.files.save(RESULTS, content(bytes(20))))

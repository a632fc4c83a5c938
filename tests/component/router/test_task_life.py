"""A task's life: every way from one state to the next."""

import asyncio

import pytest
from kit.refusals import refused
from structlog.testing import capture_logs
from task_harness import TENANT, chat_spec, task_bench, text

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoint
from router_svc.durable.tasks.task_records import Lane, LaneFilled
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import event_number
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_testing.fake_clock import FakeClock

DIED = WeftError(Reason.SERVER_DIED, "the server died")


async def test_task_is_claimed_only_when_the_scheduler_has_a_slot() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        call = await bench.calls.next()
        await bench.settle()
        waiting = await bench.get(task.id)
        assert (waiting.state, waiting.attempt, waiting.waiting_for) == (
            task_pb2.TASK_STATE_PENDING,
            0,
            "every slot is taken",
        )
        assert not bench.store.claims
        await call.grant()
        running = await bench.get(task.id)
        assert (running.state, running.attempt, running.waiting_for) == (task_pb2.TASK_STATE_RUNNING, 1, "")
        assert running.owner == bench.store.claims[0].owner


async def test_finished_answer_is_stored_completely_with_its_receipt() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.say(event_pb2.InferenceEvent(started=event_pb2.Started(runner="a")), text("one "))
        call.say(event_pb2.InferenceEvent(progress=event_pb2.Progress(prompt_tokens=3)), text("two"))
        call.finish()
        done = await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        details = await bench.service.tasks.details(TENANT, task.id)
        assert not done.HasField("error")
        assert done.owner == ""
        assert done.last_event == event_number(1, 4), "progress is not kept"
        receipt = details.attempts[0].receipt
        assert details.attempts[0].HasField("receipt")
        assert receipt.host == "titan"
        kinds = [
            event.WhichOneof("event")
            for chunk in await bench.store.chunks(task.id, 1, 0, 1 << 20)
            for event in chunk.output.events
        ]
        assert kinds == ["started", "delta", "delta", "finished"]


async def test_lost_attempt_discards_its_chunks_and_the_task_retries_after_a_backoff() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.say(text("half"))
        await bench.advance(1)
        assert bench.store.pieces(task.id)
        call.fail(DIED)
        reverted = await bench.until(task.id, task_pb2.TASK_STATE_PENDING)
        assert (reverted.attempt, reverted.last_event) == (1, 0)
        assert not bench.store.pieces(task.id)
        await bench.settle()
        assert bench.calls.unseen == 0, "the pause is not over"
        await bench.advance(1)
        again = await bench.calls.next()
        await again.grant()
        again.finish()
        done = await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert done.attempt == 2
        assert await bench.attempts(task.id) == ["SERVER_DIED", "UNSPECIFIED"]


async def test_attempts_are_limited_and_the_failure_has_the_last_reason() -> None:
    async with task_bench(limits=TaskLimits(max_attempts=2)) as bench:
        task, call = await bench.begun()
        call.say(text("half"))
        call.fail(WeftError(Reason.WORKER_LOST, "the runner went away"))
        await bench.until(task.id, task_pb2.TASK_STATE_PENDING)
        await bench.advance(1)
        call = await bench.calls.next()
        await call.grant()
        call.say(text("half"))
        call.fail(DIED)
        failed = await bench.until(task.id, task_pb2.TASK_STATE_FAILED)
        assert Reason(failed.error.reason) is Reason.SERVER_DIED
        assert failed.error.message == "after 2 attempts: the server died"


async def test_connection_to_a_dead_runner_does_not_count_as_an_attempt() -> None:
    """Found by killing runners: until the registry had missed heartbeats, a task used up all it had on connections."""
    async with task_bench(limits=TaskLimits(max_attempts=1)) as bench:
        task, call = await bench.begun()
        for pause in (1.0, 2.0, 4.0):
            call.fail(WeftError(Reason.WORKER_LOST, "no connection"))
            await bench.until(task.id, task_pb2.TASK_STATE_PENDING)
            assert bench.store.row(task.id).ready_at == bench.clock.utc_now().timestamp() + pause
            await bench.advance(pause)
            call = await bench.calls.next()
            await call.grant()
        call.say(text("Hello"))
        call.finish()
        done = await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert done.attempt == 4


async def test_permanent_error_fails_at_the_first_attempt() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.fail(WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, "too long"))
        failed = await bench.until(task.id, task_pb2.TASK_STATE_FAILED)
        assert (Reason(failed.error.reason), failed.error.message) == (Reason.CONTEXT_LENGTH_EXCEEDED, "too long")
        await bench.advance(60)
        assert len(bench.calls.made) == 1


@pytest.mark.parametrize(
    # gRPC tells whoever reads a call whose channel is closed that it is cancelled, as if by itself.
    ("error", "reason"),
    [(ValueError("whatever goes wrong"), "INTERNAL"), (asyncio.CancelledError(), "WORKER_LOST")],
)
async def test_stream_that_breaks_for_an_unknown_reason_is_retried(error: BaseException, reason: str) -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.say(text("half"))
        await bench.settle()
        call.fail(error)
        await bench.until(task.id, task_pb2.TASK_STATE_PENDING)
        assert await bench.attempts(task.id) == [reason]


async def test_attempt_that_times_out_is_ended_and_counts() -> None:
    async with task_bench(limits=TaskLimits(run_timeout_seconds=20.0, max_attempts=1)) as bench:
        task, call = await bench.begun()
        await bench.advance(19)
        assert not call.left.is_set()
        await bench.advance(2)
        assert call.left.is_set()
        failed = await bench.until(task.id, task_pb2.TASK_STATE_FAILED)
        assert Reason(failed.error.reason) is Reason.DEADLINE_EXCEEDED


async def test_oversized_answer_fails_the_task_and_ends_the_runner_work() -> None:
    async with task_bench(limits=TaskLimits(max_result_bytes=1000)) as bench:
        task, call = await bench.begun()
        call.say(text("a" * 600))
        call.say(text("b" * 600))
        failed = await bench.until(task.id, task_pb2.TASK_STATE_FAILED)
        assert Reason(failed.error.reason) is Reason.REQUEST_TOO_LARGE
        assert "more than 1000 bytes" in failed.error.message
        assert call.left.is_set()


async def test_cancelling_a_waiting_task_withdraws_its_offer() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        call = await bench.calls.next()
        cancelled = await bench.service.tasks.cancel(TENANT, task.id)
        assert cancelled.state == task_pb2.TASK_STATE_CANCELLED
        async with asyncio.timeout(10):
            await call.left.wait()
        call.granted.set()
        await bench.advance(30)
        assert not bench.store.claims
        assert len(bench.calls.made) == 1


async def test_cancelling_a_running_task_ends_the_runner_work_and_stores_its_end_once() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.finish()
        cancelled = await bench.service.tasks.cancel(TENANT, task.id)
        assert cancelled.state == task_pb2.TASK_STATE_CANCELLED
        async with asyncio.timeout(10):
            await call.left.wait()
        await bench.settle()
        assert (await bench.get(task.id)).state == task_pb2.TASK_STATE_CANCELLED
        assert [counted for _, _, counted in bench.store.ended] == [True]


async def test_end_of_a_cancelled_task_is_logged_once() -> None:
    """The cancelling call also logged the end that the run had stored."""
    with capture_logs() as lines:
        async with task_bench() as bench:
            task, _ = await bench.begun()
            await bench.service.tasks.cancel(TENANT, task.id)
            await bench.settle()
    ends = [line["event"] for line in lines if line["event"] in ("task ended", "task cancelled")]
    assert ends == ["task ended"]


async def test_cancelling_between_claim_and_call_reaches_no_runner() -> None:
    async with task_bench() as bench:
        bench.failpoints.held[Failpoint.CLAIMED] = held = asyncio.Event()
        task = await bench.submit()
        call = await bench.calls.next()
        call.granted.set()
        await bench.until(task.id, task_pb2.TASK_STATE_RUNNING)
        await bench.service.tasks.cancel(TENANT, task.id)
        held.set()
        async with asyncio.timeout(10):
            await call.left.wait()
        assert not call.claimed.is_set(), "the runner was never called"
        assert (await bench.get(task.id)).state == task_pb2.TASK_STATE_CANCELLED


async def test_cancelling_an_ended_task_changes_nothing() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.finish()
        done = await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert await bench.service.tasks.cancel(TENANT, task.id) == done


async def test_task_over_its_pending_limit_fails_at_the_next_sweep() -> None:
    spec = chat_spec()
    spec.pending_limit.seconds = 100
    async with task_bench() as bench:
        task = await bench.submit(spec)
        await bench.advance(290)
        assert (await bench.get(task.id)).state == task_pb2.TASK_STATE_PENDING
        await bench.advance(20)
        failed = await bench.get(task.id)
        assert (failed.state, Reason(failed.error.reason)) == (task_pb2.TASK_STATE_FAILED, Reason.QUEUE_TIMEOUT)


async def test_expired_task_tells_why_its_offers_were_refused() -> None:
    spec = chat_spec()
    spec.pending_limit.seconds = 100
    async with task_bench() as bench:
        task = await bench.submit(spec)
        (await bench.calls.next()).refuse(WeftError(Reason.WAKE_FAILED, "qwen could not be woken: there is no file"))
        await bench.advance(310)
        failed = await bench.get(task.id)
        assert failed.error.message.endswith("and was not begun: qwen could not be woken: there is no file")


async def test_tasks_are_purged_a_week_after_their_end() -> None:
    limits = TaskLimits(keep_seconds=1000.0)
    async with task_bench(limits=limits) as bench:
        task, call = await bench.begun()
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        await bench.advance(900)
        await bench.get(task.id)
        await bench.advance(600)
        with refused(Reason.NOT_FOUND):
            await bench.get(task.id)
    assert TaskLimits().keep_seconds == 7 * 86_400


async def test_oldest_finished_tasks_over_the_limit_are_purged_by_the_next_sweep_and_counted() -> None:
    async with task_bench(limits=TaskLimits(max_kept_per_tenant=1)) as bench:
        done = []
        for _ in range(3):
            task, call = await bench.begun()
            call.finish()
            await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
            await bench.advance(1)
            done.append(task.id)
        await bench.advance(310)
        assert (await bench.get(done[-1])).state == task_pb2.TASK_STATE_COMPLETED
        for gone in done[:-1]:
            with refused(Reason.NOT_FOUND):
                await bench.get(gone)
        assert bench.service.released == {"count": 2, "tenant_bytes": 0, "bytes": 0}


async def test_graceful_stop_lets_an_attempt_finish_within_the_grace() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        waiting = await bench.submit()
        offered = await bench.calls.next()
        stopping = asyncio.create_task(bench.service.stop(10.0))
        async with asyncio.timeout(10):
            await offered.left.wait()
        assert not call.left.is_set()
        call.finish()
        await stopping
        assert bench.store.row(task.id).state == task_pb2.TASK_STATE_COMPLETED
        assert bench.store.row(waiting.id).state == task_pb2.TASK_STATE_PENDING


async def test_attempt_interrupted_by_a_stop_does_not_count_and_resumes_after_a_restart() -> None:
    clock = FakeClock()
    async with task_bench(clock=clock, limits=TaskLimits(max_attempts=1)) as bench:
        task, call = await bench.begun()
        await bench.service.stop(0.0)
        assert call.left.is_set()
        kept = bench.store.row(task.id)
        assert (kept.state, kept.failures) == (task_pb2.TASK_STATE_PENDING, 0)
    async with task_bench(clock=clock, store=bench.store) as bench:
        call = await bench.calls.next()
        await call.grant()
        call.finish()
        done = await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert done.attempt == 2
        first, second = bench.store.claims
        assert first.owner != second.owner


async def test_claim_in_progress_at_a_stop_is_released() -> None:
    async with task_bench() as bench:
        bench.store.claims_answer_late = late = asyncio.Event()
        task = await bench.submit()
        call = await bench.calls.next()
        call.granted.set()
        await bench.settle()
        stopping = asyncio.create_task(bench.service.stop(0.0))
        await bench.settle()
        assert bench.store.row(task.id).state == task_pb2.TASK_STATE_RUNNING
        late.set()
        await stopping
        assert bench.store.row(task.id).state == task_pb2.TASK_STATE_PENDING
        assert not call.claimed.is_set()


async def test_long_answers_are_written_in_ordered_chunks() -> None:
    async with task_bench(limits=TaskLimits(max_piece_bytes=100)) as bench:
        task, call = await bench.begun()
        call.say(*[text("x" * 40) for _ in range(5)])
        call.say(text("y" * 300))
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        chunks = bench.store.pieces(task.id)
        assert [chunk.first_index for chunk in chunks] == [1, 3, 5, 6, 7]
        assert all(len(chunk.output) <= 100 or chunk.event_count == 1 for chunk in chunks)


async def test_buffered_output_is_flushed_while_the_runner_pauses() -> None:
    async with task_bench(limits=TaskLimits(piece_interval_seconds=0.25)) as bench:
        task, call = await bench.begun()
        call.say(text("one"))
        await bench.settle()
        assert not bench.store.pieces(task.id)
        await bench.advance(0.25)
        assert [chunk.event_count for chunk in bench.store.pieces(task.id)] == [1]


async def test_only_unwatched_batch_items_are_requested_unary() -> None:
    """Output was held back from a watcher that came when the task ran already."""
    async with task_bench() as bench:
        _, alone = await bench.begun()
        lines = []
        for number in (1, 2):
            await bench.submit_line(f"task-{number}")
            lines.append(await bench.calls.next())
        unwatched, watched = lines
        watch = bench.watch(watched.task.id)
        await watch.next()
        await unwatched.grant()
        await watched.grant()
        assert (alone.is_unary, unwatched.is_unary, watched.is_unary) == (False, True, False)
        await watch.close()


async def test_every_task_step_is_one_log_line() -> None:
    with capture_logs() as lines:
        async with task_bench() as bench:
            task, call = await bench.begun()
            call.fail(DIED)
            await bench.until(task.id, task_pb2.TASK_STATE_PENDING)
            await bench.advance(1)
            again = await bench.calls.next()
            await again.grant()
            again.finish()
            await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
            other = await bench.submit()
            await bench.service.tasks.cancel(TENANT, other.id)
    owner = bench.store.claims[0].owner
    told = [(line["event"], line.get("attempt"), line.get("state") or line.get("reason")) for line in lines]
    assert told == [
        ("task accepted", None, None),
        ("task claimed", 1, None),
        ("task started", 1, None),
        ("task reverted", 1, "SERVER_DIED"),
        ("task claimed", 2, None),
        ("task started", 2, None),
        ("task ended", 2, "COMPLETED"),
        ("task accepted", None, None),
        ("task cancelled", 0, None),
    ]
    assert {line["task"] for line in lines[:7]} == {task.id}
    assert {line["owner"] for line in lines if "owner" in line} == {owner, None}


async def test_failpoints_are_reached_at_submit_claim_and_end() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert [point for point, _ in bench.failpoints.reached] == [
            Failpoint.SUBMITTED,
            Failpoint.CLAIMED,
            Failpoint.ENDED,
        ]


async def test_chunk_is_published_only_once_it_is_on_disk() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        watch = bench.watch(task.id)
        await watch.next()
        bench.store.database.is_failing = True
        call.say(text("one"))
        await bench.settle()
        bench.store.database.is_failing = False
        assert not bench.store.pieces(task.id)
        await bench.advance(0.2)
        chunk = await watch.next()
        assert isinstance(chunk, task_pb2.TaskPiece)
        assert [event.delta.text for event in chunk.output.events] == ["one"]
        await watch.close()


async def test_event_for_an_empty_lane_is_harmless() -> None:
    async with task_bench() as bench:
        task = await bench.submit()
        await bench.calls.next()
        bench.service.events.publish(LaneFilled(Lane("other", TENANT, Priority.DURABLE)))
        await bench.settle()
        assert bench.calls.unseen == 0
        assert (await bench.get(task.id)).state == task_pb2.TASK_STATE_PENDING
        await bench.service.tasks.submit(TENANT, task_service_pb2.SubmitTaskRequest(spec=chat_spec("other")))
        assert (await bench.calls.next()).task.lane.model == "other"

"""The suite of whoever keeps tasks: claims, what is written under them, and what comes to nothing."""

from dataclasses import replace

from kit.refusals import refusal_of
from stored_tasks import (
    CRASH,
    DONE,
    LANE,
    LEASE,
    NOW,
    a_chunk,
    a_task,
    all_of,
    begun,
    claimed,
    count,
    details_of,
    failed,
    reverted,
    said,
    seen,
    waiting,
)

from router_svc.durable.tasks.sql_rows import MAX_ERROR_CHARS
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, TaskLease, TaskOutcome
from router_svc.policy.task_release import KeptTasks, Release, ReleaseBound
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import event_number
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import datetime_of, optional_datetime

pytest_plugins = ("database_fixtures", "task_store_fixtures")

RECEIPT = receipt_pb2.Receipt(request_id="task-1")


# -- claims


async def test_task_is_claimed_once_and_its_attempt_is_recorded(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1"))
    found = await all_of(*(kept.claim("task-1", f"r{n}", NOW, NOW + LEASE) for n in range(8)))
    (claim,) = [each for each in found if each]
    assert claim == TaskLease("task-1", claim.owner, 1)
    task = await seen(kept, "task-1")
    assert (task.state, task.owner, task.attempt, optional_datetime(task, "expire_time")) == (
        task_pb2.TASK_STATE_RUNNING,
        claim.owner,
        1,
        None,
    )
    assert task.HasField("start_time")
    assert datetime_of(task.start_time).timestamp() == NOW
    details = await details_of(kept, "task-1")
    assert [(each.attempt, each.owner, optional_datetime(each, "end_time")) for each in details.attempts] == [
        (1, claim.owner, None)
    ]


async def test_claim_time_is_never_before_the_end_of_the_previous_attempt(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    await reverted(kept, claim, now=NOW + 5, ready_at=NOW)
    await claimed(kept, "task-1", "r2", NOW + 1)
    details = await details_of(kept, "task-1")
    assert details.attempts[1].claim_time == details.attempts[0].end_time


async def test_expired_claims_of_an_owner_can_be_excluded_from_revert(kept: SqlTaskStore) -> None:
    mine, others = await begun(kept, "task-1"), await begun(kept, "task-2", "r2")
    assert [each.claim for each in await kept.revert_expired(NOW + LEASE, 10, except_of="r1")] == [others]
    assert await kept.renew("r1", NOW + 2 * LEASE) == {mine}
    assert [each.claim for each in await kept.revert_expired(NOW + 2 * LEASE, 10)] == [mine]


async def test_answer_grows_and_is_readable_from_any_event(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    assert await kept.append(claim, [a_chunk(1, "a", "b"), a_chunk(3, "c")])
    assert await kept.append(claim, [a_chunk(4, "d", "e", "f")])
    assert (await seen(kept, "task-1")).last_event == event_number(1, 6)
    words = ["a", "b", "c", "d", "e", "f"]
    for after in range(8):
        assert await said(kept, "task-1", 1, after) == words[after:]
    assert [len(await kept.chunks("task-1", 1, after, 1)) for after in (0, 1, 2, 3, 5, 6)] == [1, 1, 1, 1, 1, 0]
    (first, second, third) = await kept.chunks("task-1", 1, 0, 1 << 30)
    assert [each.last_event for each in (first, second, third)] == [event_number(1, n) for n in (2, 3, 6)]
    assert await kept.chunks("task-1", 2, 0, 1 << 30) == ()


async def test_end_stores_the_rest_of_the_answer_and_closes_the_attempt(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    await kept.append(claim, [a_chunk(1, "a")])
    rest = TaskOutcome(
        state=task_pb2.TASK_STATE_COMPLETED, chunks=[a_chunk(2, "b")], receipt=RECEIPT.SerializeToString()
    )
    assert await kept.end(claim, rest, NOW + 1)
    details = await details_of(kept, "task-1")
    task, (attempt,) = details.task, details.attempts
    assert (task.state, task.owner, task.HasField("error")) == (task_pb2.TASK_STATE_COMPLETED, "", False)
    assert task.HasField("end_time")
    assert datetime_of(task.end_time).timestamp() == NOW + 1
    assert (attempt.end_time, Reason(attempt.reason), attempt.receipt) == (task.end_time, Reason.UNSPECIFIED, RECEIPT)
    assert await said(kept, "task-1", 1) == ["a", "b"]


async def test_failure_has_a_reason_and_a_truncated_message(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    assert await kept.end(claim, failed("no\x00\ud800" + "x" * 2 * MAX_ERROR_CHARS), NOW)
    task = await seen(kept, "task-1")
    assert task.state == task_pb2.TASK_STATE_FAILED
    assert Reason(task.error.reason) is Reason.INVALID_ARGUMENT
    assert task.error.message.startswith("no?x")
    assert len(task.error.message) <= MAX_ERROR_CHARS


async def test_writes_of_a_stale_claim_are_discarded(kept: SqlTaskStore) -> None:
    late = await begun(kept, "task-1")
    await kept.append(late, [a_chunk(1, "late")])
    assert [each.claim for each in await kept.revert_expired(NOW + LEASE, 10)] == [late]
    current = await claimed(kept, "task-1", "r1", NOW + LEASE)
    await kept.append(current, [a_chunk(1, "good")])
    for stale in (late, current._replace(owner="r2"), current._replace(attempt=3)):
        assert not await kept.append(stale, [a_chunk(1, "bad")])
        assert not await kept.append(stale, [])
        assert not await kept.end(
            stale, TaskOutcome(state=task_pb2.TASK_STATE_COMPLETED, chunks=[a_chunk(2, "bad")]), NOW
        )
        assert not await kept.end(stale, failed(), NOW)
        assert not await reverted(kept, stale)
    assert await said(kept, "task-1", 2) == ["good"]
    assert await said(kept, "task-1", 1) == []
    assert await kept.end(current, DONE, NOW)
    assert not await kept.end(current, failed(), NOW)
    assert not await kept.append(current, [a_chunk(2, "bad")])
    assert not await reverted(kept, current)
    assert (await seen(kept, "task-1")).state == task_pb2.TASK_STATE_COMPLETED


async def test_unacknowledged_writes_can_be_repeated(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    claim = await begun(kept, "task-1")
    for chunks in ([a_chunk(1, "a", "b")], [a_chunk(1, "a", "b")], [a_chunk(1, "a", "b", "c")], [a_chunk(4, "d")]):
        assert await kept.append(claim, chunks)
    assert await said(kept, "task-1", 1) == ["a", "b", "c", "d"]
    size = await beside.value("SELECT result_size FROM tasks")
    assert size == len(a_chunk(1, "a", "b", "c").output) + len(a_chunk(4, "d").output)
    outcome = TaskOutcome(state=task_pb2.TASK_STATE_COMPLETED, chunks=[a_chunk(5, "e")])
    for _ in range(2):
        assert await kept.end(claim, outcome, NOW)
    assert await said(kept, "task-1", 1) == ["a", "b", "c", "d", "e"]
    assert not await kept.end(claim._replace(owner="r2"), outcome, NOW)


async def test_answer_with_a_gap_is_rejected(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    await kept.append(claim, [a_chunk(1, "a", "b")])
    for first in (4, 2):
        await refusal_of(Reason.INTERNAL, kept.append(claim, [a_chunk(first, "x")]))
    assert await said(kept, "task-1", 1) == ["a", "b"]


# -- attempts that come to nothing


async def test_lost_attempt_discards_its_answer_and_requeues_the_task(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    await kept.append(claim, [a_chunk(1, "a")])
    assert await reverted(kept, claim, now=NOW + 50, ready_at=NOW + 60, receipt=RECEIPT.SerializeToString())
    task = await seen(kept, "task-1")
    assert (task.state, task.owner, task.attempt, task.last_event) == (task_pb2.TASK_STATE_PENDING, "", 1, 0)
    assert task.HasField("expire_time")
    assert datetime_of(task.expire_time).timestamp() == NOW + 50 + 3600
    assert await said(kept, "task-1", 1) == []
    details = await details_of(kept, "task-1")
    assert [(each.reason, each.message, each.receipt) for each in details.attempts] == [
        (CRASH.reason, CRASH.message, RECEIPT)
    ]
    assert [(each.attempt, each.failures) for each in await waiting(kept, now=NOW + 60)] == [(1, 1)]
    assert await reverted(kept, await claimed(kept, "task-1", now=NOW + 60), counts=False)
    assert [(each.attempt, each.failures) for each in await waiting(kept, now=NOW + 60)] == [(2, 1)]


async def test_window_end_does_not_move_when_the_task_is_requeued(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1", window_ends_at=NOW + 100)
    await reverted(kept, claim, now=NOW + 99)
    assert await kept.fail_expired(NOW + 99, 10, {}) == []
    assert await kept.fail_expired(NOW + 100, 10, {}) == ["task-1"]
    task = await seen(kept, "task-1")
    error = task.error
    assert (Reason(error.reason), error.message) == (
        Reason.DEADLINE_EXCEEDED,
        f"its window ended before it was begun again: its last attempt failed: {CRASH.message}",
    )


async def test_bug_expired_task_of_a_model_that_could_not_be_woken_had_found_no_slot(kept: SqlTaskStore) -> None:
    await begun(kept, "task-1")
    await kept.submit(a_task("task-2"))
    why = "qwen could not be woken: models[0].file: there is no file /m/qwen.gguf"
    assert await kept.fail_expired(NOW + 3600, 9, {LANE: why, LANE._replace(model="other"): "no"}) == ["task-2"]
    assert (await seen(kept, "task-2")).error.message == f"it waited 3600 s and was not begun: {why}"


async def test_lease_without_a_heartbeat_is_lost_and_the_last_attempt_fails_the_task(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1", max_attempts=2))
    for attempt, state in ((1, task_pb2.TASK_STATE_PENDING), (2, task_pb2.TASK_STATE_FAILED)):
        now = NOW + attempt * 100
        claim = await claimed(kept, "task-1", now=now)
        await kept.append(claim, [a_chunk(1, "a")])
        assert await kept.revert_expired(now + LEASE - 1, 10) == ()
        (lost,) = await kept.revert_expired(now + LEASE, 10)
        assert (lost.claim, lost.lane, lost.state) == (claim, LANE, state)
        assert await said(kept, "task-1", attempt) == []
        assert await kept.revert_expired(now + LEASE, 10) == ()
    task = await seen(kept, "task-1")
    assert (task.owner, task.last_event) == ("", 0)
    assert Reason(task.error.reason) is Reason.WORKER_LOST
    assert "after 2 attempts" in task.error.message
    details = await details_of(kept, "task-1")
    assert [Reason(each.reason) for each in details.attempts] == [Reason.WORKER_LOST] * 2


async def test_sweeps_process_the_oldest_first_up_to_their_limit(kept: SqlTaskStore) -> None:
    for number in range(3):
        await kept.submit(a_task(f"task-{number}", created_at=NOW - number))
    assert await kept.fail_expired(NOW + 3598, 2, {}) == ["task-2"]
    assert await kept.fail_expired(NOW + 3600, 1, {}) == ["task-1"]
    task = await seen(kept, "task-1")
    error = task.error
    assert Reason(error.reason) is Reason.QUEUE_TIMEOUT
    assert "3600 s" in error.message
    assert (await seen(kept, "task-0")).state == task_pb2.TASK_STATE_PENDING


async def test_tasks_past_retention_are_purged_with_all_related_rows(
    kept: SqlTaskStore, beside: RouterDatabase
) -> None:
    for number in range(4):
        claim = await begun(kept, f"task-{number}")
        outcome = TaskOutcome(state=task_pb2.TASK_STATE_COMPLETED, chunks=[a_chunk(1, "a")])
        await kept.end(claim, outcome, NOW + number)
    assert len(await kept.purge_ended(NOW + 3, 2)) == 2
    assert await kept.get("ann", "task-1") is None
    assert len(await kept.purge_ended(NOW + 3, 2)) == 1
    assert len(await kept.purge_ended(NOW + 3, 2)) == 0
    for table in ("tasks", "task_specs", "task_attempts", "task_pieces"):
        assert await count(beside, table) == 1


async def ended_row(kept: SqlTaskStore, name: str, now: float, tenant: str = "ann", words: str = "a") -> None:
    await kept.submit(a_task(name, lane=Lane("demo", tenant, Priority.DURABLE), prompt="x" * 10))
    claim = await claimed(kept, name, now=now)
    outcome = TaskOutcome(state=task_pb2.TASK_STATE_COMPLETED, chunks=[a_chunk(1, words)])
    assert await kept.end(claim, outcome, now)


async def test_finished_tasks_are_counted_with_request_and_answer_sizes(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("open"))
    await ended_row(kept, "task-1", NOW)
    await ended_row(kept, "task-2", NOW, words="ab" * 50)
    await ended_row(kept, "task-3", NOW, tenant="bob")
    counts = await kept.kept_counts()
    one = len(a_task("task-1", prompt="x" * 10).spec) + len(a_chunk(1, "a").output)
    two = len(a_task("task-2", prompt="x" * 10).spec) + len(a_chunk(1, "ab" * 50).output)
    assert counts == {"ann": KeptTasks(count=2, size=one + two), "bob": KeptTasks(count=1, size=one)}


async def test_oldest_finished_tasks_are_released_and_running_ones_never(
    kept: SqlTaskStore, beside: RouterDatabase
) -> None:
    await kept.submit(a_task("waits"))
    await begun(kept, "runs")
    for number, tenant in enumerate(["ann", "bob", "ann", "ann"]):
        await ended_row(kept, f"task-{number}", NOW + number, tenant)
    of_ann = Release(bound=ReleaseBound.COUNT, tenant="ann", count=2)
    assert len(await kept.release_oldest(of_ann, 1)) == 1
    assert len(await kept.release_oldest(replace(of_ann, count=1), 10)) == 1
    assert [name for name in ("task-0", "task-2", "task-3") if await kept.get("ann", name)] == ["task-3"]
    all_bytes = Release(bound=ReleaseBound.BYTES, tenant="", size=1)
    assert len(await kept.release_oldest(all_bytes, 10)) == 1
    assert await kept.get("bob", "task-1") is None
    assert len(await kept.release_oldest(replace(all_bytes, size=1 << 40), 10)) == 1
    assert len(await kept.release_oldest(replace(all_bytes, size=1 << 40), 10)) == 0
    assert [name for name in ("waits", "runs") if await kept.get("ann", name)] == ["waits", "runs"]
    assert await count(beside, "task_specs") == 2
    assert await count(beside, "task_pieces") == 0


async def test_key_lookup_finds_its_task_and_stores_nothing(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("t1", idempotency_key="k"))
    found = await kept.submitted(a_task("t2", idempotency_key="k"))
    assert found is not None
    assert (found.task.id, found.existed) == ("t1", True)
    assert await kept.submitted(a_task("t2", idempotency_key="other")) is None
    assert await kept.submitted(a_task("t2")) is None
    await refusal_of(Reason.IDEMPOTENCY_CONFLICT, kept.submitted(a_task("t2", idempotency_key="k", prompt="another")))
    assert [task.id for task in await waiting(kept)] == ["t1"]


async def test_new_task_is_claimable_by_a_router_with_an_earlier_clock(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("t1", created_at=NOW + 3_600))
    assert [task.id for task in await waiting(kept)] == ["t1"]
    assert len(await kept.lanes(NOW, None, 10)) == 1
    assert await kept.next_ready_at(NOW) is None
    await claimed(kept, "t1")


async def test_requeued_task_is_claimable_by_a_router_with_an_earlier_clock(kept: SqlTaskStore) -> None:
    await reverted(kept, await begun(kept, "t1"), now=NOW + 5)
    await begun(kept, "t2")
    await kept.revert_expired(NOW + LEASE, 10)
    assert [task.id for task in await waiting(kept)] == ["t1", "t2"]


async def test_numbers_of_purged_tasks_are_not_reused(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    numbers = []
    for name in ("task-1", "task-2"):
        await kept.submit(a_task(name))
        numbers.append(await beside.value("SELECT max(seq) FROM tasks"))
        await kept.cancel("ann", name, 0.0)
        await kept.delete("ann", name)
    assert numbers[0] < numbers[1]


async def test_bug_pending_task_does_not_tell_which_attempt_failed_and_when_the_next_starts(kept: SqlTaskStore) -> None:
    await reverted(kept, await begun(kept, "task-1"), now=NOW + 5, ready_at=NOW + 9)
    retry = (await seen(kept, "task-1")).retry
    assert (Reason(retry.error.reason), retry.error.message) == (Reason(CRASH.reason), CRASH.message)
    assert (datetime_of(retry.next_time).timestamp(), retry.failed_count, retry.max_attempts) == (NOW + 9, 1, 3)
    again = await claimed(kept, "task-1", now=NOW + 9)
    assert not (await seen(kept, "task-1")).HasField("retry")
    assert await kept.end(again, DONE, NOW + 10)
    assert not (await seen(kept, "task-1")).HasField("retry")
    await begun(kept, "task-2")
    await kept.revert_expired(NOW + LEASE + 99, 10)
    lost = (await seen(kept, "task-2")).retry
    assert (Reason(lost.error.reason), lost.HasField("next_time")) == (Reason.WORKER_LOST, False)

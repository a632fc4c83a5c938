"""The suite of whoever keeps tasks, on every kind of database that a router may have."""

from typing import Any

from kit.refusals import refusal_of
from stored_tasks import (
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
    said,
    seen,
    store_on,
    waiting,
)

from router_svc.durable.tasks.sql_rows import STAGED, insert_rows
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, TaskOutcome
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import datetime_of

pytest_plugins = ("database_fixtures", "task_store_fixtures")


# -- submissions


async def test_acknowledged_task_survives_a_restart(database_url: str) -> None:
    row = a_task("task-1", origin_kind="chat", window_ends_at=NOW + 5, prompt="\x00ä")
    for life in range(2):
        store = store_on(database_url)
        await store.start()
        if life == 0:
            acknowledged = (await store.submit(row)).task
        details = await details_of(store, "task-1")
        assert details.task == acknowledged
        assert details.spec.SerializeToString() == row.spec
        assert acknowledged.HasField("expire_time")
        assert datetime_of(acknowledged.expire_time).timestamp() == NOW + 5
        await store.stop()


async def test_task_of_another_tenant_is_invisible(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1"))
    assert await kept.get("bob", "task-1") is None
    assert await kept.details("bob", "task-1") is None
    assert await kept.cancel("bob", "task-1", NOW) == (None, False)
    assert await kept.delete("bob", "task-1") is None
    assert (await kept.list_page("bob", task_service_pb2.ListTasksRequest())).tasks == []
    assert (await seen(kept, "task-1")).state == task_pb2.TASK_STATE_PENDING


async def test_same_key_returns_the_same_task_until_it_is_purged(kept: SqlTaskStore) -> None:
    first = await kept.submit(a_task("task-1", idempotency_key="k"))
    again = await kept.submit(a_task("task-2", idempotency_key="k"))
    assert (first.existed, again.existed) == (False, True)
    assert again.task == first.task
    assert await kept.get("ann", "task-2") is None
    others = await kept.submit(a_task("task-3", idempotency_key="k", lane=LANE._replace(tenant="bob")))
    assert not others.existed
    await kept.cancel("ann", "task-1", NOW)
    assert (await kept.submit(a_task("task-4", idempotency_key="k"))).task.state == task_pb2.TASK_STATE_CANCELLED
    await kept.delete("ann", "task-1")
    assert not (await kept.submit(a_task("task-5", idempotency_key="k"))).existed


async def test_one_of_many_concurrent_submissions_with_one_key_is_stored(
    kept: SqlTaskStore, beside: RouterDatabase
) -> None:
    rows = [a_task(f"task-{n}", idempotency_key="k", prompt="bye" if n % 5 == 4 else "hi") for n in range(20)]
    found = await all_of(*(kept.submit(row) for row in rows))
    ids = {each.task.id for each in found if not isinstance(each, WeftError)}
    conflicts = [each.reason for each in found if isinstance(each, WeftError)]
    assert ids == {"task-0"}
    assert [each.existed for each in found if not isinstance(each, WeftError)] == [False] + [True] * 15
    assert conflicts == [Reason.IDEMPOTENCY_CONFLICT] * 4
    assert await count(beside, "task_specs") == 1


# -- pages


async def test_pages_are_newest_first_with_each_task_on_one_page(kept: SqlTaskStore) -> None:
    for number in range(7):
        await kept.submit(a_task(f"task-{number}"))
    query, names = task_service_pb2.ListTasksRequest(page_size=3), []
    while True:
        page = await kept.list_page("ann", query)
        names.append([task.id for task in page.tasks])
        await kept.submit(a_task(f"task-new-{len(names)}"))
        if not page.next_page_token:
            break
        query = task_service_pb2.ListTasksRequest(page_size=3, page_token=page.next_page_token)
    assert names == [["task-6", "task-5", "task-4"], ["task-3", "task-2", "task-1"], ["task-0"]]


async def test_list_applies_its_filters(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1"))
    await kept.submit(a_task("task-2", lane=LANE._replace(model="other")))
    await begun(kept, "task-3")
    await kept.submit(a_task("task-4", batch="batch-1", line=4))
    await kept.submit(a_task("task-5", lane=LANE._replace(model="other"), origin_kind="trial:a"))
    for query, expected in (
        (task_service_pb2.ListTasksRequest(states=frozenset({task_pb2.TASK_STATE_RUNNING})), ["task-3"]),
        (
            task_service_pb2.ListTasksRequest(
                states=frozenset({task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING}), model="demo"
            ),
            ["task-4", "task-3", "task-1"],
        ),
        (task_service_pb2.ListTasksRequest(batch="batch-1"), ["task-4"]),
        (task_service_pb2.ListTasksRequest(origin_kind="trial:a"), ["task-5"]),
        (task_service_pb2.ListTasksRequest(states=frozenset({task_pb2.TASK_STATE_FAILED})), []),
    ):
        assert [task.id for task in (await kept.list_page("ann", query)).tasks] == expected


async def test_page_token_of_another_query_or_malformed_is_rejected(kept: SqlTaskStore) -> None:
    for number in range(3):
        await kept.submit(a_task(f"task-{number}"))
    token = (await kept.list_page("ann", task_service_pb2.ListTasksRequest(page_size=1))).next_page_token
    for tenant, query in (
        ("bob", task_service_pb2.ListTasksRequest(page_size=1, page_token=token)),
        ("ann", task_service_pb2.ListTasksRequest(page_size=1, page_token=token, model="demo")),
        ("ann", task_service_pb2.ListTasksRequest(page_token=token[:-4])),
        ("ann", task_service_pb2.ListTasksRequest(page_token="ä")),
        ("ann", task_service_pb2.ListTasksRequest(page_token="x")),
    ):
        assert "page_token" in await refusal_of(Reason.INVALID_ARGUMENT, kept.list_page(tenant, query))
    assert (
        len((await kept.list_page("ann", task_service_pb2.ListTasksRequest(page_size=2, page_token=token))).tasks) == 2
    )


async def test_staged_batch_line_is_invisible_to_every_call(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    await beside.run(lambda tx: insert_rows(tx, [a_task("task-1", batch="batch-1")], state=STAGED))
    assert await kept.get("ann", "task-1") is None
    assert await kept.details("ann", "task-1") is None
    assert (await kept.list_page("ann", task_service_pb2.ListTasksRequest(batch="batch-1"))).tasks == []
    assert await kept.cancel("ann", "task-1", NOW) == (None, False)
    assert await kept.delete("ann", "task-1") is None
    assert await kept.claim("task-1", "r1", NOW, NOW + LEASE) is None
    assert await kept.lanes(NOW, None, 10) == []
    assert await waiting(kept) == []
    assert await kept.fail_expired(NOW + 9999, 10, {}) == []
    assert await kept.purge_ended(NOW + 9999, 10) == []
    assert await kept.open_counts() == {}
    assert await count(beside, "tasks") == 1


# -- who waits


async def test_all_lanes_are_paged_regardless_of_their_depth(kept: SqlTaskStore) -> None:
    lanes = sorted(
        Lane(m, t, b) for m in ("m1", "m2") for t in ("ann", "bob") for b in (Priority.LOW, Priority.DURABLE)
    )
    await all_of(*(kept.submit(a_task(f"{lane}{n}", lane=lane)) for n in range(3) for lane in lanes))
    found: list[Lane] = []
    while page := await kept.lanes(NOW, found[-1] if found else None, 3):
        assert len(page) <= 3
        found.extend(page)
    assert found == lanes


async def test_oldest_tasks_of_a_lane_are_read_first_within_count_and_size_limits(kept: SqlTaskStore) -> None:
    for number in range(5):
        await kept.submit(a_task(f"task-{number}", prompt="x" * 1000, caller=f"c{number}"))
    await kept.submit(a_task("task-b", lane=LANE._replace(tenant="bob")))
    found = await waiting(kept)
    assert [each.id for each in found] == [f"task-{number}" for number in range(5)]
    assert found[1].spec == a_task("task-1", prompt="x" * 1000).spec
    assert (found[1].caller, found[1].attempt, found[1].failures, found[1].max_attempts) == ("c1", 0, 0, 3)
    assert len(await kept.pending(LANE, NOW, 2, 1 << 30)) == 2
    assert len(await kept.pending(LANE, NOW, 5, 2500)) == 2
    assert len(await kept.pending(LANE, NOW, 5, 1)) == 1


async def test_tasks_are_counted_by_state_with_the_oldest_open_time(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1"))
    await begun(kept, "task-2")
    await kept.submit(a_task("task-3", lane=LANE._replace(tenant="bob")))
    await kept.cancel("ann", "task-1", NOW)
    found = await kept.state_counts()
    submitted = (await kept.get("bob", "task-3") or task_pb2.Task()).create_time.ToSeconds()
    pending, running = found[task_pb2.TASK_STATE_PENDING], found[task_pb2.TASK_STATE_RUNNING]
    assert (pending.count, int(pending.oldest_at or 0)) == (1, submitted)
    assert (running.count, found[task_pb2.TASK_STATE_CANCELLED].count) == (1, 1)
    assert found[task_pb2.TASK_STATE_COMPLETED].count == 0


# -- ends from outside


async def test_cancelled_task_ends_immediately_and_stays_cancelled(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1"))
    claim = await begun(kept, "task-2")
    await kept.append(claim, [a_chunk(1, "a")])
    waited, is_ended_first = await kept.cancel("ann", "task-1", NOW + 1)
    ran, is_ended_second = await kept.cancel("ann", "task-2", NOW + 1)
    assert (is_ended_first, is_ended_second) == (True, True)
    assert waited is not None
    assert ran is not None
    assert (waited.state, waited.owner, ran.state, ran.owner) == (
        task_pb2.TASK_STATE_CANCELLED,
        "",
        task_pb2.TASK_STATE_CANCELLED,
        "r1",
    )
    assert (await seen(kept, "task-2")).owner == ""
    assert not await kept.end(claim, DONE, NOW + 2)
    assert await kept.renew("r1", NOW + 99) == frozenset()
    assert await kept.claim("task-1", "r1", NOW + 2, NOW + 99) is None
    again, is_ended_again = await kept.cancel("ann", "task-2", NOW + 9)
    assert not is_ended_again
    assert again is not None
    assert again == await seen(kept, "task-2")
    assert await said(kept, "task-2", 1) == ["a"]
    details = await details_of(kept, "task-2")
    (attempt,) = details.attempts
    assert Reason(attempt.reason) is Reason.CANCELLED
    assert attempt.end_time == again.end_time


async def test_run_cannot_end_a_task_that_another_call_cancelled(kept: SqlTaskStore) -> None:
    """Both store the same end, and the run's end was taken for a repetition of its own."""
    told: list[str] = []
    kept.report_ends = lambda ended: told.extend(each.task.id for each in ended)
    claim = await begun(kept, "task-1")
    await kept.cancel("ann", "task-1", NOW + 1)
    receipt = receipt_pb2.Receipt(request_id="task-1").SerializeToString()
    stopped = TaskOutcome(state=task_pb2.TASK_STATE_CANCELLED, receipt=receipt)
    assert not await kept.end(claim, stopped, NOW + 2)
    assert told == ["task-1"]


async def test_only_ended_tasks_are_deleted(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    await refusal_of(Reason.RESOURCE_IN_USE, kept.delete("ann", (await kept.submit(a_task("task-1"))).task.id))
    claim = await claimed(kept, "task-1")
    await refusal_of(Reason.RESOURCE_IN_USE, kept.delete("ann", "task-1"))
    await kept.end(claim, TaskOutcome(state=task_pb2.TASK_STATE_COMPLETED, chunks=[a_chunk(1, "a")]), NOW)
    gone = await kept.delete("ann", "task-1")
    assert gone is not None
    assert gone.state == task_pb2.TASK_STATE_COMPLETED
    assert await kept.delete("ann", "task-1") is None
    for table in ("tasks", "task_specs", "task_attempts", "task_pieces"):
        assert await count(beside, table) == 0


async def test_unknown_reason_of_a_newer_release_reads_as_internal(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    await kept.end(await begun(kept, "task-1"), failed(), NOW)
    await beside.change("UPDATE tasks SET error_reason = 9999")
    await beside.change("UPDATE task_attempts SET reason = 9999")
    details = await details_of(kept, "task-1")
    assert details.task.error == task_error(Reason.INTERNAL, "no")
    assert Reason(details.attempts[0].reason) is Reason.INTERNAL


async def test_database_time_is_available_only_on_postgres(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    now = await kept.database_now()
    assert (now is not None) is beside.is_shared
    assert now is None or now > 1_700_000_000


async def test_stop_keeps_a_shared_database_open(database_url: str) -> None:
    database = RouterDatabase(database_url)
    await database.open()
    store = SqlTaskStore(database)
    await store.stop()
    await store.start()
    await store.stop()
    await store.stop()
    assert await count(database, "tasks") == 0
    await database.close()


# -- who submitted it


async def test_caller_and_labels_of_a_task_round_trip(kept: SqlTaskStore) -> None:
    labels: dict[str, Any] = {"user": "ä\x00b", "metadata": {"job": "42", "": "\x00"}}
    submitted = await kept.submit(a_task("task-1", caller="key:k1", request_id="req-1", **labels))
    task = await seen(kept, "task-1")
    assert task == submitted.task
    assert (task.caller, task.user, dict(task.metadata), task.request_id) == (
        "key:k1",
        "ä\x00b",
        {"job": "42", "": "\x00"},
        "req-1",
    )
    plain = (await kept.submit(a_task("task-2"))).task
    assert (plain.caller, plain.user, len(plain.metadata), plain.request_id) == ("local", "", 0, "")


async def test_tasks_are_listed_by_caller_and_by_request(kept: SqlTaskStore) -> None:
    for number, (caller, request) in enumerate([("key:a", "r1"), ("key:b", "r1"), ("key:a", ""), ("key:a", "r2")]):
        await kept.submit(a_task(f"task-{number}", caller=caller, request_id=request))
    wanted = task_service_pb2.ListTasksRequest(caller="key:a", page_size=2)
    first = await kept.list_page("ann", wanted)
    assert [task.id for task in first.tasks] == ["task-3", "task-2"]
    wanted.page_token = first.next_page_token
    assert [task.id for task in (await kept.list_page("ann", wanted)).tasks] == ["task-0"]
    wanted.caller = "key:b"
    await refusal_of(Reason.INVALID_ARGUMENT, kept.list_page("ann", wanted))
    of_request = await kept.list_page("ann", task_service_pb2.ListTasksRequest(request_id="r1"))
    assert [task.id for task in of_request.tasks] == ["task-1", "task-0"]


async def test_unfinished_tasks_of_a_request_are_found_across_tenants(kept: SqlTaskStore) -> None:
    for name, tenant in (("task-1", "ann"), ("task-2", "bob"), ("task-3", "ann"), ("task-4", "ann")):
        await kept.submit(a_task(name, lane=Lane("demo", tenant, Priority.NORMAL), request_id="r1"))
    await kept.submit(a_task("task-5", request_id="r2"))
    await kept.cancel("ann", "task-3", NOW)
    await claimed(kept, "task-4")
    found = await kept.open_of_request("r1", 10)
    assert [(task.id, task.tenant) for task in found] == [("task-1", "ann"), ("task-2", "bob"), ("task-4", "ann")]
    assert [task.id for task in await kept.open_of_request("r1", 1)] == ["task-1"]
    assert await kept.open_of_request("r3", 10) == []

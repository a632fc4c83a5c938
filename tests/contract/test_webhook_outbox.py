"""Events for webhooks: written with the ends that they report, on every kind of database of a router."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from stored_batches import World
from stored_tasks import CRASH, DONE, NOW, a_task, begun, count, details_of, failed

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import NewChunk, TaskOutcome
from router_svc.durable.webhooks import outbox
from router_svc.durable.webhooks.outbox import EventStore, Outbox
from router_svc.policy.webhook_attempts import MAX_SENDING_PER_TENANT
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import batch_service_pb2, task_pb2
from weft.api.router.v1.webhook_pb2 import WebhookEvent
from weft.durable.responses import BACKGROUND_KIND
from weft.kernel.errors.reasons import Reason

pytest_plugins = ("database_fixtures", "task_store_fixtures")


@pytest.fixture
def ann(kept: SqlTaskStore) -> SqlTaskStore:
    """A store that knows that ann has a webhook."""
    kept.outbox = Outbox(frozenset({"ann"}))
    return kept


async def event_of(store: SqlTaskStore, task: str) -> WebhookEvent:
    return (await details_of(store, task)).webhook


def answer(reason: "event_pb2.FinishReason.ValueType") -> TaskOutcome:
    events = [
        event_pb2.InferenceEvent(delta=event_pb2.Delta(text="so", finish_reason=reason)),
        event_pb2.InferenceEvent(finished=event_pb2.Finished()),
    ]
    output = task_pb2.TaskOutput(events=events).SerializeToString()
    return TaskOutcome(
        state=task_pb2.TASK_STATE_COMPLETED, chunks=[NewChunk(first_index=1, event_count=2, output=output)]
    )


@pytest.mark.parametrize(
    ("outcome", "of_task", "of_response"),
    [
        (answer(event_pb2.FINISH_REASON_STOP), "task.completed", "response.completed"),
        (answer(event_pb2.FINISH_REASON_LENGTH), "task.completed", "response.incomplete"),
        (failed(), "task.failed", "response.failed"),
    ],
)
async def test_end_of_a_task_is_written_with_its_event(
    ann: SqlTaskStore, outcome: TaskOutcome, of_task: str, of_response: str
) -> None:
    assert await ann.end(await begun(ann, "task-1"), outcome, NOW)
    assert await ann.end(await begun(ann, "task-2", origin_kind=BACKGROUND_KIND), outcome, NOW)
    task, response = await event_of(ann, "task-1"), await event_of(ann, "task-2")
    assert (task.id, task.type, task.object_id) == ("evt_1", of_task, "task-1")
    assert (response.id, response.type, response.object_id) == ("evt_2", of_response, "resp_2")
    assert task.state == WebhookEvent.STATE_WAITING


async def test_cancelled_and_expired_tasks_get_events(ann: SqlTaskStore) -> None:
    await ann.submit(a_task("task-1", origin_kind=BACKGROUND_KIND))
    await ann.cancel("ann", "task-1", NOW)
    await ann.submit(a_task("task-2"))
    await ann.fail_expired(NOW + 7_200, 10, {})
    await begun(ann, "task-3", max_attempts=1)
    await ann.revert_expired(NOW + 7_200, 10)
    types = [(await event_of(ann, f"task-{number}")).type for number in (1, 2, 3)]
    assert types == ["response.cancelled", "task.failed", "task.failed"]


async def test_no_event_of_another_tenant_a_line_a_waiting_caller_or_a_lost_attempt(
    ann: SqlTaskStore, beside: RouterDatabase
) -> None:
    await ann.end(await begun(ann, "task-1", batch="batch-1"), DONE, NOW)
    await ann.end(await begun(ann, "task-2", request_id="req-1"), DONE, NOW)
    claim = await begun(ann, "task-3")
    await ann.revert(claim, CRASH, receipt=b"", counts=True, now=NOW, ready_at=NOW)
    ann.outbox = Outbox(frozenset({"bob"}))
    await ann.end(await begun(ann, "task-4"), DONE, NOW)
    assert await count(beside, "webhook_events") == 0
    assert not (await details_of(ann, "task-4")).HasField("webhook")


async def test_router_without_a_view_of_the_mesh_writes_events_of_all(ann: SqlTaskStore) -> None:
    ann.outbox = Outbox(None)
    await ann.end(await begun(ann, "task-1"), DONE, NOW)
    assert (await event_of(ann, "task-1")).type == "task.completed"


async def test_without_webhooks_no_statement_is_added(kept: SqlTaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    connection: Any = kept._database._connection
    execute = connection.execute

    def noted(sql: str, *values: Any) -> Any:
        heard.append(sql)
        return execute(sql, *values)

    monkeypatch.setattr(connection, "execute", noted)
    await kept.end(await begun(kept, "task-1"), DONE, NOW)
    await details_of(kept, "task-1")
    assert heard
    assert not [sql for sql in heard if "webhook" in sql]


async def test_batches_get_an_event_at_their_end(database_url: str) -> None:
    world = World(database_url)
    batches = world.service._batches
    batches._store.outbox = Outbox(frozenset({"ann"}))
    await world.service.start()
    error = batch_service_pb2.BatchLineError(code="invalid_json", message="no", line=1)
    wrong = await world.batches.create(world.new_batch(errors=[error]), no_lines())
    found = await EventStore(world.database).first()
    assert [(each.type, each.object_id) for each in found.values()] == [("batch.failed", wrong.id)]
    await world.service.stop(0)


async def no_lines() -> AsyncIterator[batch_service_pb2.BatchLine]:
    for line in list[batch_service_pb2.BatchLine]():
        yield line


async def test_events_beyond_the_bound_are_dropped_with_a_reason(
    ann: SqlTaskStore, beside: RouterDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING", 2)
    for number in range(3):
        await ann.end(await begun(ann, f"task-{number}"), DONE, NOW)
    dropped = await event_of(ann, "task-2")
    assert dropped.state == WebhookEvent.STATE_DROPPED
    assert dropped.error.reason == Reason.TOO_MANY_RESOURCES.value
    assert [each.id for each in await EventStore(beside).first()] == ["evt_0", "evt_1"]


async def test_each_tenant_shows_its_first_events(kept: SqlTaskStore, beside: RouterDatabase) -> None:
    kept.outbox = Outbox(None)
    for number in range(6):
        await kept.end(await begun(kept, f"task-{number}"), DONE, NOW + number)
    kept_store = EventStore(beside)
    found = await kept_store.first()
    assert [each.id for each in found] == [f"evt_{number}" for number in range(MAX_SENDING_PER_TENANT)]
    done = next(iter(found.values()))
    done.state = WebhookEvent.STATE_DELIVERED
    await kept_store.put(done, None)
    await kept_store.remove("evt_1")
    assert [each.id for each in await kept_store.first()] == ["evt_2", "evt_3", "evt_4", "evt_5"]
    assert (await event_of(kept, "task-0")).state == WebhookEvent.STATE_DELIVERED
    assert not (await details_of(kept, "task-1")).HasField("webhook")


async def test_sweep_deletes_old_events_and_brings_back_attempts_in_the_far_future(
    kept: SqlTaskStore, beside: RouterDatabase
) -> None:
    kept.outbox, kept_store = Outbox(None), EventStore(beside)
    for number in range(3):
        await kept.end(await begun(kept, f"task-{number}"), DONE, NOW + number)
    first, second, _ = (await kept_store.first()).values()
    await kept_store.put(first, None)
    await kept_store.put(second, NOW + 10**9)
    await kept_store.sweep(NOW + 5, 4.5)
    assert [(each.id, each.next_at) for each in await kept_store.first()] == [
        ("evt_2", NOW + 2),
        ("evt_1", NOW + 5),
    ]
    assert await count(beside, "webhook_events") == 2

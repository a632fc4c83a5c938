"""Tasks for the tests of those who keep them."""

import asyncio
import hashlib
from typing import Any

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, NewChunk, NewTask, PendingTask, TaskLease, TaskOutcome
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import task_error
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

NOW = 1_800_000_000.0
LEASE = 15.0
MUCH = 1 << 40
LANE = Lane("demo", "ann", Priority.DURABLE)
CRASH = task_error(Reason.WORKER_LOST, "the runner went away")


def store_on(database_url: str) -> SqlTaskStore:
    """Not started."""
    return SqlTaskStore(RouterDatabase(database_url))


def a_task(name: str, *, lane: Lane = LANE, prompt: str = "hi", **changes: Any) -> NewTask:
    """A task that may be begun at NOW, and for an hour; `changes`: of it, or of its message."""
    spec = task_pb2.TaskSpec(model=lane.model, origin=prompt.encode()).SerializeToString()
    task = task_pb2.Task(
        id=name, tenant=lane.tenant, state=task_pb2.TASK_STATE_PENDING, model=lane.model, max_attempts=3, caller="local"
    )
    of_message = {each: changes.pop(each) for each in list(changes) if each in task.DESCRIPTOR.fields_by_name}
    task.MergeFrom(task_pb2.Task(**of_message))
    fields: dict[str, Any] = {
        "task": task,
        "band": lane.band,
        "digest": hashlib.sha256(spec).digest(),
        "spec": spec,
        "pending_limit_seconds": 3600.0,
        "created_at": NOW,
    }
    return NewTask(**(fields | changes))


def a_chunk(first: int, *words: str) -> NewChunk:
    """One event for each word."""
    output = task_pb2.TaskOutput(events=[_event(word) for word in words])
    return NewChunk(first_index=first, event_count=len(words), output=output.SerializeToString())


def _event(word: str) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(text=word))


async def claimed(store: SqlTaskStore, name: str, owner: str = "r1", now: float = NOW) -> TaskLease:
    """It is, for LEASE seconds."""
    claim = await store.claim(name, owner, now, now + LEASE)
    assert claim is not None
    return claim


async def begun(store: SqlTaskStore, name: str, owner: str = "r1", **changes: Any) -> TaskLease:
    """Submitted and claimed."""
    await store.submit(a_task(name, **changes))
    return await claimed(store, name, owner)


async def seen(store: SqlTaskStore, name: str, tenant: str = "ann") -> task_pb2.Task:
    """As it is."""
    task = await store.get(tenant, name)
    assert task is not None
    return task


async def details_of(store: SqlTaskStore, name: str, tenant: str = "ann") -> task_service_pb2.GetTaskResponse:
    """The task and its attempts."""
    details = await store.details(tenant, name)
    assert details is not None
    return details


async def said(store: SqlTaskStore, name: str, attempt: int, after: int = 0, max_bytes: int = MUCH) -> list[str]:
    """What is kept of an answer, word by word."""
    kept = await store.chunks(name, attempt, after, max_bytes)
    return [event.delta.text for chunk in kept for event in chunk.output.events]


async def waiting(store: SqlTaskStore, lane: Lane = LANE, now: float = NOW, limit: int = 100) -> list[PendingTask]:
    """Who may be begun, in order."""
    return list(await store.pending(lane, now, limit, MUCH))


async def reverted(store: SqlTaskStore, claim: TaskLease, now: float = NOW, **changes: Any) -> bool:
    """An attempt that counts came to nothing, and the task may be begun at once."""
    fields: dict[str, Any] = {"receipt": b"", "counts": True, "now": now, "ready_at": now}
    return await store.revert(claim, CRASH, **(fields | changes))


DONE = TaskOutcome(state=task_pb2.TASK_STATE_COMPLETED)


def failed(message: str = "no", reason: Reason = Reason.INVALID_ARGUMENT) -> TaskOutcome:
    """For good."""
    return TaskOutcome(state=task_pb2.TASK_STATE_FAILED, failure=task_error(reason, message))


async def all_of(*awaited: Any) -> list[Any]:
    """At once; errors among what they came to."""
    return list(await asyncio.gather(*awaited, return_exceptions=True))


async def count(database: RouterDatabase, table: str) -> int:
    """Rows."""
    return int(await database.value(f"SELECT count(*) FROM {table}"))

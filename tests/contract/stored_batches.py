"""Files and batches on a database, and lines moved to their ends by hand, for the tests of their store."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from router_svc.durable.batches.batch_servicer import BatchService
from router_svc.durable.limits import BatchLimits, TaskLimits
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.api.router.v1 import batch_service_pb2, file_service_pb2, task_pb2
from weft.durable.batches import BATCH_INPUT, LineResult
from weft.kernel.time.timestamps import stamp_of
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from router_svc.durable.tasks.task_records import StoreEvent

NEW_FILE = file_service_pb2.File(tenant="ann", name="lines.jsonl", purpose=BATCH_INPUT)
DAY_SECONDS = 86_400.0


class World:
    """One router's files and batches, with a clock and a way to its tables."""

    def __init__(
        self, database_url: str, *, clock: FakeClock | None = None, max_open_per_tenant: int = 200_000, **limits: Any
    ) -> None:
        self.clock = clock or FakeClock()
        self.events = TaskEventBus()
        self.news: list[StoreEvent] = []
        self.events.subscribe(self.news.append)
        self.database = RouterDatabase(database_url)
        self.service = BatchService(
            self.database,
            BatchLimits(**limits),
            TaskLimits(max_open_per_tenant=max_open_per_tenant),
            self.events,
            clock=self.clock,
        )
        self.files = self.service.files
        self.batches = self.service.batches

    def new_batch(self, **fields: Any) -> batch_service_pb2.Batch:
        """A batch of ann's with a window of a day."""
        window_ends_at: datetime = self.clock.utc_now() + timedelta(seconds=DAY_SECONDS)
        known: dict[str, Any] = {
            "tenant": "ann",
            "endpoint": "/v1/chat/completions",
            "input_file": "file-1",
            "window_end_time": stamp_of(window_ends_at),
        }
        return batch_service_pb2.Batch(**(known | fields))

    async def end(
        self, batch_id: str, state: "task_pb2.TaskState.ValueType", lines: Iterable[int], **columns: Any
    ) -> None:
        """Lines reach an end, as whoever runs them says."""
        values: dict[str, Any] = {"state": state, "attempt": 1, "ended_at": self.clock.utc_now().timestamp(), **columns}
        columns_set = ", ".join(f"{name} = :{name}" for name in values)
        await self.database.change(
            f"UPDATE tasks SET {columns_set} WHERE batch_id = :batch_id AND line IN :lines",
            batch_id=batch_id,
            lines=list(lines),
            **values,
        )

    async def claim(self, batch_id: str, lines: Iterable[int]) -> None:
        """Lines are run by somebody."""
        now = self.clock.utc_now().timestamp()
        await self.end(
            batch_id, task_pb2.TASK_STATE_RUNNING, lines, ended_at=None, owner="router-1", lease_until=now + 15
        )
        attempt = {"attempt": 1, "owner": "router-1", "claimed_at": now, "reason": 0, "message": "", "receipt": b""}
        running = await self.database.rows("SELECT id FROM tasks WHERE state = 2 AND batch_id = :id", id=batch_id)
        rows = [{"task_id": row.id, "ended_at": None, **attempt} for row in running]
        await self.database.run(lambda tx: tx.insert("task_attempts", *rows))

    async def answer(self, batch_id: str, line: int, *texts: str, attempt: int = 1) -> None:
        """Keep pieces of an answer."""
        query = "SELECT id FROM tasks WHERE batch_id = :batch_id AND line = :line"
        task_id = await self.database.value(query, batch_id=batch_id, line=line)
        rows: list[dict[str, Any]] = [
            {
                "task_id": task_id,
                "attempt": attempt,
                "first_index": index,
                "event_count": 1,
                "output": output(text).SerializeToString(),
            }
            for index, text in enumerate(texts, start=1)
        ]
        await self.database.run(lambda tx: tx.insert("task_pieces", *rows))
        size = sum(len(row["output"]) for row in rows)
        await self.database.change("UPDATE tasks SET result_size = :size WHERE id = :id", size=size, id=task_id)

    async def rows(self, table: str, *columns: str) -> list[Any]:
        """Columns of a table."""
        return await self.database.rows(f"SELECT {', '.join(columns)} FROM {table}")

    async def count(self, table: str) -> int:
        """Rows of a table."""
        return int(await self.database.value(f"SELECT count(*) FROM {table}"))

    async def results(self, batch_id: str, tenant: str = "ann") -> list[LineResult]:
        """Every result."""
        return [result async for result in self.batches.results(tenant, batch_id)]


@asynccontextmanager
async def running(database_url: str, **settings: Any) -> AsyncIterator[World]:
    """Started, and stopped afterwards."""
    world = World(database_url, **settings)
    await world.service.start()
    try:
        yield world
    finally:
        await world.service.stop(1)


def line(name: str, *, model: str = "qwen", text: str = "hello", origin: bytes = b"{}") -> batch_service_pb2.BatchLine:
    """One chat."""
    content = [chat_pb2.ContentPart(text=text)]
    payload = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=content)])
    return batch_service_pb2.BatchLine(custom_id=name, spec=task_pb2.TaskSpec(model=model, chat=payload, origin=origin))


async def lines(*given: batch_service_pb2.BatchLine) -> AsyncIterator[batch_service_pb2.BatchLine]:
    """They come one after the other."""
    for each in given:
        yield each


def many(number: int) -> AsyncIterator[batch_service_pb2.BatchLine]:
    """So many lines."""
    return lines(*(line(f"line-{index}") for index in range(number)))


async def content(*chunks: bytes) -> AsyncIterator[bytes]:
    """They come one after the other."""
    for chunk in chunks:
        yield chunk


def output(text: str) -> task_pb2.TaskOutput:
    """A piece of an answer."""
    return task_pb2.TaskOutput(events=[event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))])

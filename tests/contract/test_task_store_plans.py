"""The statements that run all the time find their rows by an index, however many tasks are kept.

SQLite plans without statistics, PostgreSQL with those of a table in which most tasks are over and many wait.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import bindparam, event, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from stored_tasks import CRASH, DONE, LANE, LEASE, MAX_COMMIT_BATCH, MUCH, NOW, a_chunk, a_row, store_on
from typing_extensions import override

from router_svc.durable.tasks.sql_rows import values_of
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.store_port import Claim, Lane
from router_svc.policy.task_release import Release, ReleaseBound
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import task_attempts, task_pieces, task_specs, tasks
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)

ROWS = 6_000
RUNNING, WAITING, TENANTS = 60, 2_000, 20
CLAIM = Claim("task-10", "r1", 1)
Use = Callable[[SqlTaskStore], Awaitable[Any]]


class OneConnection(RouterDatabase):
    """A database whose transactions all are on the connection that the test explains."""

    def __init__(self, connection: AsyncConnection) -> None:
        super().__init__("sqlite+aiosqlite://")
        self._connection = connection

    @override
    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        yield self._connection

    writing = reading

    @override
    async def open(self) -> None:
        """The test has opened it."""

    @override
    async def close(self) -> None:
        """The test closes it."""


@asynccontextmanager
async def _store(connection: AsyncConnection) -> AsyncIterator[SqlTaskStore]:
    store = SqlTaskStore(OneConnection(connection), max_commit_batch=MAX_COMMIT_BATCH)
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


async def submit_three(store: SqlTaskStore) -> None:
    """At once, each with a key."""
    await asyncio.gather(*(store.submit(a_row(f"new-{n}", idempotency_key=f"new-{n}")) for n in range(3)))


async def further_page(store: SqlTaskStore) -> None:
    """The second."""
    token = (await store.list_page("t1", task_service_pb2.ListTasksRequest(page_size=2))).next_page_token
    assert (await store.list_page("t1", task_service_pb2.ListTasksRequest(page_size=2, page_token=token))).tasks


USES: dict[str, tuple[Use, str]] = {
    "submit": (submit_three, "ix_tasks_key"),
    "get": (lambda store: store.get("t3", "task-9"), "uq_tasks_id"),
    "details": (lambda store: store.details("t3", "task-9"), "uq_tasks_id"),
    "list_page": (
        lambda store: store.list_page("t1", task_service_pb2.ListTasksRequest(page_size=2)),
        "ix_tasks_tenant_seq",
    ),
    "list_page, a further one": (further_page, "ix_tasks_tenant_seq"),
    "pieces": (lambda store: store.chunks("task-10", 1, 1, MUCH), "pk_task_pieces"),
    "lanes": (lambda store: store.lanes(NOW, None, 20), "ix_tasks_lane"),
    "lanes after one": (lambda store: store.lanes(NOW, Lane("m1", "t1", LANE.band), 20), "ix_tasks_lane"),
    "pending": (lambda store: store.pending(Lane("m1", "t1", LANE.band), NOW, 5, MUCH), "ix_tasks_lane"),
    "next_ready_at": (lambda store: store.next_ready_at(NOW - 10), "ix_tasks_ready"),
    "claim": (lambda store: store.claim("task-100", "r1", NOW, NOW + LEASE), "uq_tasks_id"),
    "renew": (lambda store: store.renew("r1", NOW + LEASE), "ix_tasks_lease"),
    "append": (lambda store: store.append(CLAIM, [a_chunk(2, "b")]), "uq_tasks_id"),
    "end": (lambda store: store.end(CLAIM, DONE, NOW), "uq_tasks_id"),
    "revert": (
        lambda store: store.revert(CLAIM, CRASH, receipt=b"", counts=True, now=NOW, ready_at=NOW),
        "pk_task_attempts",
    ),
    "cancel": (lambda store: store.cancel("t3", "task-10", NOW), "uq_tasks_id"),
    "revert_expired": (lambda store: store.revert_expired(NOW + LEASE, 5), "ix_tasks_lease"),
    "fail_expired": (lambda store: store.fail_expired(NOW + 3600, 5), "ix_tasks_expiry"),
    "open_of_request": (lambda store: store.open_of_request("req-1", 5), "ix_tasks_request"),
    "release_oldest of a tenant": (
        lambda store: store.release_oldest(Release(bound=ReleaseBound.COUNT, tenant="t1", count=5), 5),
        "ix_tasks_kept",
    ),
    "release_oldest": (
        lambda store: store.release_oldest(Release(bound=ReleaseBound.BYTES, tenant="", count=5), 5),
        "ix_tasks_ended",
    ),
    "forget_ended": (lambda store: store.purge_ended(NOW + 5, 5), "ix_tasks_ended"),
}


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[AsyncConnection]:
    """To a database with many tasks in it."""
    store = store_on(database_url)
    await store.start()
    await store.stop()
    engine: AsyncEngine = create_async_engine(database_url)
    async with engine.connect() as connection:
        await _fill(connection)
        yield connection
    await engine.dispose()


async def _fill(connection: AsyncConnection) -> None:
    """Of three models and tenants: few run, some wait, most are over."""
    rows = [_values(number) for number in range(ROWS)]
    names = [str(row["id"]) for row in rows]
    run = [str(row["id"]) for row in rows if row["attempt"]]
    await connection.execute(insert(tasks), rows)
    await connection.execute(insert(task_specs), [{"task_id": name, "spec": b""} for name in names])
    begun = {"attempt": 1, "owner": "r1", "claimed_at": NOW, "ended_at": None, "reason": 0, "message": ""}
    await connection.execute(insert(task_attempts), [{"task_id": name, "receipt": b"", **begun} for name in run])
    chunk = {"attempt": 1, "first_index": 1, "event_count": 1, "output": b""}
    await connection.execute(insert(task_pieces), [{"task_id": name, **chunk} for name in run])
    await connection.commit()
    if connection.dialect.name == "postgresql":
        await connection.execute(text("ANALYZE"))
        await connection.commit()


def _values(number: int) -> dict[str, object]:
    lane = Lane(f"m{number % 3}", f"t{number // 3 % TENANTS}", LANE.band)
    row = values_of(a_row(f"task-{number}", lane=lane, idempotency_key=f"k{number}"), task_pb2.TASK_STATE_PENDING)
    if number < RUNNING:
        state = {"state": task_pb2.TASK_STATE_RUNNING, "owner": "r1", "attempt": 1, "lease_until": NOW + LEASE}
        return row | state | {"last_index": 1}
    over = {"state": task_pb2.TASK_STATE_COMPLETED, "ended_at": NOW + number, "attempt": 1}
    return row if number < RUNNING + WAITING else row | over


async def plans(connection: AsyncConnection, use: Use) -> Sequence[tuple[str, str]]:
    """Every statement of it, and how the database goes about it."""
    heard: list[tuple[str, Any]] = []
    engine = connection.sync_connection
    assert engine is not None

    def hear(*called: Any) -> None:
        _, _, statement, parameters, _, executemany = called
        heard.append((statement, parameters[0] if executemany else parameters))

    event.listen(engine, "before_cursor_execute", hear)
    async with _store(connection) as store:
        await use(store)
    event.remove(engine, "before_cursor_execute", hear)
    assert heard
    await connection.rollback()
    word = "EXPLAIN QUERY PLAN " if connection.dialect.name == "sqlite" else "EXPLAIN "
    found = []
    for statement, parameters in heard:
        rows = (await connection.exec_driver_sql(word + statement, parameters)).all()
        found.append((statement, "\n".join(str(row[-1]) for row in rows)))
    await connection.rollback()
    return found


def faults(plan: str) -> list[str]:
    """Lines in which all tasks are read, or sorted. An index of those that wait, or run, has only those in it."""
    some = "ix_tasks_(lane|ready|expiry|lease|ended)"
    bad = rf"SCAN (tasks|task_\w+|this)\b(?!.*{some})|TEMP B-TREE|Seq Scan on (tasks|task_\w+)|-> +Sort|^Sort"
    return [line for line in plan.splitlines() if re.search(bad, line)]


def names_of(plan: str) -> set[str]:
    """The indexes that it uses, by our names."""
    unnamed = {"sqlite_autoindex_tasks_1": "uq_tasks_id", "sqlite_autoindex_task_pieces_1": "pk_task_pieces"}
    unnamed["sqlite_autoindex_task_attempts_1"] = "pk_task_attempts"
    return {unnamed.get(word, word) for word in re.findall(r"\w+", plan)}


@pytest.mark.slow("explains every statement over 6,000 rows")
async def test_hot_statements_use_their_index(connection: AsyncConnection) -> None:
    wrong = {}
    for name, (use, index) in USES.items():
        found = await plans(connection, use)
        bad = [(statement, plan) for statement, plan in found if faults(plan)]
        if bad or not any(index in names_of(plan) for _, plan in found):
            wrong[name] = bad or found
    assert not wrong, "\n\n".join(f"== {name}\n{stmt}\n{plan}" for name, all_ in wrong.items() for stmt, plan in all_)


async def test_statements_without_their_index_are_found(connection: AsyncConnection) -> None:
    hidden = select(tasks.c.id).where(tasks.c.result_size == bindparam("state", 1)).order_by(tasks.c.ready_at)
    ((_, plan),) = await plans(connection, lambda _: connection.execute(hidden))
    assert len(faults(plan)) == 2


async def steps_of(connection: AsyncConnection, use: Use) -> int:
    """How much SQLite does for it, in hundreds of its virtual machine's steps."""
    raw: Any = (await connection.get_raw_connection()).driver_connection
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    async with _store(connection) as store:
        await raw.set_progress_handler(count, 100)
        await use(store)
        await raw.set_progress_handler(None, 0)
    return steps


@pytest.mark.slow("fills 50,000 rows")
async def test_finding_and_claiming_costs_the_same_with_many_waiting(sqlite_url: str) -> None:
    store = store_on(sqlite_url)
    await store.start()
    await store.stop()
    engine = create_async_engine(sqlite_url)
    costs: list[list[int]] = []
    async with engine.connect() as connection:
        for size, first in ((100, 0), (50_000, 100)):
            rows = [
                values_of(a_row(f"task-{n}", lane=Lane(f"m{n % 4}", "ann", LANE.band)), 1) for n in range(first, size)
            ]
            await connection.execute(insert(tasks), rows)
            await connection.execute(insert(task_specs), [{"task_id": row["id"], "spec": b"s"} for row in rows])
            await connection.commit()
            uses: list[Use] = [
                lambda store: store.lanes(NOW, None, 10),
                lambda store: store.lanes(NOW, Lane("m2", "ann", LANE.band), 10),
                lambda store: store.pending(Lane("m2", "ann", LANE.band), NOW, 8, MUCH),
                lambda store: store.claim("task-50", "r1", NOW, NOW + LEASE),
            ]
            costs.append([await steps_of(connection, use) for use in uses])
            await connection.rollback()
    await engine.dispose()
    few, many = costs
    assert [large for small, large in zip(few, many, strict=True) if large > 2 * small + 2] == []
    # Were every task looked at, it would be tens of thousands of steps: the measure sees work.
    assert sum(few) > 0


async def test_a_reason_is_kept_for_every_row_of_a_sweep(connection: AsyncConnection) -> None:
    async with _store(connection) as store:
        failed = await store.fail_expired(NOW + 3600, 7)
    query = select(tasks.c.error_reason).where(tasks.c.id.in_(failed))
    assert (await connection.execute(query)).scalars().all() == [Reason.QUEUE_TIMEOUT.value] * 7

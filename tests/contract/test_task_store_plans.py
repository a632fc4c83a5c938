"""The statements that run all the time find their rows by an index, however many tasks are kept.

SQLite plans without statistics, PostgreSQL with those of a table in which most tasks are over and many wait.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from stored_tasks import CRASH, DONE, LANE, LEASE, MUCH, NOW, a_chunk, a_task
from typing_extensions import override

from router_svc.durable.tasks.sql_rows import values_of
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, TaskLease
from router_svc.policy.task_release import Release, ReleaseBound
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.kernel.errors.reasons import Reason
from weft.sql.connections import Tx
from weft.sql.statements import Values
from weft.sql.store import T, Work

pytest_plugins = ("database_fixtures",)

ROWS = 6_000
RUNNING, WAITING, TENANTS = 60, 2_000, 20
CLAIM = TaskLease("task-10", "r1", 1)
Use = Callable[[SqlTaskStore], Awaitable[Any]]


class UndoneError(Exception):
    """What a transaction has written is not kept."""


class Explained(RouterDatabase):
    """A database that notes the statements of its transactions, and can undo what they write."""

    def __init__(self, database_url: str) -> None:
        super().__init__(database_url)
        self.heard: list[tuple[str, Values]] = []
        self.keeps = True

    @override
    async def run(self, work: Work[T], *, vital: bool = False) -> T:
        if self.keeps:
            return await super().run(work, vital=vital)
        done: list[T] = []

        def undone(tx: Tx) -> None:
            done.append(self._noting(work)(tx))
            raise UndoneError

        with suppress(UndoneError):
            await super().run(undone, vital=vital)
        return done[0]

    @override
    async def read(self, work: Work[T]) -> T:
        return await super().read(self._noting(work))

    def _noting(self, work: Work[T]) -> Work[T]:
        def noted(_: Tx) -> T:
            return work(NotingTx(self._connection, self.heard))

        return noted


class NotingTx(Tx):
    def __init__(self, connection: Any, heard: list[tuple[str, Values]]) -> None:
        super().__init__(connection)
        self._heard = heard
        execute, execute_many = connection.execute, connection.execute_many

        class Spy:
            def execute(self, sql: str, values: Values) -> Any:
                heard.append((sql, values))
                return execute(sql, values)

            def execute_many(self, sql: str, rows: Sequence[Values]) -> None:
                heard.append((sql, rows[0]))
                execute_many(sql, rows)

            fetch = staticmethod(connection.fetch)

        self._connection = Spy()  # type: ignore[assignment]


async def submit_two(store: SqlTaskStore) -> None:
    """The key of the second is taken."""
    await store.submit(a_task("new-1", idempotency_key="new-1"))
    again = await store.submit(a_task("new-2", lane=Lane("m0", "t0", LANE.band), idempotency_key="k0"))
    assert again.existed


async def further_page(store: SqlTaskStore) -> None:
    """The second."""
    token = (await store.list_page("t1", task_service_pb2.ListTasksRequest(page_size=2))).next_page_token
    assert (await store.list_page("t1", task_service_pb2.ListTasksRequest(page_size=2, page_token=token))).tasks


USES: dict[str, tuple[Use, str]] = {
    "submit": (submit_two, "ix_tasks_key"),
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
    "fail_expired": (lambda store: store.fail_expired(NOW + 3600, 5, {}), "ix_tasks_expiry"),
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
async def database(database_url: str) -> AsyncIterator[Explained]:
    """With many tasks in it."""
    database = Explained(database_url)
    await database.open()
    await database.run(_fill)
    if database.is_shared:
        await database.change("ANALYZE")
    database.keeps = False
    yield database
    await database.close()


def _fill(tx: Tx) -> None:
    """Of three models and tenants: few run, some wait, most are over."""
    rows = [_values(number) for number in range(ROWS)]
    run = [str(row["id"]) for row in rows if row["attempt"]]
    begun = {"attempt": 1, "owner": "r1", "claimed_at": NOW, "ended_at": None, "reason": 0, "message": ""}
    chunk = {"attempt": 1, "first_index": 1, "event_count": 1, "output": b""}
    tx.insert("tasks", *rows)
    tx.insert("task_specs", *({"task_id": row["id"], "spec": b""} for row in rows))
    tx.insert("task_attempts", *({"task_id": name, "receipt": b"", **begun} for name in run))
    tx.insert("task_pieces", *({"task_id": name, **chunk} for name in run))


def _values(number: int) -> dict[str, object]:
    lane = Lane(f"m{number % 3}", f"t{number // 3 % TENANTS}", LANE.band)
    row = values_of(a_task(f"task-{number}", lane=lane, idempotency_key=f"k{number}"), task_pb2.TASK_STATE_PENDING)
    if number < RUNNING:
        state = {"state": task_pb2.TASK_STATE_RUNNING, "owner": "r1", "attempt": 1, "lease_until": NOW + LEASE}
        return row | state | {"last_index": 1}
    over = {"state": task_pb2.TASK_STATE_COMPLETED, "ended_at": NOW + number, "attempt": 1}
    return row if number < RUNNING + WAITING else row | over


async def plans(database: Explained, use: Use) -> Sequence[tuple[str, str]]:
    """Every statement of it, and how the database goes about it."""
    database.heard.clear()
    await use(SqlTaskStore(database))
    heard = list(database.heard)
    assert heard
    word = "EXPLAIN " if database.is_shared else "EXPLAIN QUERY PLAN "
    return [
        (statement, "\n".join(str(row[-1]) for row in await database.rows(word + statement, **values)))
        for statement, values in heard
    ]


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
async def test_hot_statements_use_their_index(database: Explained) -> None:
    wrong = {}
    for name, (use, index) in USES.items():
        found = await plans(database, use)
        bad = [(statement, plan) for statement, plan in found if faults(plan)]
        if bad or not any(index in names_of(plan) for _, plan in found):
            wrong[name] = bad or found
    assert not wrong, "\n\n".join(f"== {name}\n{stmt}\n{plan}" for name, all_ in wrong.items() for stmt, plan in all_)


async def test_statements_without_their_index_are_detected(database: Explained) -> None:
    hidden = "SELECT id FROM tasks WHERE result_size = :size ORDER BY ready_at"
    ((_, plan),) = await plans(database, lambda _: database.rows(hidden, size=1))
    assert len(faults(plan)) == 2


async def steps_of(database: Explained, use: Use) -> int:
    """How much SQLite does for it, in hundreds of its virtual machine's steps."""
    raw: Any = database._connection
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    raw._raw.set_progress_handler(count, 100)
    await use(SqlTaskStore(database))
    raw._raw.set_progress_handler(None, 0)
    return steps


@pytest.mark.slow("fills 50,000 rows")
async def test_find_and_claim_cost_does_not_grow_with_the_queue(sqlite_url: str) -> None:
    database = Explained(sqlite_url)
    await database.open()
    costs: list[list[int]] = []
    for size, first in ((100, 0), (50_000, 100)):
        rows = [values_of(a_task(f"task-{n}", lane=Lane(f"m{n % 4}", "ann", LANE.band)), 1) for n in range(first, size)]
        specs = [{"task_id": row["id"], "spec": b"s"} for row in rows]
        database.keeps = True
        await database.run(lambda tx, rows=rows: tx.insert("tasks", *rows))  # type: ignore[misc]
        await database.run(lambda tx, specs=specs: tx.insert("task_specs", *specs))  # type: ignore[misc]
        database.keeps = False
        uses: list[Use] = [
            lambda store: store.lanes(NOW, None, 10),
            lambda store: store.lanes(NOW, Lane("m2", "ann", LANE.band), 10),
            lambda store: store.pending(Lane("m2", "ann", LANE.band), NOW, 8, MUCH),
            lambda store: store.claim("task-50", "r1", NOW, NOW + LEASE),
        ]
        costs.append([await steps_of(database, use) for use in uses])
    await database.close()
    few, many = costs
    assert [large for small, large in zip(few, many, strict=True) if large > 2 * small + 2] == []
    # Were every task looked at, it would be tens of thousands of steps: the measure sees work.
    assert sum(few) > 0


async def test_reason_is_stored_for_every_row_of_a_sweep(database: Explained) -> None:
    database.keeps = True
    failed = await SqlTaskStore(database).fail_expired(NOW + 3600, 7, {})
    rows = await database.rows("SELECT error_reason FROM tasks WHERE id IN :ids", ids=failed)
    assert [row.error_reason for row in rows] == [Reason.QUEUE_TIMEOUT.value] * 7

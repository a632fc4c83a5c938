"""The final state of a run, read from the database and from TaskService.

The database is read with its own driver, using only names of tables and columns and no code of the router.
"""

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc import StatusCode
from grpc.aio import AioRpcError

from tools.torture.history import TERMINAL, AttemptRow, KeptTask
from tools.torture.submitter import CALL_SECONDS, until_known
from weft.api.router.v1 import task_pb2, task_service_pb2

if TYPE_CHECKING:
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub


SQLITE_PREFIX = "sqlite:///"
TASKS = "SELECT id, state, attempt, failures, idempotency_key FROM tasks"
ATTEMPTS = "SELECT task_id, attempt, owner, claimed_at, ended_at, reason FROM task_attempts ORDER BY task_id, attempt"
_COUNTS = ("completed_count", "failed_count", "cancelled_count", "rejected_count", "retried_count")
_USAGE = " UNION ALL ".join(
    f"SELECT {', '.join(f'coalesce(sum({name}), 0)' for name in _COUNTS)} FROM {table}"  # noqa: S608 - constants
    for table in ("usage_hours", "usage_entries")
)


async def read_usage(url: str) -> Mapping[str, int]:
    """Returns the sums of usage of all hours, by column. Raises as `read_database`."""
    (rows,) = await asyncio.to_thread(_rows, url, _USAGE)
    return {name: sum(int(row[index]) for row in rows) for index, name in enumerate(_COUNTS)}


async def read_database(url: str) -> tuple[Mapping[str, KeptTask], Sequence[str]]:
    """Returns every task by id, and the damage reported by the database's integrity check.

    Raises sqlite3.Error, or psycopg.Error.
    """
    tasks, attempts = await asyncio.to_thread(_rows, url, TASKS, ATTEMPTS)
    damage: list[str] = []
    # PostgreSQL has no integrity check for ordinary users.
    if url.startswith(SQLITE_PREFIX):
        checks = await asyncio.to_thread(_rows, url, "PRAGMA integrity_check", "PRAGMA foreign_key_check")
        damage = [line for (line,) in checks[0] if line != "ok"]
        damage += [f"a row of {row[0]} has no parent" for row in checks[1]]
    return kept_tasks(tasks, attempts), damage


def _rows(url: str, *statements: str) -> list[list[Any]]:
    """Returns the rows of each statement."""
    connection: Any
    if url.startswith(SQLITE_PREFIX):
        connection = sqlite3.connect(Path(url.removeprefix(SQLITE_PREFIX)))
    else:
        import psycopg  # noqa: PLC0415 - the driver is installed for PostgreSQL only

        connection = psycopg.connect(url)
    with closing(connection):
        return [connection.execute(statement).fetchall() for statement in statements]


def kept_tasks(tasks: Iterable[Any], attempts: Iterable[Any]) -> Mapping[str, KeptTask]:
    """Returns tasks by id from rows of `TASKS` and `ATTEMPTS`."""
    rows: dict[str, list[AttemptRow]] = defaultdict(list)
    for task, attempt, owner, claimed_at, ended_at, reason in attempts:
        rows[task].append(
            AttemptRow(attempt=attempt, owner=owner, claimed_at=claimed_at, ended_at=ended_at, reason=reason)
        )
    return {
        task: KeptTask(id=task, state=state, attempt=attempt, failures=failures, key=key or "", attempts=rows[task])
        for task, state, attempt, failures, key in tasks
    }


READ_AT_ONCE = 32
WATCH_SECONDS = 30.0
PAGE_SIZE = 500
_OPEN = (task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING)


async def is_any_open(stub: "TaskServiceAsyncStub") -> bool:
    """Whether some task is not terminal."""
    request = task_service_pb2.ListTasksRequest(states=_OPEN, page_size=1)
    return bool((await until_known(lambda: stub.ListTasks(request, timeout=CALL_SECONDS))).tasks)


async def read_service(stub: "TaskServiceAsyncStub", ids: Iterable[str]) -> Mapping[str, KeptTask]:
    """Returns these and all listed tasks by id, without those that the service does not know."""
    wanted = sorted({*ids, *(await _listed(stub))})
    turns = asyncio.Semaphore(READ_AT_ONCE)

    async def read(task: str) -> KeptTask | None:
        async with turns:
            return await _read(stub, task)

    found = await asyncio.gather(*map(read, wanted))
    return {kept.id: kept for kept in found if kept is not None}


async def _listed(stub: "TaskServiceAsyncStub") -> set[str]:
    ids: set[str] = set()
    request = task_service_pb2.ListTasksRequest(page_size=PAGE_SIZE)
    while True:
        page = await until_known(lambda: stub.ListTasks(request, timeout=CALL_SECONDS))
        ids.update(task.id for task in page.tasks)
        if not page.next_page_token:
            return ids
        request.page_token = page.next_page_token


async def _read(stub: "TaskServiceAsyncStub", task: str) -> KeptTask | None:
    request = task_service_pb2.GetTaskRequest(id=task)
    try:
        details = await until_known(lambda: stub.GetTask(request, timeout=CALL_SECONDS))
    except AioRpcError as error:
        if error.code() is StatusCode.NOT_FOUND:
            return None
        raise
    is_terminal = details.task.state in TERMINAL
    pieces, is_watch_complete = await until_known(lambda: _pieces(stub, task)) if is_terminal else ([], True)
    events = [event for piece in pieces for event in piece.output.events]
    return KeptTask(
        id=task,
        state=details.task.state,
        attempt=details.task.attempt,
        tokens=details.spec.chat.sampling.max_tokens,
        text="".join(event.delta.text for event in events if event.HasField("delta")),
        answer_attempts=frozenset(piece.attempt for piece in pieces),
        finishes=sum(event.HasField("finished") for event in events),
        is_watch_complete=is_watch_complete,
        attempts=[_row(attempt) for attempt in details.attempts],
    )


async def _pieces(stub: "TaskServiceAsyncStub", task: str) -> tuple[list[task_pb2.TaskPiece], bool]:
    """Returns the chunks of a watch, and whether it ended regularly, which it may not in an unfenced run."""
    request = task_service_pb2.WatchTaskRequest(id=task)
    pieces: list[task_pb2.TaskPiece] = []
    try:
        async for event in stub.WatchTask(request, timeout=WATCH_SECONDS):
            if event.HasField("piece"):
                pieces.append(event.piece)  # noqa: PERF401 - chunks before an error count
    except AioRpcError as error:
        if error.code() is not StatusCode.NOT_FOUND:
            raise
        return pieces, False
    return pieces, True


def _row(attempt: task_pb2.TaskAttempt) -> AttemptRow:
    return AttemptRow(
        attempt=attempt.attempt,
        owner=attempt.owner,
        claimed_at=attempt.claim_time.ToMicroseconds() / 1e6,
        ended_at=attempt.end_time.ToMicroseconds() / 1e6 if attempt.HasField("end_time") else None,
        reason=attempt.reason,
    )

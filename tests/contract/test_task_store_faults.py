"""Databases that fail under the store: what is acknowledged is there afterwards, and it goes on without a hand."""

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stored_tasks import DONE, NOW, a_chunk, a_task, begun, said, seen, store_on

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import TaskOutcome
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.postgres_server import PYTHON_OF_THE_WHEEL, PostgresServer, running_postgres

pytest_plugins = ("database_fixtures",)

PATIENCE_MS = 100
POLL_SECONDS = 0.01
MOST_BYTES = 512 * 1024
LOCKS_IT = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'weft-router'"
CUT_ALL = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'weft-router'"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "router.db"


@pytest.fixture
async def kept(monkeypatch: pytest.MonkeyPatch, file: Path) -> AsyncIterator[SqlTaskStore]:
    """On SQLite that waits for others for a short while only, with what it acknowledges counted apart; started."""
    monkeypatch.setattr("weft.sql.connections.BUSY_TIMEOUT_MS", PATIENCE_MS)
    database = RouterDatabase(f"sqlite:///{file}", promise_file=file.with_name("router.promised"))
    store = SqlTaskStore(database)
    await store.start()
    yield store
    await store.stop()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """By another process, as a backup may."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LOCKS_IT, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            process.kill()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def crash(server: PostgresServer, database: str) -> None:
    """Kills one of its processes, so that it ends all others and recovers; returns once it has noticed."""
    pid = int(server.sql(f"{BACKENDS} AND datname = '{database}' LIMIT 1"))
    os.kill(pid, signal.SIGKILL)
    signs = f"(PID {pid}) was terminated by signal 9"
    # Until then it accepts connections, which it ends later: under load, when the test is over.
    while signs not in (server.socket_folder / "log").read_text():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(POLL_SECONDS)


async def refused(awaited: Awaitable[object]) -> WeftError:
    with pytest.raises(WeftError) as found:
        await awaited
    assert found.value.reason is Reason.SERVICE_UNAVAILABLE
    return found.value


class Submitters:
    """Submit one task after the other, and note which were acknowledged."""

    def __init__(self, store: SqlTaskStore, count: int = 8) -> None:
        self.acknowledged: set[str] = set()
        self.refused: list[WeftError] = []
        self._store = store
        self._news = asyncio.Condition()
        self._works = [asyncio.create_task(self._submit(f"task-{number}")) for number in range(count)]

    async def _submit(self, name: str) -> None:
        number = 0
        while True:
            number += 1
            try:
                await self._store.submit(a_task(f"{name}-{number}"))
                self.acknowledged.add(f"{name}-{number}")
            except WeftError as error:
                self.refused.append(error)
            async with self._news:
                self._news.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(holds)

    async def go_on(self) -> None:
        """Until some more were acknowledged."""
        enough = len(self.acknowledged) + 20
        await self.until(lambda: len(self.acknowledged) >= enough)

    async def check(self) -> None:
        """All that was acknowledged is there; whoever was refused was told so in the agreed way."""
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        assert all(error.reason is Reason.SERVICE_UNAVAILABLE for error in self.refused)
        there, query = set(), task_service_pb2.ListTasksRequest(page_size=1000)
        while True:
            page = await self._store.list_page("ann", query)
            there |= {task.id for task in page.tasks}
            if not page.next_page_token:
                break
            query = task_service_pb2.ListTasksRequest(page_size=1000, page_token=page.next_page_token)
        assert self.acknowledged
        assert self.acknowledged <= there


async def test_locked_file_fails_writes_after_a_bounded_wait_and_then_recovers(kept: SqlTaskStore, file: Path) -> None:
    claim = await begun(kept, "task-1")
    loop = asyncio.get_running_loop()
    with locked(file):
        since = loop.time()
        errors = await asyncio.gather(
            *(refused(kept.submit(a_task(f"task-{number}"))) for number in range(2, 40)),
            refused(kept.end(claim, DONE, NOW)),
            refused(kept.renew("r1", NOW + 100)),
        )
        # All waited at once, for one lock: not each for its own.
        assert loop.time() - since < 20 * PATIENCE_MS / 1000
        assert all(error.retry_after_seconds for error in errors)
        assert (await seen(kept, "task-1")).state == task_pb2.TASK_STATE_RUNNING
    assert await kept.end(claim, DONE, NOW)
    assert len((await kept.list_page("ann", task_service_pb2.ListTasksRequest())).tasks) == 1
    await kept.submit(a_task("task-2"))


async def test_submitters_survive_a_long_file_lock(kept: SqlTaskStore, file: Path) -> None:
    submitters = Submitters(kept)
    await submitters.go_on()
    with locked(file):
        # As many as wait are refused every PATIENCE_MS: this is as long as twenty seconds with the real five.
        await submitters.until(lambda: len(submitters.refused) >= 4 * 8)
    await submitters.go_on()
    await submitters.check()


async def test_lock_released_in_time_only_delays_the_write(kept: SqlTaskStore, file: Path) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    submitting = asyncio.create_task(kept.submit(a_task("task-1")))
    assert await kept.get("ann", "task-1") is None
    connection.close()
    await submitting
    assert (await seen(kept, "task-1")).state == task_pb2.TASK_STATE_PENDING


async def test_full_disk_acknowledges_nothing_and_still_reads(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    long = TaskOutcome(state=task_pb2.TASK_STATE_COMPLETED, chunks=[a_chunk(1, "x" * 2 * MOST_BYTES)])
    with full_disk():
        error = await refused(kept.end(claim, long, NOW))
        assert error.retry_after_seconds
        await refused(kept.submit(a_task("task-2", prompt="x" * 2 * MOST_BYTES)))
        assert (await seen(kept, "task-1")).state == task_pb2.TASK_STATE_RUNNING
    assert await kept.get("ann", "task-2") is None
    assert await kept.end(claim, long, NOW)
    assert await said(kept, "task-1", 1) == ["x" * 2 * MOST_BYTES]


async def test_submitters_survive_a_full_disk(kept: SqlTaskStore) -> None:
    submitters = Submitters(kept)
    await submitters.go_on()
    with full_disk():
        await submitters.until(lambda: len(submitters.refused) >= 20)
    await submitters.go_on()
    await submitters.check()


async def test_cut_postgres_connections_lose_nothing(postgres: PostgresServer, postgres_database: str) -> None:
    store = store_on(postgres.url(postgres_database))
    await store.start()
    claim = await begun(store, "task-1")
    submitters = Submitters(store)
    for _ in range(3):
        await submitters.go_on()
        await asyncio.to_thread(postgres.sql, CUT_ALL)
    await submitters.go_on()
    await submitters.check()
    assert await store.append(claim, [a_chunk(1, "a")])
    await store.stop()


@pytest.mark.slow("a PostgreSQL server")
@pytest.mark.skipif(sys.version_info[:2] > PYTHON_OF_THE_WHEEL, reason="there is no wheel pgserver for this Python")
async def test_store_reconnects_after_a_postgres_restart() -> None:
    with running_postgres() as server, server.fresh_database() as name:
        store = store_on(server.url(name))
        await store.start()
        claim = await begun(store, "task-1")
        submitters = Submitters(store)
        await submitters.go_on()
        await crash(server, name)
        await submitters.go_on()
        await submitters.check()
        assert await store.end(claim, DONE, NOW)
        await store.stop()

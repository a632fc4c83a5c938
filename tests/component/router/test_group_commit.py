"""Writes that share a transaction, on a real SQLite file."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.store.database import RouterDatabase
from router_svc.store.group_commit import SHARED_PART, GroupCommit
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

PATIENCE_MS = 20
MAX_BATCH = 4
MAX_WAITING = 8


class CountingDatabase(RouterDatabase):
    """Counts transactions; the next one waits at its end for `gate`, and fails there where `breaks_at_end`."""

    def __init__(self, database_url: str) -> None:
        super().__init__(database_url)
        self.transactions = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.breaks_at_end = False

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        self.transactions += 1
        async with super().writing() as connection:
            yield connection
            await self.gate.wait()
            if self.breaks_at_end:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "the connection broke")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "router.db"


@pytest.fixture
async def database(file: Path) -> AsyncIterator[CountingDatabase]:
    database = CountingDatabase(f"sqlite+aiosqlite:///{file}")
    await database.open()
    async with database.writing() as connection:
        await connection.execute(text("CREATE TABLE notes (word TEXT UNIQUE)"))
    database.transactions = 0
    yield database
    await database.close()


@pytest.fixture
async def commits(database: CountingDatabase) -> AsyncIterator[GroupCommit]:
    commits = GroupCommit(database, max_batch=MAX_BATCH, max_waiting=MAX_WAITING)
    await commits.start()
    yield commits
    database.gate.set()
    await commits.stop()


def noting(word: str) -> Callable[[AsyncConnection], Awaitable[str]]:
    async def op(connection: AsyncConnection) -> str:
        await connection.execute(text("INSERT INTO notes VALUES (:word)"), {"word": word})
        return word

    return op


async def failing(connection: AsyncConnection) -> None:
    await connection.execute(text("INSERT INTO notes VALUES ('half')"))
    raise WeftError(Reason.NOT_FOUND, "nothing there")


def kept(file: Path) -> list[str]:
    """What is on disk, read over another connection."""
    connection = sqlite3.connect(file)
    try:
        return [word for (word,) in connection.execute("SELECT word FROM notes ORDER BY word")]
    finally:
        connection.close()


async def under_way(commits: GroupCommit, database: CountingDatabase, op: Any) -> asyncio.Task[Any]:
    """It is in a transaction that does not end before `gate` is set."""
    database.gate.clear()
    begun = asyncio.Event()

    async def telling(connection: AsyncConnection) -> Any:
        done = await op(connection)
        begun.set()
        return done

    task = asyncio.create_task(commits.run(telling))
    await begun.wait()
    return task


async def queued(*awaited: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.ensure_future(each) for each in awaited]
    await asyncio.sleep(0)
    return tasks


async def test_an_idle_write_is_on_disk_when_it_returns(
    commits: GroupCommit, database: CountingDatabase, file: Path
) -> None:
    for number, word in enumerate(("a", "b"), 1):
        assert await commits.run(noting(word)) == word
        assert word in kept(file)
        assert database.transactions == number


async def test_what_comes_during_a_commit_shares_the_next_ones(
    commits: GroupCommit, database: CountingDatabase, file: Path
) -> None:
    first = await under_way(commits, database, noting("first"))
    others = await queued(*(commits.run(noting(str(number))) for number in range(MAX_BATCH + 1)))
    assert kept(file) == []
    assert not any(task.done() for task in (first, *others))
    database.gate.set()
    assert await asyncio.gather(first, *others) == ["first", "0", "1", "2", "3", "4"]
    assert database.transactions == 1 + 2


async def test_writes_of_a_kind_are_done_together_and_each_gets_its_own_result(
    commits: GroupCommit, database: CountingDatabase, file: Path
) -> None:
    batches: list[Sequence[str]] = []

    async def note_all(connection: AsyncConnection, words: Sequence[str]) -> Sequence[str | WeftError]:
        batches.append(words)
        await connection.execute(text("INSERT INTO notes VALUES (:word)"), [{"word": word} for word in words])
        return [WeftError(Reason.ALREADY_EXISTS, "so it is") if word == "b" else word.upper() for word in words]

    first = await under_way(commits, database, noting("first"))
    a, x, b, c = await queued(
        *(commits.share(note_all, "a"), commits.run(noting("x")), commits.share(note_all, "b")),
        commits.share(note_all, "c"),
    )
    database.gate.set()
    assert list(await asyncio.gather(first, a, x, c)) == ["first", "A", "x", "C"]
    with pytest.raises(WeftError, match="so it is"):
        await b
    assert batches == [["a", "b", "c"]]
    assert kept(file) == ["a", "b", "c", "first", "x"]


async def test_a_write_that_fails_fails_alone(commits: GroupCommit, database: CountingDatabase, file: Path) -> None:
    first = await under_way(commits, database, noting("first"))
    others = await queued(
        commits.run(noting("a")), commits.run(failing), commits.run(noting("first")), commits.run(noting("b"))
    )
    database.gate.set()
    a, missing, twice, b = await asyncio.gather(*others, return_exceptions=True)
    assert (await first, a, b) == ("first", "a", "b")
    assert isinstance(missing, WeftError)
    assert missing.reason is Reason.NOT_FOUND
    assert isinstance(twice, WeftError)
    assert twice.reason is Reason.SERVICE_UNAVAILABLE
    assert kept(file) == ["a", "b", "first"]


async def test_a_caller_that_stops_waiting_is_left_out_and_spoils_nothing(
    commits: GroupCommit, database: CountingDatabase, file: Path
) -> None:
    first = await under_way(commits, database, noting("first"))
    a, gone, b = await queued(*(commits.run(noting(word)) for word in ("a", "gone", "b")))
    gone.cancel()
    first.cancel()
    await asyncio.sleep(0)
    database.gate.set()
    assert list(await asyncio.gather(a, b)) == ["a", "b"]
    assert first.cancelled()
    assert gone.cancelled()
    assert kept(file) == ["a", "b", "first"]


async def test_more_than_may_wait_are_refused_at_once(commits: GroupCommit, database: CountingDatabase) -> None:
    first = await under_way(commits, database, noting("first"))
    waiting = await queued(*(commits.run(noting(str(number))) for number in range(MAX_WAITING)))
    with pytest.raises(WeftError) as found:
        await commits.run(noting("more"))
    assert found.value.reason is Reason.SERVICE_UNAVAILABLE
    assert found.value.retry_after_seconds
    database.gate.set()
    await asyncio.gather(first, *waiting)
    await commits.run(noting("more"))


async def test_a_commit_that_fails_succeeds_for_no_caller_and_is_not_retried(
    commits: GroupCommit, database: CountingDatabase, file: Path
) -> None:
    first = await under_way(commits, database, noting("first"))
    others = await queued(commits.run(noting("a")), commits.run(noting("b")))
    database.breaks_at_end = True
    database.gate.set()
    outcomes = await asyncio.gather(first, *others, return_exceptions=True)
    assert [getattr(each, "reason", None) for each in outcomes] == [Reason.SERVICE_UNAVAILABLE] * 3
    assert len({id(each) for each in outcomes}) == 3
    assert database.transactions == 2
    assert kept(file) == []
    database.breaks_at_end = False
    assert await commits.run(noting("a")) == "a"


async def test_where_no_transaction_can_begin_all_waiting_writes_fail_after_one_wait(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setattr("weft.sql.database.BUSY_TIMEOUT_MS", PATIENCE_MS)
    database = CountingDatabase(f"sqlite+aiosqlite:///{file}")
    await database.open()
    commits = GroupCommit(database, max_batch=MAX_BATCH, max_waiting=MAX_WAITING)
    await commits.start()
    lock = sqlite3.connect(file, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    writes = await queued(*(commits.run(noting(str(number))) for number in range(MAX_WAITING)))
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [getattr(each, "reason", None) for each in outcomes] == [Reason.SERVICE_UNAVAILABLE] * MAX_WAITING
    assert database.transactions == 1
    lock.execute("CREATE TABLE notes (word TEXT UNIQUE)")
    lock.execute("COMMIT")
    lock.close()
    assert await commits.run(noting("a")) == "a"
    await commits.stop()
    await database.close()


async def test_a_stop_ends_what_waits_and_refuses_the_rest(
    commits: GroupCommit, database: CountingDatabase, file: Path
) -> None:
    first = await under_way(commits, database, noting("first"))
    waiting = await queued(*(commits.run(noting(str(number))) for number in range(MAX_BATCH + 1)))
    (stopping,) = await queued(commits.stop())
    with pytest.raises(WeftError, match="not open"):
        await commits.run(noting("late"))
    database.gate.set()
    await stopping
    assert len(await asyncio.gather(first, *waiting)) == MAX_BATCH + 2
    assert len(kept(file)) == MAX_BATCH + 2
    await commits.stop()


async def test_however_much_comes_from_outside_leases_are_still_prolonged(
    commits: GroupCommit, database: CountingDatabase, file: Path
) -> None:
    async def note_all(connection: AsyncConnection, words: Sequence[str]) -> Sequence[str]:
        return [await noting(word)(connection) for word in words]

    first = await under_way(commits, database, noting("first"))
    flood = await queued(*(commits.share(note_all, f"out{number}") for number in range(2 * MAX_WAITING)))
    (renewal,) = await queued(commits.run(noting("renewal")))
    database.gate.set()
    outcomes = await asyncio.gather(first, *flood, return_exceptions=True)
    assert await renewal == "renewal"
    refusals = [each.message for each in outcomes if isinstance(each, WeftError)]
    assert len(refusals) == 2 * MAX_WAITING - SHARED_PART * MAX_WAITING
    assert "renewal" in kept(file)

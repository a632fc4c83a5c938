"""How a database is closed while transactions are open or cancelled."""

import asyncio
from functools import partial
from pathlib import Path

import aiosqlite
import pytest
from sqlalchemy import make_url, text

import router_svc.store.database
from router_svc.store.database import RouterDatabase
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.database import SqliteEngine


async def opened(path: Path) -> RouterDatabase:
    database = RouterDatabase(f"sqlite+aiosqlite:///{path}/router.db")
    await database.open()
    return database


async def test_a_connection_that_is_stopped_twice_answers_both_times(tmp_path: Path) -> None:
    """Found under load: the event loop of a router whose upload was cancelled at its stop never closed."""
    engine = SqliteEngine(make_url(f"sqlite+aiosqlite:///{tmp_path}/x.db"))
    async with engine.connect() as connection:
        driver = (await connection.get_raw_connection()).driver_connection
        assert driver is not None
        stops = [driver.stop(), driver.stop()]
        await asyncio.wait_for(asyncio.gather(*stops), 5)
    await engine.dispose()


async def test_the_librarys_own_connection_leaves_the_second_stop_without_an_answer(tmp_path: Path) -> None:
    """The control; once this fails, `SqliteConnection` is no longer needed."""
    connection = await aiosqlite.connect(tmp_path / "x.db")
    first, second = connection.stop(), connection.stop()
    assert first is not None
    assert second is not None
    await asyncio.wait_for(first, 5)
    assert not (await asyncio.wait([second], timeout=0.2))[0]


async def test_a_close_waits_for_the_transaction_that_is_open(tmp_path: Path) -> None:
    database = await opened(tmp_path)
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def write() -> None:
        async with database.writing() as connection:
            inside.set()
            await go_on.wait()
            await connection.execute(text("CREATE TABLE kept (x INTEGER)"))

    writing = asyncio.create_task(write())
    await inside.wait()
    closing = asyncio.create_task(database.close())
    await asyncio.wait([closing], timeout=0.05)
    assert not closing.done()
    with pytest.raises(WeftError) as refused:
        async with database.reading():
            pass
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
    go_on.set()
    await writing
    await closing
    again = await opened(tmp_path)
    async with again.reading() as connection:
        await connection.execute(text("SELECT x FROM kept"))
    await again.close()


async def test_a_close_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_svc.store.database, "CLOSE_WAIT_SECONDS", 0.05)
    database = await opened(tmp_path)
    inside = asyncio.Event()

    async def hang() -> None:
        async with database.writing():
            inside.set()
            await asyncio.Event().wait()

    hanging = asyncio.create_task(hang())
    await inside.wait()
    await asyncio.wait_for(database.close(), 5)
    hanging.cancel()
    await asyncio.wait([hanging])


@pytest.mark.slow("runs whole services")
def test_an_event_loop_ends_whose_transactions_were_cancelled_at_any_moment(tmp_path: Path) -> None:
    async def cancelled_after(turns: int) -> None:
        database = await opened(tmp_path)

        async def write() -> None:
            async with database.writing() as connection:
                await connection.execute(text("SELECT 1"))

        writing = asyncio.create_task(write())
        for _ in range(turns):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.sleep(0)
        writing.cancel()
        await database.close()

    for turns in range(1, 40):
        asyncio.run(partial(cancelled_after, turns)())

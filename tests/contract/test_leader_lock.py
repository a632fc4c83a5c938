"""The lock of the router that leads on a real PostgreSQL, and what a former leader writes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router_svc.store.database import ROUTER_OWNER, RouterDatabase
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft.sql.address import address_of
from weft.sql.connections import Tx
from weft.sql.owners import TakenOverError
from weft.sql.standby import owner_watch_of
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

LIMIT_SECONDS = 30.0
COUNT = "SELECT count(*) FROM promises"


Pair = tuple[RouterDatabase, RouterDatabase]


@asynccontextmanager
async def writing(database: RouterDatabase) -> AsyncIterator[asyncio.Task[None]]:
    """In a transaction, which goes on at the end of the block."""
    inside, go_on = threading.Event(), threading.Event()

    def write(tx: Tx) -> None:
        tx.execute(COUNT)
        inside.set()
        go_on.wait(LIMIT_SECONDS)
        tx.execute(COUNT)

    task = asyncio.create_task(database.run(write))
    await asyncio.to_thread(inside.wait, LIMIT_SECONDS)
    yield task
    go_on.set()


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[Pair]:
    made = tuple(RouterDatabase(postgres_url, leads_at=f"10.0.0.{number}:7071") for number in (1, 2))
    yield made[0], made[1]
    for each in made:
        await each.close()


async def end_lock(postgres: PostgresServer, name: str) -> None:
    """Ends the connection that holds the lock, as a standby does to a frozen leader."""
    statement = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        f"WHERE application_name = '{ROUTER_OWNER.owner_application}' AND datname = current_database()"
    )
    await asyncio.to_thread(postgres.sql, statement, name)


async def test_another_router_can_lead_after_the_leader_releases_the_lock(pair: Pair) -> None:
    first, second = pair
    await first.open()
    await first.change(COUNT)
    with pytest.raises(WeftError) as raised:
        await second.open()
    assert raised.value.reason is Reason.ALREADY_EXISTS
    await first.close()
    await second.open()
    await second.change(COUNT)
    assert not await second.beat()


async def test_takeover_ends_an_open_transaction_of_a_frozen_leader(
    pair: Pair, postgres: PostgresServer, postgres_database: str
) -> None:
    first, second = pair
    await first.open()
    async with asyncio.timeout(LIMIT_SECONDS), writing(first) as late:
        await end_lock(postgres, postgres_database)
        await second.open()
    with pytest.raises(WeftError) as raised:
        await late
    assert raised.value.reason is Reason.SERVICE_UNAVAILABLE
    with pytest.raises(WeftError) as raised:
        await first.change(COUNT)
    assert raised.value.reason is Reason.ROUTER_STANDBY
    with pytest.raises(TakenOverError):
        await first.beat()
    await second.change(COUNT)


async def test_standby_knows_the_leader_address_and_waits_for_it_to_end(pair: Pair, postgres_url: str) -> None:
    first, _ = pair
    await first.open()
    await first.beat()
    watch = owner_watch_of(address_of(postgres_url), ROUTER_OWNER, SystemClock(), LIMIT_SECONDS)
    assert watch is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        waiting = asyncio.create_task(watch.until_free())
        while not watch.owner_address:  # noqa: ASYNC110 - another process's word
            await asyncio.sleep(0.01)
        assert watch.owner_address == "10.0.0.1:7071"
        assert not waiting.done()
        await first.close()
        await waiting


async def test_registry_and_router_can_own_one_database(pair: Pair, postgres_url: str) -> None:
    from registry_svc.mesh.store import SqlStore  # noqa: PLC0415 - of this case alone

    first, _ = pair
    await first.open()
    registry = SqlStore(postgres_url)
    await registry.open()
    await first.beat()
    await registry.beat()
    await registry.close()


async def test_sqlite_process_leads_without_a_lock(tmp_path: Path) -> None:
    database = RouterDatabase(tmp_path / "router.db", leads_at="unix:/r")
    assert not database.may_have_standby
    await database.open()
    await database.change(COUNT)
    await database.close()

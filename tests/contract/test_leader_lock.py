"""The lock of the router that leads on a real PostgreSQL, and the fence of what a former leader writes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from router_svc.leadership import ROUTER_OWNER, LeaderLock
from router_svc.store.database import RouterDatabase
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.address import address_of
from weft.sql.connections import Tx
from weft.sql.owners import TakenOverError
from weft.sql.standby import owner_watch_of
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

LIMIT_SECONDS = 30.0
COUNT = "SELECT count(*) FROM promises"


@dataclass
class Member:
    """A router's database, and its lock."""

    database: RouterDatabase
    lock: LeaderLock

    async def write(self) -> None:
        await self.database.change(COUNT)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[asyncio.Task[None]]:
        """In a transaction, which goes on at the end of the block."""
        inside, go_on = threading.Event(), threading.Event()

        def write(tx: Tx) -> None:
            tx.execute(COUNT)
            inside.set()
            go_on.wait(LIMIT_SECONDS)
            tx.execute(COUNT)

        writing = asyncio.create_task(self.database.run(write))
        await asyncio.to_thread(inside.wait, LIMIT_SECONDS)
        yield writing
        go_on.set()

    async def close(self) -> None:
        await self.lock.release()
        await self.database.close()


async def a_member(url: str, address: str) -> Member:
    database = RouterDatabase(url)
    await database.open()
    return Member(database, LeaderLock(database, address))


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[tuple[Member, Member]]:
    made = await a_member(postgres_url, "10.0.0.1:7071"), await a_member(postgres_url, "10.0.0.2:7071")
    yield made
    for each in made:
        await each.close()


async def end_lock(postgres: PostgresServer, name: str) -> None:
    """Ends the connection that holds the lock, as a standby does to a frozen leader."""
    statement = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        f"WHERE application_name = '{ROUTER_OWNER.owner_application}' AND datname = current_database()"
    )
    await asyncio.to_thread(postgres.sql, statement, name)


async def refused(member: Member) -> Reason:
    with pytest.raises(WeftError) as raised:
        await member.write()
    return raised.value.reason


async def test_one_router_leads_and_another_one_may_when_it_has_released_the_lock(pair: tuple[Member, Member]) -> None:
    first, second = pair
    await first.lock.take()
    await first.write()
    with pytest.raises(WeftError) as raised:
        await second.lock.take()
    assert raised.value.reason is Reason.ALREADY_EXISTS
    await first.lock.release()
    await second.lock.take()
    await second.write()
    assert not await second.lock.beat()


async def test_a_leader_that_was_replaced_writes_nothing_any_more(
    pair: tuple[Member, Member], postgres: PostgresServer, postgres_database: str
) -> None:
    first, second = pair
    await first.lock.take()
    await end_lock(postgres, postgres_database)
    await second.lock.take()
    assert await refused(first) is Reason.ROUTER_STANDBY
    with pytest.raises(TakenOverError):
        await first.lock.beat()
    await second.write()


async def test_a_transaction_that_a_frozen_leader_left_open_is_ended_at_the_takeover(
    pair: tuple[Member, Member], postgres: PostgresServer, postgres_database: str
) -> None:
    first, second = pair
    await first.lock.take()
    async with asyncio.timeout(LIMIT_SECONDS), first.writing() as late:
        await end_lock(postgres, postgres_database)
        await second.lock.take()
    with pytest.raises(WeftError) as raised:
        await late
    assert raised.value.reason is Reason.SERVICE_UNAVAILABLE
    assert await refused(first) is Reason.ROUTER_STANDBY


async def test_a_heartbeat_passes_a_transaction_of_the_same_leader(pair: tuple[Member, Member]) -> None:
    first, _ = pair
    await first.lock.take()
    async with asyncio.timeout(LIMIT_SECONDS), first.writing() as writing:
        await first.lock.beat()
    await writing


async def test_a_standby_knows_where_the_leader_serves_and_waits_for_its_end(
    pair: tuple[Member, Member], postgres_url: str
) -> None:
    first, _ = pair
    await first.lock.take()
    await first.lock.beat()
    watch = owner_watch_of(address_of(postgres_url), ROUTER_OWNER, SystemClock(), LIMIT_SECONDS)
    assert watch is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        waiting = asyncio.create_task(watch.until_free())
        while not watch.owner_address:  # noqa: ASYNC110 - another process's word
            await asyncio.sleep(0.01)
        assert watch.owner_address == "10.0.0.1:7071"
        assert not waiting.done()
        await first.lock.release()
        await waiting


async def test_a_registry_and_a_router_may_own_one_database(pair: tuple[Member, Member], postgres_url: str) -> None:
    from registry_svc.mesh.store import SqlStore  # noqa: PLC0415 - of this case alone

    first, _ = pair
    await first.lock.take()
    registry = SqlStore(postgres_url)
    await registry.open()
    await first.lock.beat()
    await registry.beat()
    await registry.close()


async def test_on_sqlite_the_one_process_leads_without_a_lock(tmp_path: Path) -> None:
    member = await a_member(f"sqlite+aiosqlite:///{tmp_path}/router.db", "unix:/r")
    assert not member.lock.may_have_standby
    await member.lock.take()
    await member.write()
    await member.close()

"""The watch of a standby on a real PostgreSQL: who holds the lock, whether it is alive, and what is ended."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from stored_values import stored

from registry_svc.mesh.store import SqlStore
from registry_svc.store.database import REGISTRY_OWNER
from weft.kernel.time.clock import SystemClock
from weft.sql.address import address_of
from weft.sql.owners import TakenOverError
from weft.sql.standby import OwnerWatch, owner_watch_of

pytest_plugins = ("database_fixtures",)

LIMIT_SECONDS = 30.0
SILENCE_SECONDS = 2.5
"""Longer than a busy machine keeps an owner that heartbeats from its heartbeat."""
SHORT_SILENCE_SECONDS = 0.5
"""For owners that do not beat."""


@pytest.fixture
async def owner(postgres_url: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(postgres_url, "10.0.0.1:7070")
    await store.open()
    yield store
    await store.close()


def watch_of(url: str, silence_seconds: float = SHORT_SILENCE_SECONDS) -> OwnerWatch:
    watch = owner_watch_of(address_of(url), REGISTRY_OWNER, SystemClock(), silence_seconds)
    assert watch is not None
    return watch


async def beat_for(store: SqlStore, seconds: float) -> list[bool]:
    """Beats several times a second, for several silences."""
    loop = asyncio.get_running_loop()
    end, seen = loop.time() + seconds, list[bool]()
    while loop.time() < end:
        seen.append(await store.beat())
        await asyncio.sleep(0.2)
    return seen


async def test_standby_waits_while_the_owner_heartbeats_and_takes_over_when_it_closes(
    owner: SqlStore, postgres_url: str
) -> None:
    watch = watch_of(postgres_url, SILENCE_SECONDS)
    waiting = asyncio.create_task(watch.until_free())
    seen = await beat_for(owner, 2 * SILENCE_SECONDS)
    assert not waiting.done()
    assert watch.owner_address == "10.0.0.1:7070"
    # The owner notices that it has a standby.
    assert seen[-1]
    await owner.close()
    async with asyncio.timeout(LIMIT_SECONDS):
        await waiting


async def test_silent_owner_is_terminated_and_cannot_write_after_replacement(
    owner: SqlStore, postgres_url: str
) -> None:
    await owner.beat()
    async with asyncio.timeout(LIMIT_SECONDS):
        await watch_of(postgres_url).until_free()
    successor = SqlStore(postgres_url)
    await successor.open()
    try:
        with pytest.raises(TakenOverError):
            await owner.beat()
        with pytest.raises(TakenOverError):
            await owner.save_session(stored())
        assert (await successor.load()).sessions == ()
    finally:
        await successor.close()


async def test_terminated_connection_regains_ownership_if_no_other_registry_took_over(
    owner: SqlStore, postgres_url: str
) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        await watch_of(postgres_url).until_free()
    await owner.beat()
    await owner.save_session(stored())
    assert (await owner.load()).sessions == (stored(),)


async def test_owner_without_heartbeats_is_never_terminated(owner: SqlStore, admin: Any, postgres_url: str) -> None:
    # As a registry of an earlier version.
    await admin.execute("UPDATE ownership SET beat_at = NULL, backend_pid = NULL")
    waiting = asyncio.create_task(watch_of(postgres_url).until_free())
    await asyncio.sleep(4 * SHORT_SILENCE_SECONDS)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await owner.save_session(stored())


async def test_owner_of_a_database_without_tables_is_not_terminated(admin: Any, postgres_url: str) -> None:
    await admin.execute("SELECT pg_advisory_lock(%s)", REGISTRY_OWNER.lock_key)
    waiting = asyncio.create_task(watch_of(postgres_url).until_free())
    await asyncio.sleep(4 * SHORT_SILENCE_SECONDS)
    assert not waiting.done()
    await admin.execute("SELECT pg_advisory_unlock(%s)", REGISTRY_OWNER.lock_key)
    async with asyncio.timeout(LIMIT_SECONDS):
        await waiting


async def test_standby_resumes_watching_after_its_connection_is_cut(
    owner: SqlStore, admin: Any, postgres_url: str
) -> None:
    watch = watch_of(postgres_url, SILENCE_SECONDS)
    waiting = asyncio.create_task(watch.until_free())
    cut = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'weft-registry-standby'"
    )
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await admin.fetchval(cut):  # noqa: ASYNC110 - the server is asked
            await asyncio.sleep(0.05)
    await beat_for(owner, 2 * SILENCE_SECONDS)
    await owner.close()
    async with asyncio.timeout(LIMIT_SECONDS):
        await waiting


def test_sqlite_does_not_support_standbys(sqlite_url: str) -> None:
    assert owner_watch_of(address_of(sqlite_url), REGISTRY_OWNER, SystemClock(), SILENCE_SECONDS) is None

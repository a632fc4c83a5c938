"""Registries that are killed with kill -9, on a real database."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from lease_stage import GIB, MARGIN, SimulatedHost, Stage, program

from registry_svc.ledger.lease_store import LeaseStore, StoredLedger
from registry_svc.mesh.store import SqlStore

CHILD = Path(__file__).parent / "lease_child.py"
ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 30.0
LIVES = 5


async def child(database_url: str, what: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(CHILD),
        database_url,
        what,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


async def stored(database_url: str) -> StoredLedger:
    store = SqlStore(database_url)
    await store.open()
    found = await LeaseStore(store).load()
    await store.close()
    return found


@pytest.mark.slow("kills or restarts a service")
async def test_lease_committed_before_a_registry_kill_is_restored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    process = await child(url, "commit")
    async with asyncio.timeout(LIMIT_SECONDS):
        _, errors = await process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    (grant,) = (await stored(url)).grants
    assert (grant.shares, grant.fencing_number) == (((0, 20 * GIB),), 1)

    # The next registry books it still, for nobody can know whether it is in use, until it was never renewed.
    stage = Stage(SimulatedHost(totals=(24 * GIB,)))
    stage.memory_store.grants, stage.memory_store.last_fencing_number = {grant.id: grant}, 1
    async with stage:
        await stage.look()
        assert stage.states() == ["work held"]
        waits = stage.acquire(program("another"), 20 * GIB)
        await stage.pass_time(89.0)
        await stage.look()
        assert waits.granted is None
        await stage.pass_time(2.0)
        assert stage.states() == ["work orphaned"]
        await stage.pass_time(6.0)
        await stage.look()
        assert waits.lease.grant.fencing_number == 2


@pytest.mark.slow("kills or restarts a service")
async def test_repeated_registry_kills_neither_double_book_nor_lose_acknowledged_leases(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    told: dict[str, int] = {}
    given_up: set[str] = set()
    highest = 0
    for life in range(LIVES):
        process = await child(url, "work")
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_SECONDS):
            first = await process.stdout.readline()
        assert first, "nothing was granted"
        await asyncio.sleep(0.03 * (life % 4))
        process.kill()
        rest, errors = await process.communicate()
        assert process.returncode == -signal.SIGKILL, errors.decode()
        # The last line may have been cut off in the middle.
        lines = (first + rest).decode().rsplit("\n", 1)[0].splitlines()
        for word, lease_id, number in (line.split() for line in lines):
            if word == "granted":
                assert int(number) > highest, "a fencing number came again"
                highest = told[lease_id] = int(number)
            else:
                given_up.add(lease_id)
        ledger = await stored(url)
        booked: Counter[int] = Counter()
        for grant in ledger.grants:
            booked.update(dict(grant.shares))
        assert all(size <= 24 * GIB - MARGIN for size in booked.values()), booked
        assert ledger.last_fencing_number >= highest
        kept = {grant.id: grant.fencing_number for grant in ledger.grants}
        assert all(kept.get(lease_id) == number for lease_id, number in told.items() if lease_id not in given_up)
        # Its holders died with it; otherwise the devices would be full after a few lives.
        store = SqlStore(url)
        await store.open()
        await LeaseStore(store).remove([grant.id for grant in ledger.grants])
        await store.close()
        told.clear()
    assert highest >= LIVES

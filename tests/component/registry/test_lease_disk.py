"""What is on disk of a lease, and what happens when the disk or the registry fails."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from lease_stage import GIB, MARGIN, SimulatedHost, Stage, use

from registry_svc.ledger.lease_store import LeaseStore, StoredLedger
from registry_svc.mesh.store import SqlStore
from weft.gpu.snapshot import Source
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

ROOM = 24 * GIB - MARGIN


async def test_available_memory_is_granted_immediately_and_durable_before_the_response(stage: Stage) -> None:
    lease = await stage.lease(stage.runner(), 5 * GIB)
    assert lease.grant.shares == ((0, 5 * GIB),)
    assert stage.memory_store.grants == {lease.grant.id: lease.grant}
    assert stage.states() == ["m1 held"]


async def test_call_cancelled_while_its_grant_is_written_leaves_nothing(stage: Stage) -> None:
    stage.memory_store.gate = asyncio.Event()
    waits = stage.acquire(stage.runner(), GIB)
    await stage.settle()
    await waits.cancel()
    stage.memory_store.gate.set()
    await stage.settle()
    assert stage.states() == ["m1 releasing"]
    await stage.pass_time(5.0)
    await stage.look()
    assert (stage.states(), stage.memory_store.grants) == ([], {})


async def test_holder_returning_while_its_lease_end_is_written_has_lost_it() -> None:
    async with Stage(restart_grace_seconds=0.0) as stage:
        lease, process = await stage.loaded(stage.runner(), GIB)
        await stage.pass_time(31.0)
        stage.memory_store.gate = asyncio.Event()
        stage.host.end(process)
        await stage.look()
        assert stage.states() == ["m1 orphaned"]
        assert (await stage.renew(stage.runner(), use(lease))).lost_lease_ids == (lease.grant.id,)
        stage.memory_store.gate.set()
        await stage.settle()
        assert stage.states() == []


async def test_processes_are_still_tracked_after_a_restart_if_devices_cannot_be_inspected() -> None:
    host = SimulatedHost(source=Source.DECLARED)
    async with Stage(host, restart_grace_seconds=0.0) as stage:
        _, process = await stage.loaded(stage.runner(), ROOM)
        await stage.restart(politely=False)
        await stage.pass_time(31.0)
        await stage.look()
        await stage.pass_time(10.0)
        await stage.look()
        assert stage.states() == ["m1 orphaned"]
        host.end(process)
        await stage.look()
        assert stage.states() == []


async def test_leases_of_an_unobserved_host_are_purged_after_a_timeout() -> None:
    async with Stage(restart_grace_seconds=0.0, orphan_keep_seconds=100.0) as stage:
        await stage.loaded(stage.runner(), GIB)
        await stage.pass_time(129.0)
        assert stage.states() == ["m1 orphaned"]
        await stage.pass_time(3.0)
        assert (stage.states(), stage.memory_store.grants) == ([], {})
        await stage.pass_time(2.0)
        assert stage.ledger.hosts() == []


async def test_commit_in_doubt_extends_no_other_wait_and_is_granted_once_it_is_known(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry_svc.writer.DOUBT_SECONDS", 0.01)
    store = stage.memory_store
    store.gate = asyncio.Event()
    granted = stage.acquire(stage.runner(), GIB)
    await store.committed.wait()
    store.is_in_doubt = True
    other = stage.acquire(stage.runner("r2"), GIB, max_wait_seconds=5.0)
    await asyncio.sleep(0.05)
    await stage.pass_time(6.0)
    assert other.reason is Reason.SERVICE_UNAVAILABLE
    assert (granted.granted, granted.reason) == (None, None)
    store.is_in_doubt = False
    store.gate.set()
    await stage.settle()
    assert [granted.lease.grant.id] == list(store.grants)


async def test_nothing_is_granted_or_released_while_the_database_fails(stage: Stage) -> None:
    lease, process = await stage.loaded(stage.runner(), GIB)
    stage.memory_store.failing = True
    refused = stage.acquire(stage.runner(), GIB)
    await stage.settle()
    assert refused.reason is Reason.SERVICE_UNAVAILABLE
    with pytest.raises(WeftError):
        await stage.release(lease)
    assert stage.states() == ["m1 held"]
    assert (await stage.renew(stage.runner(), use(lease, process))).lost_lease_ids == ()
    stage.memory_store.failing = False
    stage.host.end(process)
    await stage.release(lease)
    await stage.look()
    assert stage.states() == []


async def test_wait_times_out_on_schedule_even_if_the_database_fails(stage: Stage) -> None:
    lease, process = await stage.loaded(stage.runner(), ROOM)
    waits = stage.acquire(stage.runner("r2"), GIB, max_wait_seconds=10.0)
    await stage.release(lease)
    stage.memory_store.failing = True
    stage.host.end(process)
    await stage.look()
    assert stage.states() == ["m1 releasing"], "its end cannot be written, so no step gets any further"
    await stage.pass_time(9.0)
    still_waits = waits.error is None
    assert still_waits
    await stage.pass_time(2.0)
    assert waits.reason is Reason.SERVICE_UNAVAILABLE


async def test_fencing_tokens_are_never_reused(stage: Stage) -> None:
    numbers = []
    for politely in (True, False, True):
        lease = await stage.lease(stage.runner(), GIB)
        numbers.append(lease.grant.fencing_number)
        await stage.release(lease)
        await stage.pass_time(6.0)
        await stage.look()
        assert stage.memory_store.grants == {}
        await stage.restart(politely=politely)
    assert numbers == [1, 2, 3]


CHILD = Path(__file__).parent / "lease_child.py"

ROOT = Path(__file__).parents[3]

LIMIT_SECONDS = 30.0

LIVES = 5


async def child(database_url: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(CHILD),
        database_url,
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
async def test_repeated_registry_kills_neither_double_book_nor_lose_acknowledged_leases(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    told: dict[str, int] = {}
    given_up: set[str] = set()
    highest = 0
    for life in range(LIVES):
        process = await child(url)
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

"""WatchHostMemory: hosts as they are, then each that changes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from kit.refusals import refused
from lease_stage import GIB, MARGIN, Stage, program

from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1.lease_service_pb2 import HostMemory, WatchHostMemoryResponse
from weft.kernel.errors.reasons import Reason

ROOM = 24 * GIB - MARGIN
WAIT_LIMIT_SECONDS = 30.0
Watch = AsyncGenerator[WatchHostMemoryResponse]


async def following(watch: Watch) -> HostMemory:
    async with asyncio.timeout(WAIT_LIMIT_SECONDS):
        return (await anext(watch)).host


@asynccontextmanager
async def watching(stage: Stage, count: int = 1) -> AsyncIterator[tuple[Watch, list[HostMemory]]]:
    """An open watch, and the hosts that it begins with."""
    async with aclosing(stage.ledger.watch_hosts()) as watch:
        first = [await anext(watch) for _ in range(count + 1)]
        assert first[-1].synced
        yield watch, [each.host for each in first[:-1]]


async def test_watch_starts_with_the_listed_hosts(stage: Stage) -> None:
    await stage.lease(stage.runner(), GIB)
    async with watching(stage) as (_, hosts):
        assert hosts == stage.ledger.hosts()


async def test_each_lease_and_snapshot_is_a_change(stage: Stage) -> None:
    await stage.look()
    async with watching(stage) as (watch, _):
        await stage.lease(stage.runner(), 2 * GIB, purpose="qwen")
        assert [lease.purpose for lease in (await following(watch)).leases] == ["qwen"]
        stage.host.spawn((0, GIB))
        await stage.look()
        assert (await following(watch)).devices[0].device.used_bytes == GIB


async def test_unread_changes_are_coalesced(stage: Stage) -> None:
    await stage.look()
    async with watching(stage) as (watch, _):
        for each in range(20):
            await stage.lease(stage.runner(f"r{each}"), GIB // 8)
        await stage.settle()
        assert len((await following(watch)).leases) == 20
        unread = asyncio.ensure_future(anext(watch))
        await stage.settle()
        assert not unread.done()
        unread.cancel()
        await asyncio.wait({unread})


async def test_waiting_requests_are_listed_in_queue_order_until_they_end(stage: Stage) -> None:
    await stage.lease(stage.runner(), ROOM, purpose="qwen")
    async with watching(stage) as (watch, _):
        first = stage.acquire(stage.runner("r2"), 9 * GIB, purpose="llama", max_wait_seconds=60.0)
        second = stage.acquire(program("train"), 3 * GIB, purpose="a run", max_wait_seconds=60.0)
        await stage.settle()
        host = await following(watch)
        assert host.waiting_count == 2
        assert [(wait.purpose, wait.holder.name, wait.bytes) for wait in host.waits] == [
            ("llama", "r2", 9 * GIB),
            ("a run", "train", 3 * GIB),
        ]
        assert host.waits[1].holder.kind == lease_pb2.LeaseHolder.KIND_PROGRAM
        assert "held by qwen" in host.waits[0].detail
        assert 0 < host.waits[0].remaining_wait.seconds <= 60
        await first.cancel()
        await second.cancel()
        await stage.settle()
        assert list((await following(watch)).waits) == []


async def test_host_without_observers_is_deleted_even_if_idle() -> None:
    async with Stage(orphan_keep_seconds=60.0) as stage:
        await stage.look()
        async with watching(stage) as (watch, _):
            deleted = asyncio.ensure_future(anext(watch))
            for _ in range(70):
                await stage.pass_time(1.0)
            async with asyncio.timeout(WAIT_LIMIT_SECONDS):
                assert (await deleted).deleted_host == stage.host.name


async def test_watch_ends_with_the_registry() -> None:
    stage = Stage()
    async with stage:
        await stage.look()
        watch = stage.ledger.watch_hosts()
        for _ in range(2):
            await anext(watch)
    with refused(Reason.SHUTTING_DOWN):
        await anext(watch)

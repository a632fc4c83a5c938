"""Batches that come in at once have no more room together than one after the other."""

import asyncio
from collections.abc import AsyncIterator

from stored_batches import line, many, refused, running

from weft.api.router.v1 import batch_service_pb2
from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)


async def test_batch_is_rejected_if_another_one_fills_the_open_task_limit_during_upload(database_url: str) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[batch_service_pb2.BatchLine]:
        yield line("a")
        begun.set()
        await go_on.wait()
        yield line("b")

    async with running(database_url, max_open_per_tenant=3) as world:
        first = asyncio.create_task(world.batches.create(world.new_batch(), slow()))
        await begun.wait()
        await world.batches.create(world.new_batch(), many(2))
        go_on.set()
        words = await refused(Reason.TOO_MANY_RESOURCES, first)
        assert "more than 3 tasks" in words
        assert await world.count("tasks") == 2
        assert await world.count("batches") == 1

"""A file store on a slow disk gets the time that it needs, as long as it makes progress."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

from test_batch_service import NEW_FILE, SILENCE_SECONDS, Silent, serving

from weft.api.router.v1 import file_service_pb2
from weft.durable.batches import MAX_PIECE_BYTES, FileClient
from weft.kernel.timestamps import stamp_of

PIECES = 16


class Slow(Silent):
    """Accepts the first chunk when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
        self.called.set()
        await self.go_on.wait()
        size = sum([len(data) async for data in content])
        now = datetime.now(UTC)
        return file_service_pb2.File(
            id="file-1",
            tenant=new.tenant,
            name=new.name,
            purpose=new.purpose,
            byte_count=size,
            create_time=stamp_of(now),
            expire_time=stamp_of(now),
        )


async def test_slow_store_write_is_awaited_beyond_the_response_timeout(tmp_path: Path) -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(PIECES):
            yield bytes(MAX_PIECE_BYTES)

    slow = Slow()
    async with serving(slow, tmp_path) as (_, channel):
        saving = asyncio.create_task(FileClient(channel, timeout_seconds=SILENCE_SECONDS).save(NEW_FILE, content()))
        await slow.called.wait()
        over, _ = await asyncio.wait({saving}, timeout=4 * SILENCE_SECONDS)
        assert not over
        slow.go_on.set()
        assert (await saving).byte_count == PIECES * MAX_PIECE_BYTES

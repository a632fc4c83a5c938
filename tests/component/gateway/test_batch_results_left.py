"""Results of batches that could not be written leave no files behind."""

import asyncio
from collections.abc import AsyncIterator

from batch_stage import line, stage
from file_script import HELLO, MemoryFiles

from weft.api.router.v1 import file_service_pb2
from weft.durable.batches import BATCH_INPUT


class SlowErrors(MemoryFiles):
    """Never reaches the end of a file of errors."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = asyncio.Event()

    async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
        if new.name.endswith("_error.jsonl"):
            self.entered.set()
            await asyncio.Event().wait()
        return await super().save(new, content)


async def test_output_file_is_deleted_if_writing_the_error_file_times_out() -> None:
    async with stage(SlowErrors(), finish_timeout_seconds=0.05) as at:
        made = await at.make(line("a"), line("b"))
        at.batches.end(made["id"], 0, outputs=HELLO)
        await at.batches.cancel("default", made["id"])
        found = await at.until_failed(made["id"])
        assert [error["code"] for error in found["errors"]["data"]] == ["deadline_exceeded"]
        assert [file.purpose for file, _ in at.files.kept.values()] == [BATCH_INPUT]


async def test_output_file_is_deleted_if_the_gateway_stops_before_the_error_file_is_written() -> None:
    files = SlowErrors()
    async with stage(files) as at:
        made = await at.make(line("a"), line("b"))
        at.batches.end(made["id"], 0, outputs=HELLO)
        await at.batches.cancel("default", made["id"])
        await files.entered.wait()
    assert [file.purpose for file, _ in files.kept.values()] == [BATCH_INPUT]

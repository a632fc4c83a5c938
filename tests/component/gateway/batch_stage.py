"""A gateway over files and batches in memory, and uploads to it."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

from file_script import MemoryBatches, MemoryFiles
from gateway_script import RunningGateway, serving

from gateway.gateway_config import BatchEdgeConfig, GatewayConfig
from weft.api.router.v1 import file_service_pb2
from weft.durable.batches import BATCH_INPUT

PATH = "/v1/batches"
CHAT: Final = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
LATE = datetime(2100, 1, 1, tzinfo=UTC)
Line = dict[str, Any]


def line(custom_id: str = "a", **fields: Any) -> Line:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": BODY, **fields}


def jsonl(*lines: Line | bytes) -> bytes:
    return b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in lines)


class Stage:
    """A gateway over files and batches in memory."""

    def __init__(self, gateway: RunningGateway, files: MemoryFiles, batches: MemoryBatches) -> None:
        self.gateway = gateway
        self.files = files
        self.batches = batches

    async def file(self, *lines: Line | bytes, tenant: str = "default", purpose: str = BATCH_INPUT) -> str:
        async def content() -> AsyncGenerator[bytes]:
            yield jsonl(*lines)

        return (
            await self.files.save(file_service_pb2.File(tenant=tenant, name="in.jsonl", purpose=purpose), content())
        ).id

    async def make(self, *lines: Line | bytes, **fields: Any) -> dict[str, Any]:
        """A batch of these lines, as answered."""
        status, answer = await self.ask(input_file_id=await self.file(*lines), **fields)
        assert status == 200, answer
        return answer

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
        asked = {"endpoint": CHAT, "completion_window": "24h", **fields}
        answer = await self.gateway.request("POST", PATH, asked, headers)
        return answer.status, answer.json

    async def get(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.gateway.request("GET", f"{PATH}/{batch_id}")).json
        return found

    async def until(self, batch_id: str, status: str) -> dict[str, Any]:
        """Poll until it has a status."""
        async with asyncio.timeout(10):
            while (found := await self.get(batch_id))["status"] != status:
                pass
        return found

    async def until_failed(self, batch_id: str) -> dict[str, Any]:
        """Poll until an error is shown."""
        async with asyncio.timeout(10):
            while (found := await self.get(batch_id))["errors"] is None:
                pass
        return found

    def lines_of(self, file_id: str) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.files.text(file_id).splitlines()]


@asynccontextmanager
async def stage(
    files: MemoryFiles | None = None, batches: MemoryBatches | None = None, **bounds: Any
) -> AsyncIterator[Stage]:
    files, batches = files or MemoryFiles(), batches or MemoryBatches()
    config = GatewayConfig(port=0, batches=BatchEdgeConfig(**bounds))
    async with serving(files=files, batches=batches, config=config) as gateway:
        yield Stage(gateway, files, batches)

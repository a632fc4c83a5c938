"""Publishes events of a prefix cache over ZeroMQ, as vLLM 0.32 does, and repeats missed batches."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from runner_svc.runtimes.kv_events import FLAG

_END = (-1).to_bytes(8, "big", signed=True)


def stored(*hashes: Any, parent: Any = None, session: str | None = None, **others: Any) -> dict[str, Any]:
    """Returns the event of stored blocks of 128 tokens."""
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": [1, 2]}
    return {**event, "block_size": 128, "lora_id": None, "medium": "GPU", "session_id": session, **others}


def removed(*hashes: Any, **others: Any) -> dict[str, Any]:
    """Returns the event of evicted blocks."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **others}


CLEARED = {"type": "AllBlocksCleared"}


class BlockPublisher:
    """The sockets of an engine that was started with these arguments."""

    def __init__(self, arguments: Sequence[str]) -> None:
        config = json.loads(arguments[arguments.index(FLAG) + 1])
        self._topic = config["topic"].encode()
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._events.setsockopt(zmq.SNDHWM, 100_000)
        self._events.bind(config["endpoint"])
        self._repeats = self._context.socket(zmq.ROUTER)
        self._repeats.bind(config["replay_endpoint"])
        self.kept: list[tuple[int, bytes]] = []
        """Batches that can be repeated."""
        self.next_number = 0
        self._repeating = asyncio.ensure_future(self._repeat())

    async def subscribed(self) -> None:
        """Returns once the runner follows the events."""
        async with asyncio.timeout(10.0):
            await self._events.recv()

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        """Publishes a batch; `lost`: only for repetition."""
        await self.send(msgspec.msgpack.encode([0.0, list(events), 0]), lost=lost)

    async def send(self, batch: bytes, *, lost: bool = False, topic: bytes | None = None) -> None:
        """Publishes bytes as a batch."""
        number, self.next_number = self.next_number, self.next_number + 1
        self.kept.append((number, batch))
        if not lost:
            await self._events.send_multipart([topic or self._topic, number.to_bytes(8, "big"), batch])

    async def send_frames(self, *frames: bytes) -> None:
        """Publishes a message of any form."""
        await self._events.send_multipart([self._topic, *frames])

    async def close(self) -> None:
        """Closes the sockets. Idempotent."""
        self._repeating.cancel()
        await asyncio.wait({self._repeating})
        self._context.destroy(linger=0)

    async def _repeat(self) -> None:
        while True:
            client, _, first = await self._repeats.recv_multipart()
            for number, batch in self.kept:
                if number >= int.from_bytes(first, "big"):
                    await self._repeats.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), batch])
            await self._repeats.send_multipart([client, b"", b"", _END, b""])


@asynccontextmanager
async def publisher(arguments: Sequence[str]) -> AsyncGenerator[BlockPublisher]:
    """Publishes for a runner that follows the events."""
    published = BlockPublisher(arguments)
    try:
        await published.subscribed()
        yield published
    finally:
        await published.close()

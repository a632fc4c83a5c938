"""Many compressed bodies that expand: other requests run between the steps of decoding."""

import asyncio
import gzip
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.gateway_config import GatewayConfig
from gateway.intake import body
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.content_coding import BodyDecoder

STEP_BYTES = 1000
BODIES = 8
BOMB = gzip.compress(bytes(20 * STEP_BYTES))


async def test_bodies_that_expand_together_decode_one_step_between_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 of them, every other request waited for 64 steps again and again, and all were in memory together."""
    turns, steps, decoders = 0, list[int](), list[BodyDecoder]()
    decode = BodyDecoder.decode

    def counted(decoder: BodyDecoder, data: bytes, limit: int) -> bytes:
        steps.append(turns)
        decoders.append(decoder)
        return decode(decoder, data, limit)

    monkeypatch.setattr(body, "_DECODED_STEP_BYTES", STEP_BYTES)
    monkeypatch.setattr(BodyDecoder, "decode", counted)
    app = SimpleNamespace(decoding=asyncio.Lock())
    scope: dict[str, Any] = {"type": "http", "app": app, "headers": [(b"content-encoding", b"gzip")]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BOMB, "more_body": False}

    async def read() -> None:
        with pytest.raises(WeftError, match="larger than"):
            await body.read_body(scope, receive, GatewayConfig(port=0), max_bytes=10 * STEP_BYTES)

    reading = [asyncio.create_task(read()) for _ in range(BODIES)]
    while not all(task.done() for task in reading):
        turns += 1
        await asyncio.sleep(0)
    await asyncio.gather(*reading)
    assert len(steps) > 10 * BODIES
    assert max(steps.count(turn) for turn in set(steps)) == 1
    assert len(list(groupby(decoders, key=id))) == BODIES

"""A port with a time limit on its coroutine methods."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.time_limit import time_limited


class SlowStore:
    async def get(self, name: str, *, seconds: float = 0) -> str:
        await asyncio.sleep(seconds)
        return name

    async def save(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def watch(self) -> AsyncGenerator[int]:
        await asyncio.sleep(0.02)
        yield 1


async def test_a_method_that_takes_too_long_is_unavailable_and_any_other_is_answered() -> None:
    store = time_limited(SlowStore(), 0.01, "shelf", retry_after_seconds=2)
    for _ in range(2):
        assert await store.get("a") == "a"
        with pytest.raises(WeftError, match="shelf timed out") as late:
            await store.get("a", seconds=5)
        assert (late.value.reason, late.value.retry_after_seconds) == (Reason.SERVICE_UNAVAILABLE, 2)


async def test_a_generator_and_a_method_without_a_limit_take_their_time() -> None:
    store = time_limited(SlowStore(), 0.01, "shelf", without=("save",))
    assert await store.save(0.02) == 0.02
    assert [item async for item in store.watch()] == [1]

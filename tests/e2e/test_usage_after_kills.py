"""Usage of live requests beside their receipts, while the router is killed again and again.

What was written before a kill is there after it, nothing counts twice, and a request counts whole or not at all: the
tokens are those of the receipts of as many requests. A stream whose router dies completes, and counts when its gateway
hands its end over.
"""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import running_apart
from mesh_process import POOL, eventually, fake_runner, write_config

pytestmark = pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh")

ROUNDS = 4
BESIDE = 6
TOKENS = 7
WAIT_SECONDS = 30.0
CHAT: dict[str, Any] = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
LONG = CHAT | {"max_tokens": 400, "stream": True, "stream_options": {"include_usage": True}}


async def answered(http: aiohttp.ClientSession) -> dict[str, int]:
    """One chat; the tokens that its answer has in its usage."""
    async with http.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
    return {"in": usage["prompt_tokens"], "out": usage["completion_tokens"]}


async def counted(http: aiohttp.ClientSession) -> dict[str, int] | None:
    """The sums of `GET /v1/usage`; None while there is no router."""
    async with http.get("/v1/usage") as response:
        if response.status == 503:
            return None
        assert response.status == 200, await response.text()
        total = (await response.json())["total"]
    fields = {"completed": "completed", "in": "promptTokens", "out": "completionTokens"}
    return {name: int(total.get(field, 0)) for name, field in fields.items()}


async def counted_at_least(http: aiohttp.ClientSession, completed: int) -> dict[str, int]:
    async def enough() -> dict[str, int] | None:
        found = await counted(http)
        return found if found is not None and found["completed"] >= completed else None

    found: dict[str, int] = await eventually(enough, WAIT_SECONDS, f"usage does not reach {completed} requests")
    return found


async def has_router(http: aiohttp.ClientSession) -> bool:
    async with http.get("/health") as response:
        return response.status == 200


async def streamed(http: aiohttp.ClientSession, began: asyncio.Event) -> dict[str, int]:
    """A stream that goes on while the router dies, and completes; the tokens that its answer has in its usage."""
    usage: dict[str, int] = {}
    async with http.post("/v1/chat/completions", json=LONG) as response:
        async for line in response.content:
            began.set()
            data = line.removeprefix(b"data: ").strip()
            if data.startswith(b"{"):
                usage = json.loads(data).get("usage") or usage
    return {"in": usage["prompt_tokens"], "out": usage["completion_tokens"]}


async def until_handed_over(http: aiohttp.ClientSession, count: int) -> None:
    """Until the gateway has handed over the ends of so many streams whose router died."""

    async def has_handed_over() -> bool:
        async with http.get("/metrics") as response:
            return f'weft_gateway_end_reports_total{{fate="accepted"}} {count}.0' in await response.text()

    await eventually(has_handed_over, WAIT_SECONDS, f"there are never {count} ends handed over")


async def test_usage_has_every_written_receipt_once_after_the_router_was_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a", slots=BESIDE + 1, tokens_per_second=200.0))
    receipts: list[dict[str, int]] = []
    long: list[dict[str, int]] = []
    written = 0
    with running_apart(tmp_path, config) as mesh:
        async with aiohttp.ClientSession(mesh.url) as http:
            for number in range(ROUNDS):
                await eventually(lambda: has_router(http), WAIT_SECONDS, "there is no router")
                receipts += await asyncio.gather(*(answered(http) for _ in range(BESIDE)))
                is_read = number % 2 == 0
                if is_read:
                    written = (await counted_at_least(http, written + BESIDE))["completed"]
                began = asyncio.Event()
                stream = asyncio.create_task(streamed(http, began))
                await began.wait()
                mesh.end("router", signal.SIGKILL)
                mesh.start("router")
                long.append(await stream)
                await until_handed_over(http, number + 1)
                found = await counted_at_least(http, written)
                written = found["completed"]
                assert written <= len(receipts) + number + 1, "a request is counted twice"
            await eventually(lambda: has_router(http), WAIT_SECONDS, "there is no router")
            receipts += await asyncio.gather(*(answered(http) for _ in range(BESIDE)))
            found = await counted_at_least(http, written + BESIDE)
    assert {json.dumps(receipt) for receipt in receipts} == {json.dumps(receipts[0])}
    # The long streams, whose tokens differ, are those whose router died: their gateway hands each over, once.
    for name in ("in", "out"):
        of_long = sum(usage[name] for usage in long)
        assert found[name] == (found["completed"] - ROUNDS) * receipts[0][name] + of_long
    assert found["completed"] >= (ROUNDS // 2 + 1) * BESIDE + ROUNDS

"""The silences of the fake that tests of watchdogs would pass without: whether they are there."""

import asyncio
import time

import psutil
import pytest
from fake_backend_client import Client, fake

from weft_testing.fake_backend.process import FakeBackendProcess

pytestmark = pytest.mark.slow("starts fake engines")


async def test_comments_keep_a_stalled_stream_alive() -> None:
    switches = {"stall_after_tokens": 1, "keepalive_comments": True}
    async with fake(**switches) as client, client.open_stream() as response:
        received = b""
        while b"\n\n:\n\n:\n\n" not in received:
            received += await asyncio.wait_for(response.content.readany(), 5)
    assert b'finish_reason":"' not in received


async def test_comments_flow_during_prefill_and_headers_are_sent_immediately() -> None:
    async with fake(prefill_seconds=60, keepalive_comments=True) as client, client.open_stream() as response:
        received = await asyncio.wait_for(response.content.readany(), 5)
        assert received.startswith(b":\n\n")
        assert not received.replace(b":\n\n", b"")


async def test_headers_can_be_delayed() -> None:
    async with fake(slow_headers_seconds=0.3) as client:
        started = time.monotonic()
        assert (await client.chat(stream=True)).status == 200
    assert time.monotonic() - started >= 0.3


async def _cpu_seconds_of_a_prefill(backend: FakeBackendProcess, client: Client) -> float:
    process = psutil.Process(backend.pid)
    before = sum(process.cpu_times()[:2])
    assert (await client.chat(stream=True)).status == 200
    return sum(process.cpu_times()[:2]) - before


@pytest.mark.slow("a prompt that takes a second")
async def test_prefill_is_silent_and_uses_cpu_unless_idle() -> None:
    async with fake(prefill_seconds=0.8) as client:
        started = time.monotonic()
        busy = await _cpu_seconds_of_a_prefill(client.backend, client)
        assert time.monotonic() - started >= 0.8
        await client.backend.set_behaviour(prefill_idle=True)
        idle = await _cpu_seconds_of_a_prefill(client.backend, client)
    assert busy >= 0.05 > idle


async def test_held_prefill_lasts_until_released() -> None:
    async with fake(prefill_held=True) as client:
        waiting = asyncio.create_task(client.chat())
        await client.backend.wait_for_state(lambda state: state.busy_slots == 1)
        assert not waiting.done()
        await client.backend.set_behaviour(prefill_held=False)
        assert (await waiting).status == 200

"""Every way a request can go wrong, as a client sees it and as the fake counts it."""

import asyncio
import json
import time

import aiohttp
import psutil
import pytest
from fake_backend_client import COMPLETION, Client, fake

from weft_testing.fake_backend.process import FakeBackendProcess

pytestmark = pytest.mark.slow("starts fake engines")


async def _read_all(client: Client) -> bytes:
    """Everything that arrives before the connection breaks."""
    received = bytearray()
    try:
        async with client.open_stream() as response:
            async for chunk in response.content.iter_any():
                received += chunk
    except aiohttp.ClientPayloadError:
        return bytes(received)
    raise AssertionError("the body came to an orderly end")


async def test_a_client_that_leaves_stops_the_generation_within_a_second() -> None:
    async with fake("--parallel", "1", tokens_per_second=20, answer_tokens=0) as client:
        async with client.open_stream() as response:
            await response.content.readany()
            assert (await client.backend.state()).active_requests == 1
        left_at = time.monotonic()
        state = await client.backend.wait_for_state(lambda state: state.requests_cancelled == 1, seconds=1)
        assert time.monotonic() - left_at < 1
        assert (state.active_requests, state.busy_slots, state.requests_finished) == (0, 0, 0)
        sent = state.tokens_sent
        assert (await client.chat(max_tokens=1)).status == 200
        assert (await client.backend.state()).tokens_sent == sent + 1


async def test_a_client_that_leaves_in_the_middle_of_a_write_is_no_traceback_in_the_log() -> None:
    """Each was forty lines: after three, the line that says where the fake listens was no longer among the last."""
    async with fake("--ctx-size", "1000000", answer_tokens=0) as client:
        for _ in range(20):
            async with client.open_stream(max_tokens=100_000) as response:
                await response.content.readany()
        state = await client.backend.wait_for_state(lambda state: state.requests_cancelled == 20)
        assert state.active_requests == 0
        assert not [line for line in client.backend.output if "Traceback" in line]


@pytest.mark.parametrize(
    "silence",
    [{"prefill_seconds": 60}, {"slow_headers_seconds": 60}, {"stall_after_tokens": 0}, {"tokens_per_second": 1}],
)
async def test_a_client_that_leaves_in_a_silence_is_noticed(silence: dict[str, float]) -> None:
    async with fake(**silence) as client:
        request = asyncio.create_task(client.chat())
        await client.backend.wait_for_state(lambda state: state.active_requests == 1)
        request.cancel()
        state = await client.backend.wait_for_state(lambda state: state.requests_cancelled == 1, seconds=1)
    assert state.active_requests == 0


async def test_a_crash_comes_after_the_tokens_it_is_said_to_come_after() -> None:
    async with fake(crash_after_tokens=5) as client:
        received = await _read_all(client)
        assert await client.backend.wait_exit() == -9
    assert received.count(b'"content":"') + received.count(b'"content":" ') >= 5
    assert b" tok4" in received
    assert b"tok5" not in received


async def test_a_crash_before_the_first_token_sends_no_headers() -> None:
    async with fake(crash_after_tokens=0) as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.stream()
        assert await client.backend.wait_exit() == -9


async def test_a_crash_meets_answers_that_are_not_streamed_as_well() -> None:
    async with fake(crash_after_tokens=3) as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.post(COMPLETION, {"prompt": "x"})


async def test_a_stall_keeps_the_connection_open_and_silent() -> None:
    async with fake(stall_after_tokens=2) as client, client.open_stream() as response:
        received = b""
        while b"tok1" not in received:
            received += await response.content.readany()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.3)
        assert (await client.backend.state()).active_requests == 1
    assert b"tok2" not in received


async def test_comments_keep_a_stalled_stream_warm() -> None:
    switches = {"stall_after_tokens": 1, "keepalive_comments": True, "keepalive_interval_seconds": 0.02}
    async with fake(**switches) as client, client.open_stream() as response:
        received = b""
        while b"\n\n:\n\n:\n\n" not in received:
            received += await asyncio.wait_for(response.content.readany(), 5)
    assert b'finish_reason":"' not in received


async def test_comments_flow_during_prefill_and_headers_come_at_once() -> None:
    async with fake(prefill_seconds=60, keepalive_comments=True) as client, client.open_stream() as response:
        received = await asyncio.wait_for(response.content.readany(), 5)
        assert received.startswith(b":\n\n")
        assert not received.replace(b":\n\n", b"")


async def test_a_closed_socket_leaves_the_body_incomplete() -> None:
    async with fake(close_after_tokens=3) as client:
        received = await _read_all(client)
        state = await client.backend.wait_for_state(lambda state: state.active_requests == 0)
    assert b" tok2" in received
    assert b'"finish_reason":"' not in received
    assert b"[DONE]" not in received
    assert (state.requests_failed, state.requests_cancelled) == (1, 0)


async def test_a_socket_can_close_between_the_last_token_and_the_finish_reason() -> None:
    async with fake(close_after_tokens=16) as client:
        received = await _read_all(client)
    assert b" tok15" in received
    assert b'"finish_reason":"' not in received


async def test_a_tidy_end_may_lack_the_finish_reason() -> None:
    async with fake(end_without_finish_reason=True) as client:
        reply = await client.stream(max_tokens=3, stream_options={"include_usage": True})
        whole = await client.chat()
    chunks = [json.loads(payload) for payload in reply.payloads]
    assert reply.status == 200
    assert {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]} == {None}
    assert not any("usage" in chunk for chunk in chunks)
    assert whole.json["choices"][0]["finish_reason"] is None


async def test_a_line_is_repeated_until_the_limit() -> None:
    async with fake(repeat_line="again and again") as client:
        reply = await client.stream(max_tokens=12)
    assert reply.text == "again and again\n" * 3
    assert reply.finish_reasons == ["length"]


async def test_an_event_may_be_no_json() -> None:
    async with fake(malformed_after_tokens=2) as client:
        reply = await client.stream()
        whole = await client.chat()
    with pytest.raises(json.JSONDecodeError):
        json.loads(reply.payloads[3])
    assert reply.payloads[-1] == "[DONE]"
    with pytest.raises(json.JSONDecodeError):
        json.loads(whole.raw)


async def test_an_event_may_have_wrong_types() -> None:
    async with fake(wrong_shape_after_tokens=0) as client:
        reply = await client.stream()
        whole = await client.chat()
    assert reply.chunks[1]["choices"][0]["index"] == "first"
    assert whole.json["usage"] == "much"


async def test_an_event_may_be_far_too_large() -> None:
    async with fake(oversized_event_bytes=3_000_000) as client, client.open_stream(max_tokens=2) as response:
        raw = await response.read()
    assert max(map(len, raw.split(b"\n\n"))) > 3_000_000
    assert raw.endswith(b"[DONE]\n\n")


async def test_html_may_come_with_status_200() -> None:
    async with fake("--embeddings", html_200=True) as client:
        replies = [await client.stream(), await client.chat(), await client.post("/v1/embeddings", {"input": "x"})]
    assert {reply.status for reply in replies} == {200}
    assert all(reply.headers["Content-Type"].startswith("text/html") for reply in replies)


async def test_a_status_may_be_scripted_with_body_and_retry_after() -> None:
    async with fake(status=429, retry_after_seconds=7) as client:
        shaped = await client.stream()
        await client.backend.set_behaviour(status=500, status_body="boom", retry_after_seconds=None)
        raw = await client.stream()
    assert (shaped.status, shaped.headers["Retry-After"]) == (429, "7")
    assert shaped.error["type"] == "rate_limit_error"
    assert (raw.status, raw.raw) == (500, b"boom")
    assert "Retry-After" not in raw.headers


async def test_a_fault_passes_after_so_many_requests_and_can_be_renewed() -> None:
    async with fake(status=503, fail_times=2, answer_tokens=1) as client:
        statuses = [(await client.chat()).status for _ in range(4)]
        assert statuses == [503, 503, 200, 200]
        await client.backend.set_behaviour(fail_times=1)
        assert [(await client.chat()).status for _ in range(2)] == [503, 200]
        assert (await client.chat()).json["usage"]["completion_tokens"] == 1


async def test_headers_may_be_slow() -> None:
    async with fake(slow_headers_seconds=0.3) as client:
        started = time.monotonic()
        assert (await client.stream()).status == 200
    assert time.monotonic() - started >= 0.3


async def _cpu_seconds_of_a_prefill(backend: FakeBackendProcess, client: Client) -> float:
    process = psutil.Process(backend.pid)
    before = sum(process.cpu_times()[:2])
    assert (await client.stream()).status == 200
    return sum(process.cpu_times()[:2]) - before


@pytest.mark.slow("a prompt that takes a second")
async def test_prefill_is_silent_and_uses_cpu_unless_it_is_idle() -> None:
    async with fake(prefill_seconds=0.8) as client:
        started = time.monotonic()
        busy = await _cpu_seconds_of_a_prefill(client.backend, client)
        assert time.monotonic() - started >= 0.8
        await client.backend.set_behaviour(prefill_idle=True)
        idle = await _cpu_seconds_of_a_prefill(client.backend, client)
    assert busy >= 0.05 > idle


async def test_a_held_prefill_lasts_until_it_is_held_no_more() -> None:
    async with fake(prefill_held=True) as client:
        waiting = asyncio.create_task(client.chat())
        await client.backend.wait_for_state(lambda state: state.busy_slots == 1)
        assert not waiting.done()
        await client.backend.set_behaviour(prefill_held=False)
        assert (await waiting).status == 200

"""The fake's log of the requests that reached it, which survives a kill."""

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from kit.fake_backend import run_fake_backend

from weft_testing.fake_backend.process import FakeBackendProcess

SECONDS = 5.0


def _lines(log: Path) -> list[tuple[str, str]]:
    lines: list[dict[str, Any]] = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    return [(line["event"], line["request_id"]) for line in lines]


async def _chat(backend: FakeBackendProcess, request_id: str, **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    headers = {"X-Request-Id": request_id}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as http,
        http.post(f"{backend.base_url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        await answer.read()


async def test_request_is_logged_at_start_and_end(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    async with run_fake_backend("--request-log", str(log)) as backend:
        await _chat(backend, "r1")
        await backend.wait_for_state(lambda state: state.requests_finished == 1)
    assert _lines(log) == [("begun", "r1"), ("finished", "r1")]


async def test_request_of_a_disconnected_client_is_logged_as_cancelled(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    async with run_fake_backend("--request-log", str(log), stall_after_tokens=0) as backend:
        asking = asyncio.create_task(_chat(backend, "r1"))
        await backend.wait_for_state(lambda state: state.active_requests == 1)
        asking.cancel()
        await backend.wait_for_state(lambda state: state.requests_cancelled == 1)
    assert _lines(log) == [("begun", "r1"), ("cancelled", "r1")]


async def test_started_requests_of_a_killed_fake_are_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    async with run_fake_backend("--request-log", str(log), stall_after_tokens=0) as backend:
        asking = asyncio.create_task(_chat(backend, "r1"))
        await backend.wait_for_state(lambda state: state.active_requests == 1)
        backend.signal(signal.SIGKILL)
        with suppress(aiohttp.ClientError):
            await asking
    assert _lines(log) == [("begun", "r1")]

"""Requests that are cancelled by their ids, over real processes: by the command line, over HTTP, by another tenant."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import running_apart
from mesh_process import POOL, MeshProcess, eventually, fake_runner, run_weft, write_config

CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"answer_tokens": 0, "tokens_per_second": 20}
Answer = tuple[int, dict[str, Any] | str]


@pytest.fixture
async def mesh(common_mesh: MeshProcess) -> MeshProcess:
    """Its answers do not end."""
    async with await common_mesh.backend("a") as backend:
        await backend.set_behaviour(**ENDLESS)
    return common_mesh


async def _ask(
    http: aiohttp.ClientSession, request_id: str, *, stream: bool = False, began: asyncio.Event | None = None
) -> Answer:
    """The status and the body of a chat; of a stream its text. `began` is set once the status is there."""
    body = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "stream": stream, "max_tokens": 4000}
    async with http.post(CHAT, json=body, headers={"X-Request-Id": request_id}) as answer:
        if began is not None:
            began.set()
        return answer.status, (await answer.text() if stream else await answer.json())


async def _ask_when_ready(http: aiohttp.ClientSession, request_id: str, *, stream: bool = False) -> Answer:
    """As `_ask`, once the gateway answers for its mesh."""

    async def is_healthy() -> bool:
        async with http.get("/health") as answer:
            return answer.status == 200

    await eventually(is_healthy, 30.0, "the gateway does not become healthy")
    return await _ask(http, request_id, stream=stream)


async def _reach(http: aiohttp.ClientSession, request_id: str, state: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            async with http.get(f"/v1/requests/{request_id}") as answer:
                found: dict[str, Any] = await answer.json()
            if found.get("state") == state:
                return found
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
async def test_cli_cancels_a_request_in_mid_answer(mesh: MeshProcess, stream: bool) -> None:
    request_id = f"req-running-{stream}"
    async with aiohttp.ClientSession(mesh.url) as http, await mesh.backend("a") as backend:
        began = asyncio.Event()
        asking = asyncio.create_task(_ask(http, request_id, stream=stream, began=began))
        await backend.wait_for_state(lambda state: state.active_requests == 1)
        await _reach(http, request_id, "running")
        if stream:
            # Before its first token a stream has no status yet, and is answered as one that has not begun.
            await began.wait()
        code, out, err = await run_weft("cancel", "request", request_id, home=mesh.home)
        assert (code, out) == (0, f"request/{request_id} cancelled by an operator on this machine\n"), err
        await backend.wait_for_state(lambda state: state.active_requests == 0)
        status, answer = await asking
        if stream:
            assert status == 200
            assert '"code":"cancelled"' in str(answer).replace(" ", "")
            assert "cancelled by an operator on this machine" in str(answer)
        else:
            assert isinstance(answer, dict)
            assert (status, answer["error"]["code"]) == (499, "cancelled")
            assert "cancelled by an operator on this machine" in answer["error"]["message"]
        record = await _reach(http, request_id, "ended")
    _, audited, _ = await run_weft("mesh", "audit", "list", "-o", "json", home=mesh.home)
    found = [entry for entry in json.loads(audited)["items"] if request_id in entry["detail"]]
    assert [(entry["event"], entry["actor"]) for entry in found] == [("request.cancelled", "local")]
    assert (await run_weft("mesh", "audit", "verify", home=mesh.home))[0] == 0
    assert (record["reason"], record["cancelledBy"]) == ("cancelled", "local")
    assert (record["receipt"]["outcome"], record["receipt"]["cancelledBy"]) == ("cancelled", "local")


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.nightly("kills a runner too"))])
async def test_remote_gateway_cancels_a_request_even_if_its_runner_is_killed(tmp_path: Path, kills: bool) -> None:
    config = write_config(tmp_path, fake_runner("a", slots=1, **ENDLESS))
    with running_apart(tmp_path, config) as apart:
        async with aiohttp.ClientSession(apart.url) as http:
            asking = asyncio.create_task(_ask_when_ready(http, "req-far", stream=True))
            await _reach(http, "req-far", "running")
            if kills:
                apart.end("runner", signal.SIGKILL)
            async with http.post("/v1/requests/req-far/cancel") as answer:
                record = await answer.json()
            _, told = await asking
            if kills:
                # Whichever came first is what the caller and the canceller are told.
                assert record["reason"] in {"cancelled", "worker_lost", "no_runner_available"}
            else:
                assert (record["reason"], record["receipt"]["cancelledBy"]) == ("cancelled", record["cancelledBy"])
                again = asyncio.create_task(_ask_when_ready(http, "req-next"))
                await _reach(http, "req-next", "running")
                async with http.post("/v1/requests/req-next/cancel") as answer:
                    assert (await answer.json())["reason"] == "cancelled"
                await again
    assert record["state"] == "ended"
    assert record["reason"] in str(told)

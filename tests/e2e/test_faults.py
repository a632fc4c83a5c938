"""What a client is told when a backend dies, and what becomes of the backend."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kit.warm_python import warm
from mesh_process import POOL, MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

from weft.api.registry.v1 import runner_pb2
from weft.client import Reason, WeftError, connect_async

QUICK_PINGS = warm("kit.quick_pings")


@pytest.fixture(scope="module")
def pair_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("pair")
    config = write_config(folder, fake_runner("a"), fake_runner("b"))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def single_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("single")
    config = write_config(folder, fake_runner("a", slots=1))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture
async def pair(pair_mesh: MeshProcess) -> MeshProcess:
    """Two replicas of one pool, both well."""
    await _all_ready(pair_mesh, "a", "b")
    await pair_mesh.reset("a", "b")
    return pair_mesh


@pytest.fixture
async def single(single_mesh: MeshProcess) -> MeshProcess:
    """One backend with one slot, and well."""
    await _all_ready(single_mesh, "a")
    await single_mesh.reset("a")
    return single_mesh


async def _all_ready(mesh: MeshProcess, *names: str) -> None:
    for name in names:
        await _ready_again(mesh, name, old_pid=0)


def _body(**changes: Any) -> dict[str, Any]:
    return {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, **changes}


async def _configure(mesh: MeshProcess, *runners: str, **switches: Any) -> None:
    for name in runners:
        async with await mesh.backend(name) as backend:
            await backend.set_behaviour(**switches)


async def _ready_again(mesh: MeshProcess, runner: str, old_pid: int) -> int:
    """The new process id, once the registry says that the runner is ready."""

    async def ready() -> int | None:
        for known in await mesh.runners():
            if known.name == runner and known.capability.instances[0].phase == runner_pb2.InstanceState.PHASE_READY:
                pid = (await mesh.describe(runner)).process_id
                return pid if pid not in (0, old_pid) else None
        return None

    pid: int = await eventually(ready, 10.0, "the backend is not ready again")
    return pid


async def test_backend_killed_before_its_first_token_is_invisible_to_the_client(pair: MeshProcess) -> None:
    await _configure(pair, "a", "b", prefill_seconds=1.0)
    async with aiohttp.ClientSession(headers={"X-Request-Id": "killed-early"}) as http:
        asking = asyncio.create_task(_ask(http, pair))
        victim = await pair.busy("a", "b")
        os.kill((await pair.describe(victim)).process_id, signal.SIGKILL)
        status, answer = await asking
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "stop"
    line = pair.request_line("killed-early")
    assert (line["outcome"], line["attempts"]) == ("completed", 2)
    assert line["runner"] != victim


async def test_looping_answer_is_stopped_with_usage_on_every_surface(single: MeshProcess) -> None:
    """Found by trying: it ran to the end of the context, and one that was ended had no usage."""
    # Slow enough that it is ended in mid-answer: at full speed the whole answer may be there before it is read.
    await _configure(single, "a", repeat_line="I will now look at the file again.\n", tokens_per_second=500.0)
    async with aiohttp.ClientSession(headers={"X-Request-Id": "loop-whole"}) as http:
        status, answer = await _ask(http, single, max_tokens=1500)
    assert (status, answer["error"]["code"]) == (502, "repeated_line_loop")
    assert 16 <= answer["error"]["usage"]["completion_tokens"] < 1500
    assert answer["error"]["usage"]["prompt_tokens"] > 0
    async with aiohttp.ClientSession(headers={"X-Request-Id": "loop-stream"}) as http:
        *_, last = await _stream(http, single, max_tokens=1500)
    assert isinstance(last, dict)
    assert (last["error"]["code"], last["error"]["usage"].keys()) == (
        "repeated_line_loop",
        {"prompt_tokens", "completion_tokens"},
    )
    for request_id in ("loop-whole", "loop-stream"):
        line = single.request_line(request_id)
        assert (line["outcome"], line["reason"]) == ("failed", "repeated_line_loop")
        assert 16 <= line["completion_tokens"] < 1500
    async with connect_async(single.grpc) as client:
        with pytest.raises(WeftError) as raised:
            [event async for event in client.chat(POOL, "hi", max_tokens=1500, timeout=20.0)]
    assert raised.value.reason is Reason.REPEATED_LINE_LOOP
    assert int(raised.value.metadata["completion_tokens"]) >= 16
    code, _, err = await run_weft("chat", POOL, "-m", "hi", home=single.home)
    assert code != 0
    assert "tokens before it was stopped" in err


async def _ask(http: aiohttp.ClientSession, mesh: MeshProcess, **changes: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(f"{mesh.url}/v1/chat/completions", json=_body(**changes)) as response:
        return response.status, await response.json()


Heard = list[dict[str, Any] | str]


async def _stream(http: aiohttp.ClientSession, mesh: MeshProcess, heard: Heard | None = None, **changes: Any) -> Heard:
    """Every data event of a stream, in order; each is in `heard` as soon as it is there."""
    heard = [] if heard is None else heard
    async with http.post(f"{mesh.url}/v1/chat/completions", json=_body(stream=True, **changes)) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data:"):
                data = line[5:].strip().decode()
                heard.append(data if data == "[DONE]" else json.loads(data))
    return heard


def _text(heard: Heard) -> str:
    choices = [choice for event in heard if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_backend_killed_after_some_tokens_yields_an_error_event_without_a_replay(pair: MeshProcess) -> None:
    await _configure(pair, "a", "b", answer_tokens=0, tokens_per_second=20)
    async with aiohttp.ClientSession(headers={"X-Request-Id": "killed-late"}) as http:
        heard: Heard = []
        streaming = asyncio.create_task(_stream(http, pair, heard))
        victim = await pair.busy("a", "b")
        await eventually(lambda: _text(heard).count("tok") >= 3, 10.0, "the answer does not begin")
        pid = (await pair.describe(victim)).process_id
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await streaming
        assert time.monotonic() - killed < 1.0
    assert isinstance(heard[-1], dict)
    assert heard[-1]["error"]["code"] == "server_died"
    assert "[DONE]" not in heard
    text = _text(heard)
    assert text.startswith("tok0 tok1 tok2")
    assert text.count("tok0") == 1, "the answer began again"
    await _ready_again(pair, victim, pid)
    assert not (await pair.describe(victim)).active_request_ids
    line = pair.request_line("killed-late")
    assert (line["outcome"], line["reason"], line["attempts"]) == ("failed", "server_died", 1)


async def test_grpc_cancel_and_deadline_reach_the_backend(single: MeshProcess) -> None:
    await _configure(single, "a", answer_tokens=0, tokens_per_second=20)
    async with connect_async(single.grpc) as client, await single.backend("a") as backend:
        before = (await backend.state()).requests_cancelled
        events = client.chat(POOL, "hi", max_tokens=1000)
        async for event in events:
            if event.HasField("delta"):
                break
        await events.aclose()
        await backend.wait_for_state(lambda state: state.requests_cancelled == before + 1, seconds=1.0)
        with pytest.raises(WeftError) as ended:
            async for _ in client.chat(POOL, "hi", timeout=0.5, max_tokens=1000):
                pass
        assert ended.value.reason is Reason.DEADLINE_EXCEEDED
        await backend.wait_for_state(lambda state: state.requests_cancelled == before + 2, seconds=1.0)


@pytest.mark.nightly("freezes a runner")
async def test_frozen_runner_is_detected_by_the_ping_timeout(tmp_path: Path) -> None:
    """Without a ping timeout of its own, gRPC sees a SIGSTOPped peer after 60 s or never."""
    config = write_config(tmp_path, fake_runner("a", slots=1, answer_tokens=0, tokens_per_second=20), drain_seconds=0.5)
    with running_mesh(tmp_path / "home", "--config", str(config), within=QUICK_PINGS) as mesh:
        await _all_ready(mesh, "a")
        runner = mesh.facts["pids"]["runners"]["a"]
        async with aiohttp.ClientSession() as http, await mesh.backend("a") as backend:
            streaming = asyncio.create_task(_stream(http, mesh, max_tokens=1900))
            await backend.wait_for_state(lambda state: state.tokens_sent >= 3)
            os.kill(runner, signal.SIGSTOP)
            try:
                async with asyncio.timeout(45.0):
                    heard = await streaming
            finally:
                os.kill(runner, signal.SIGCONT)
    assert isinstance(heard[-1], dict)
    assert heard[-1]["error"]["code"] == "worker_lost"

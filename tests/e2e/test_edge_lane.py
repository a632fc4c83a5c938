"""`weft up --edge envoy` with a picker: Envoy carries model calls to the runner's port, and all else to the gateway."""

import asyncio
import json
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from mesh_process import POOL, MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

from weft.api.common.v1.receipt_pb2 import OUTCOME_COMPLETED, Receipt
from weft_testing.free_port import free_port

CHAT = "/v1/chat/completions"
COUNTED_SECONDS = 10.0
RESTART_SECONDS = 30.0
DRAIN_SECONDS = 20.0
SLOTS = 8
"""Of both runners."""
PER_SECOND, LONG = 40.0, 260
"""A stream of 6.5 s: longer than an Envoy flushes its last bytes that carries nothing for which its mesh waits."""


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": POOL, "messages": [{"role": "user", "content": "hi"}], **fields}


def _in_lane(name: str, **switches: Any) -> dict[str, Any]:
    return {**fake_runner(name, **switches), "http_port": free_port()}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("lane")
    picker = {"listen": f"127.0.0.1:{free_port()}"}
    config = write_config(folder, _in_lane("a"), _in_lane("b"), picker=picker, drain_seconds=DRAIN_SECONDS)
    with running_mesh(folder / "home", "--config", str(config), "--edge", "envoy") as mesh:
        yield mesh


def _known_ports(mesh: MeshProcess) -> int:
    (known,) = json.loads((mesh.home / "run" / "envoy-endpoints.json").read_text())["resources"]
    return len(known["endpoints"][0]["lb_endpoints"])


@pytest.fixture
async def http(mesh: MeshProcess) -> AsyncIterator[aiohttp.ClientSession]:
    # Runners say their ports a moment after they are there; until then the gateway serves.
    await eventually(lambda: _known_ports(mesh) == 2, COUNTED_SECONDS, "envoy does not know the ports of both runners")
    async with aiohttp.ClientSession(mesh.url) as session:
        yield session


async def _picked(http: aiohttp.ClientSession, result: str) -> float:
    """How many requests the picker has had with this result."""
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = "weft_picker_requests_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and f'result="{result}"' in line)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_goes_through_the_lane(http: aiohttp.ClientSession, stream: bool) -> None:
    before = await _picked(http, "lane")
    async with http.post(CHAT, json=_body(stream=stream)) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    assert ("data: [DONE]" if stream else '"finish_reason":"stop"') in text
    assert await _picked(http, "lane") == before + 1


async def test_what_the_lane_cannot_do_goes_to_the_gateway_and_no_caller_notices(http: aiohttp.ClientSession) -> None:
    before = await _picked(http, "gateway")
    async with http.post(CHAT, json=_body(durable="wait")) as answer:
        assert answer.status in {200, 202}, await answer.text()
    assert await _picked(http, "gateway") == before + 1
    async with http.post("/v1/responses", json={"model": POOL, "input": "hi"}) as answer:
        assert answer.status == 200, await answer.text()


async def test_an_unknown_model_is_refused_with_the_envelope_of_the_gateway(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=_body(model="nope")) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


async def test_its_receipt_has_both_witnesses(mesh: MeshProcess, http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=_body(), headers={"x-request-id": "witnessed"}) as answer:
        assert answer.status == 200

    async def is_witnessed() -> bool:
        _, out, _ = await run_weft("explain", "witnessed", "-o", "json", home=mesh.home)
        return '"proxy"' in out

    await eventually(is_witnessed, COUNTED_SECONDS, "the log of the proxy is not in the receipt")


async def test_a_picker_that_needs_a_certificate_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"), picker={"listen": "0.0.0.0:9002"})
    code, _, err = await run_weft("up", "--config", str(config), "--edge", "envoy", home=tmp_path / "home")
    assert code != 0
    assert "picker.listen" in err or "tls" in err


async def _slowly(mesh: MeshProcess) -> None:
    for runner in ("a", "b"):
        async with await mesh.backend(runner) as engine:
            await engine.set_behaviour(tokens_per_second=PER_SECOND, answer_tokens=0)


async def _serves(http: aiohttp.ClientSession) -> bool:
    with suppress(aiohttp.ClientError):
        async with http.post(CHAT, json=_body(max_tokens=1)) as answer:
            return answer.status == 200
    return False


async def _record(http: aiohttp.ClientSession, request_id: str) -> dict[str, Any]:
    async def ended() -> dict[str, Any] | None:
        async with http.get(f"/v1/requests/{request_id}") as answer:
            found: dict[str, Any] = await answer.json() if answer.status == 200 else {}
        return found if "receipt" in found else None

    record: dict[str, Any] = await eventually(ended, COUNTED_SECONDS, f"{request_id} has no receipt")
    return record


async def test_an_envoy_that_is_killed_cuts_its_streams_and_their_slots_are_free(
    mesh: MeshProcess, http: aiohttp.ClientSession
) -> None:
    await _slowly(mesh)
    edge = psutil.Process(json.loads((mesh.home / "run" / "up.json").read_text())["pids"]["edge"])
    ids = [f"cut-{number}" for number in range(SLOTS)]
    begun = asyncio.Semaphore(0)

    async def cut(request_id: str) -> None:
        async with http.post(
            CHAT, json=_body(stream=True, max_tokens=4_000), headers={"x-request-id": request_id}
        ) as answer:
            await answer.content.readline()
            begun.release()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()

    asked = [asyncio.create_task(cut(each)) for each in ids]
    # Placed is not enough: what envoy has not sent on when it is killed is known to no runner.
    async with asyncio.timeout(COUNTED_SECONDS):
        for _ in ids:
            await begun.acquire()
    edge.kill()
    await asyncio.gather(*asked)
    await eventually(lambda: _serves(http), RESTART_SECONDS, "envoy does not serve again")
    for each in ids:
        record = await _record(http, each)
        assert record["receipt"]["outcome"] == "cancelled", record
    for runner in ("a", "b"):
        async with await mesh.backend(runner) as engine:
            await engine.wait_for_state(lambda state: state.busy_slots == 0)


async def test_the_slot_of_an_engine_that_a_killed_envoy_called_itself_is_free_within_seconds(tmp_path: Path) -> None:
    """It was kept until the deadline of the request, and every caller got 503 until then."""
    runner = _in_lane("a", slots=1, answer_tokens=0, tokens_per_second=PER_SECOND)
    runner["models"][0]["lane"] = "engine"
    sections = {"picker": {"listen": f"127.0.0.1:{free_port()}"}, "edge": {"log_interval_seconds": 1.0}}
    config = write_config(tmp_path, runner, **sections)
    with running_mesh(tmp_path / "home", "--config", str(config), "--edge", "envoy") as mesh:
        async with aiohttp.ClientSession(mesh.url) as http:

            async def in_lane() -> bool:
                return await _serves(http) and await _picked(http, "lane") > 0

            await eventually(in_lane, COUNTED_SECONDS, "no request comes through the lane")
            edge = psutil.Process(json.loads((mesh.home / "run" / "up.json").read_text())["pids"]["edge"])
            asked = http.post(CHAT, json=_body(stream=True, max_tokens=8_000), headers={"x-request-id": "cut"})
            async with asked as answer:
                await answer.content.readline()
                edge.kill()
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
            await eventually(lambda: _serves(http), RESTART_SECONDS, "the slot of the engine is not free")
            record = await _record(http, "cut")
    receipt = record["receipt"]
    assert (receipt["outcome"], record["reason"]) == ("cancelled", "cancelled"), record
    assert "proxy" not in receipt
    assert "completionTokens" not in receipt


async def test_a_stop_lets_streams_of_the_lane_end_though_the_gateway_has_none(
    mesh: MeshProcess, http: aiohttp.ClientSession
) -> None:
    """The last test of this mesh: it ends it."""
    await _slowly(mesh)
    before = await _picked(http, "lane")
    async with http.post(CHAT, json=_body(stream=True, max_tokens=LONG), headers={"x-request-id": "long"}) as answer:
        await answer.content.readline()
        assert await _picked(http, "lane") == before + 1
        mesh.process.send_signal(signal.SIGTERM)
        text = await answer.text()
    assert f"tok{LONG - 1}" in text
    assert "data: [DONE]" in text
    assert await asyncio.to_thread(mesh.process.wait, DRAIN_SECONDS) == 0
    with closing(sqlite3.connect(f"file:{mesh.home}/state/router.db?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT reason, receipt FROM request_records WHERE request_id = 'long'").fetchall()
    ((reason, stored),) = rows
    receipt = Receipt.FromString(stored)
    assert (reason, receipt.outcome, receipt.usage.completion_tokens) == (0, OUTCOME_COMPLETED, LONG)

"""The fake of ComfyUI does what the API of ComfyUI is described to do; a prompt that must fail shows that it can."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kit.comfyui import GRAPH, queue_foreign
from kit.fake_comfyui.server import FakeComfyUi
from kit.waiting import until


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[FakeComfyUi, aiohttp.ClientSession]]:
    async with FakeComfyUi(folder) as fake, aiohttp.ClientSession(base_url=fake.url) as http:
        yield fake, http


async def messages(socket: aiohttp.ClientWebSocketResponse) -> list[Any]:
    """Everything until the prompt has ended."""
    found: list[Any] = []
    async with asyncio.timeout(20):
        while True:
            message = await socket.receive()
            found.append(message.data if message.type is aiohttp.WSMsgType.BINARY else json.loads(message.data))
            if isinstance(found[-1], dict) and found[-1]["type"] == "executing" and found[-1]["data"]["node"] is None:
                return found


def kinds(found: list[Any]) -> list[str]:
    return [each["type"] for each in found if isinstance(each, dict) and each["type"] != "progress_state"]


async def test_prompt_emits_comfyui_messages_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, http), http.ws_connect("/ws?clientId=me") as socket:
        first = json.loads((await socket.receive()).data)
        assert (first["type"], first["data"]["sid"]) == ("status", "me")
        async with http.post("/prompt", json={"prompt": GRAPH, "client_id": "me"}) as answer:
            prompt_id = (await answer.json())["prompt_id"]
        found = await messages(socket)
        order = [kind for kind in kinds(found) if kind not in ("status", "executing")]
        assert order == ["execution_start", "execution_cached", *["progress"] * 4, "executed", "execution_success"]
        binary = [each for each in found if isinstance(each, bytes)]
        assert {struct.unpack(">I", each[:4])[0] for each in binary} == {1, 4}
        assert binary[0][8:].startswith(b"\x89PNG")
        async with http.get(f"/history/{prompt_id}") as answer:
            entry = (await answer.json())[prompt_id]
        assert entry["status"]["status_str"] == "success"
        [image] = entry["outputs"]["9"]["images"]
        async with http.get("/view", params=image) as answer:
            assert (await answer.read()).startswith(b"\x89PNG")


async def test_equal_prompt_is_answered_from_the_cache_with_the_same_file(tmp_path: Path) -> None:
    async with served(tmp_path) as (fake, _):
        first, second = await queue_foreign(fake), await queue_foreign(fake)
        await until(lambda: second in fake.worker.history)
        outputs = [fake.worker.history[each]["outputs"]["9"] for each in (first, second)]
        assert outputs[0] == outputs[1]


async def test_invalid_prompt_is_rejected_with_its_node_errors(tmp_path: Path) -> None:
    graph = json.loads(json.dumps(GRAPH))
    graph["5"]["inputs"]["width"] = 1
    async with served(tmp_path) as (fake, http), http.post("/prompt", json={"prompt": graph}) as answer:
        assert answer.status == 400
        document = await answer.json()
        assert document["node_errors"]["5"]["errors"][0]["type"] == "value_smaller_than_min"
        assert fake.worker.remaining == 0


async def test_interrupt_hits_the_running_prompt_or_only_the_given_id(tmp_path: Path) -> None:
    async with served(tmp_path) as (fake, http):
        fake.worker.pace.hold()
        running = await queue_foreign(fake)
        await until(lambda: fake.worker.running is not None)
        await http.post("/interrupt", json={"prompt_id": "another"})
        fake.worker.pace.go()
        await until(lambda: running in fake.worker.history)
        assert fake.worker.interrupted == []
        fake.worker.pace.hold()
        hit = await queue_foreign(fake, seed=2)
        await until(lambda: fake.worker.running is not None)
        await http.post("/interrupt")
        fake.worker.pace.go()
        await until(lambda: hit in fake.worker.history)
        assert fake.worker.interrupted == [hit]


async def test_other_origin_on_loopback_is_rejected(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, http):
        async with http.get("/queue", headers={"Origin": "http://example.com"}) as answer:
            assert answer.status == 403
        async with http.get("/queue") as answer:
            assert answer.status == 200


async def test_memory_is_freed_after_the_response_and_only_when_idle(tmp_path: Path) -> None:
    async with served(tmp_path) as (fake, http):
        fake.worker.pace.hold()
        prompt_id = await queue_foreign(fake)
        await until(lambda: fake.worker.running is not None and bool(fake.worker.loaded))
        taken = fake.worker.vram_free
        async with http.post("/free", json={"unload_models": True}) as answer:
            assert answer.status == 200
        assert fake.worker.vram_free == taken
        fake.worker.pace.go()
        await until(lambda: prompt_id in fake.worker.history and fake.worker.vram_free > taken)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
async def test_file_outside_its_folders_is_not_served(tmp_path: Path, name: str) -> None:
    async with served(tmp_path) as (_, http), http.get("/view", params={"filename": name}) as answer:
        assert answer.status in (400, 403)


async def test_fault_requested_by_a_prompt_happens(tmp_path: Path) -> None:
    """The negative control: a test that needs a fault would notice if the fake had none."""
    graph = json.loads(json.dumps(GRAPH))
    graph["7"]["inputs"]["fault"] = "error"
    async with served(tmp_path) as (fake, http):
        async with http.post("/prompt", json={"prompt": graph, "client_id": "me"}) as answer:
            prompt_id = (await answer.json())["prompt_id"]
        await until(lambda: prompt_id in fake.worker.history)
        status = fake.worker.history[prompt_id]["status"]
        assert (status["status_str"], status["completed"]) == ("error", False)
        assert status["messages"][-1][0] == "execution_error"
        assert status["messages"][-1][1]["node_id"] == "7"

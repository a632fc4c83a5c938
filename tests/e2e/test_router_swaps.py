"""More models than a device holds, and who waits for which: what callers see of the router's turns."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
from chats import chat
from mesh_process import (
    MeshProcess,
    eventually,
    fake_runner,
    running_mesh,
    write_config,
)

from weft.client import connect_async

MODEL_MB = 2000
BUDGET = {"declared": [{"name": "budget", "memory_mb": 3000}]}
TOKENS_PER_SECOND = 20.0
UNTIL_THE_BOOK_IS_READ = 1.5
"""Right after a start the router knows nothing of this host's memory, and the ledger alone decides. It looks twice a
second."""


def models_for_one_place(tmp_path: Path, *names: str, **router: Any) -> Path:
    """One runner whose models each fill the declared device; the first one is loaded at the start."""
    runner = fake_runner("box", pool="", tokens_per_second=TOKENS_PER_SECOND, answer_tokens=0)
    runner["models"] = [
        {"name": name, "path": __file__, "slots": 2, "memory_mb": MODEL_MB, "start_asleep": name != names[0]}
        for name in names
    ]
    return write_config(tmp_path, runner, accelerators=BUDGET, router=router)


async def words_of_waiting(mesh: MeshProcess, model: str, tokens: int) -> tuple[list[str], Any]:
    """What a request is told while it waits, and its receipt."""
    told = []
    async with connect_async(mesh.grpc) as client:
        async for event in client.chat(model, "hi", max_tokens=tokens, timeout=60.0):
            if event.HasField("queued"):
                told.append(event.queued.reason)
    return told, event.finished.receipt


async def loaded_models(mesh: MeshProcess) -> set[str]:
    """Whose leases there are; never more than the device has."""
    async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}/v1/admin/gpu-memory") as response:
        found = await response.json()
    (device,) = [device for host in found["hosts"] for device in host["devices"]]
    assert device["bookedBytes"] <= device["totalBytes"] - device["marginBytes"]
    return {lease["purpose"] for host in found["hosts"] for lease in host["leases"] if lease["state"] == "held"}


async def test_request_queues_for_memory_held_by_a_busy_model(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(models_for_one_place(tmp_path, "first", "second"))) as mesh:
        async with aiohttp.ClientSession() as http:
            works = asyncio.create_task(chat(mesh.url, "first", headers={"X-Request-Id": "req-first"}, max_tokens=80))

            async def is_running() -> bool:
                async with http.get(f"{mesh.url}/v1/requests/req-first") as response:
                    return (await response.json()).get("state") == "running"  # type: ignore[no-any-return]

            await eventually(is_running, 10.0, "it does not run")
            await asyncio.sleep(UNTIL_THE_BOOK_IS_READ)
            words, receipt = await words_of_waiting(mesh, "second", 3)
            assert works.done(), "the busy model was not disturbed"
            assert (await works)[0] == 200
            assert any(word.startswith("VRAM: needs 2.0 GiB on ") for word in words), words
            assert any(word.endswith("held by first until idle") for word in words), words
            assert receipt.usage.completion_tokens == 3
            assert len(receipt.attempts) == 1
            assert await loaded_models(mesh) == {"second"}
            assert (await chat(mesh.url, "first", max_tokens=3))[0] == 200, (
                "who gave way comes back when it is asked for"
            )
            assert await loaded_models(mesh) == {"first"}

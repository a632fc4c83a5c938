"""One pool over real engines of two kinds, CTranslate2 and llama.cpp's server: each takes over from the other."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from mesh_process import MeshProcess, eventually, running_mesh, write_config
from native_builds import built_ctranslate2

from weft.api.registry.v1 import runner_pb2
from weft_app.compose.demo import demo_model_path
from weft_extensions.engines.library_server import program_command

SERVER_PROGRAM = "weft_extensions.engines.ctranslate2.server"

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]

POOL = "small"
RUNNERS = ("converted", "quantized")
LONG_PROMPT = "Ships sail over the sea by day and by night. " * 150
"""Its prefill takes seconds on either engine."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    python, model = built_ctranslate2()
    shared = {"pool": POOL, "threads": 1, "slots": 1, "context_tokens": 4096}
    converted = {
        "name": "converted",
        "runtime": "ctranslate2",
        "command": list(program_command(SERVER_PROGRAM, str(python))),
        "models": [{"name": "m-converted", "path": str(model), "device": "cpu", **shared}],
    }
    quantized = {
        "name": "quantized",
        "runtime": "llama_server",
        "models": [{"name": "m-quantized", "path": str(demo_model_path()), **shared}],
    }
    folder = tmp_path_factory.mktemp("pool")
    with running_mesh(folder / "home", "--config", str(write_config(folder, converted, quantized))) as running:
        yield running


async def _ask(mesh: MeshProcess, text: str, request_id: str) -> tuple[int, dict[str, Any]]:
    body = {"model": POOL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8}
    async with (
        aiohttp.ClientSession(headers={"X-Request-Id": request_id}) as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=body) as response,
    ):
        return response.status, await response.json()


async def _until_ready(mesh: MeshProcess, runner: str) -> None:
    async def is_ready() -> bool:
        known = next((known for known in await mesh.runners() if known.name == runner), None)
        instances = () if known is None else known.capability.instances
        return any(instance.phase == runner_pb2.InstanceState.PHASE_READY for instance in instances)

    await eventually(is_ready, 60.0, f"{runner} is not ready")


async def _kill(mesh: MeshProcess, runner: str) -> None:
    os.kill((await mesh.describe(runner)).process_id, signal.SIGKILL)


async def _working(mesh: MeshProcess) -> str | None:
    """The runner whose engine is processing a request."""
    for runner in RUNNERS:
        if (await mesh.describe(runner)).active_request_ids:
            return runner
    return None


@pytest.mark.parametrize("runner", RUNNERS)
async def test_other_engine_kind_answers_while_one_is_dead(mesh: MeshProcess, runner: str) -> None:
    for each in RUNNERS:
        await _until_ready(mesh, each)
    await _kill(mesh, runner)
    answers = [await _ask(mesh, "What is the capital of France?", f"{runner}-{number}") for number in range(3)]
    assert [status for status, _ in answers] == [200] * 3
    assert all(answer["choices"][0]["message"]["content"] for _, answer in answers)


@pytest.mark.parametrize("number", [1, 2])
async def test_request_fails_over_to_the_other_engine_kind_if_its_engine_dies_in_prefill(
    mesh: MeshProcess, number: int
) -> None:
    for each in RUNNERS:
        await _until_ready(mesh, each)
    request_id = f"killed-early-{number}"
    asking = asyncio.create_task(_ask(mesh, f"{number} {LONG_PROMPT}", request_id))
    victim = await eventually(lambda: _working(mesh), 60.0, "no engine got the request")
    await _kill(mesh, victim)
    status, answer = await asking
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"]
    line = mesh.request_line(request_id)
    assert (line["outcome"], line["attempts"]) == ("completed", 2)
    assert line["runner"] != victim

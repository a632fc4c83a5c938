"""A model over several hosts: docs/models.md. Head and worker are real processes of a fake vLLM."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from mesh_process import MeshProcess, eventually, run_weft, running_mesh, write_config

from weft_testing.free_port import free_port

MODEL = "large"
WORKER_HOST = "gpu-2"
STATE_SECONDS = 40.0
LOST = "the worker process of node 1 is lost"
NODE = [sys.executable, "-m", "weft_testing.fake_nodes"]


def _head(folder: Path, port: int) -> dict[str, Any]:
    """The runner on the head host, as docs/models.md shows it."""
    (folder / "model").mkdir()
    return {
        "name": "head",
        "runtime": "vllm",
        "command": NODE,
        "worker_hosts": [WORKER_HOST],
        "models": [
            {
                "name": MODEL,
                "model": str(folder / "model"),
                "slots": 4,
                "context_tokens": 512,
                "extra_arguments": [
                    *("--pipeline-parallel-size", "2", "--nnodes", "2", "--node-rank", "0"),
                    *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                    *("--answer-tokens", "0", "--tokens-per-second", "20"),
                ],
            }
        ],
        "first_term_seconds": 0.5,
    }


@contextmanager
def _worker(port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The process on the other host."""
    flags = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    process = subprocess.Popen([*NODE, "serve", MODEL, *flags, "--headless"], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _document(mesh: MeshProcess, *words: str) -> Any:
    code, out, error = await run_weft("get", *words, "-o", "json", home=mesh.home)
    assert code == 0, error
    return json.loads(out)


async def _is_in(mesh: MeshProcess, phase: str) -> bool:
    document = await _document(mesh, "model", MODEL)
    return phase in json.dumps(document["status"])


def _body(tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": "hi"}
    return {"model": MODEL, "messages": [message], "max_tokens": tokens, "stream": True}


async def _stream(http: aiohttp.ClientSession, mesh: MeshProcess, tokens: int, began: asyncio.Event) -> list[str]:
    lines: list[str] = []
    async with http.post(f"{mesh.url}/v1/chat/completions", json=_body(tokens)) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data:"):
                lines.append(line[5:].strip().decode())
                began.set()
    return lines


async def test_lost_worker_fails_the_model_visibly_until_the_worker_returns(
    tmp_path: Path,
) -> None:
    port = free_port()
    config = write_config(tmp_path, _head(tmp_path, port))
    with _worker(port) as worker, running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        runner = await _document(mesh, "runner", "head")
        assert runner["status"]["workerHosts"] == [WORKER_HOST]
        async with aiohttp.ClientSession() as http:
            began = asyncio.Event()
            streaming = asyncio.create_task(_stream(http, mesh, 400, began))
            await began.wait()
            worker.kill()
            lines = await streaming
            assert lines[-1] != "[DONE]", "a cut answer looks whole"
            assert json.loads(lines[-1])["error"]["code"] == "server_died", lines[-1]
            await eventually(lambda: _says(mesh, LOST), STATE_SECONDS, "the loss is not said")
            # The runner has started the head again, which waits for its worker.
            await eventually(lambda: _is_in(mesh, "loading"), STATE_SECONDS, "the head does not wait for its worker")
            with _worker(port):
                await eventually(lambda: _is_in(mesh, "ready"), STATE_SECONDS, "the model is not ready again")
                assert (await _stream(http, mesh, 3, asyncio.Event()))[-1] == "[DONE]"


async def _says(mesh: MeshProcess, text: str) -> bool:
    code, out, error = await run_weft("describe", "model", MODEL, home=mesh.home)
    assert code == 0, error
    return text in out

"""A model over several hosts: docs/models.md. Head and worker are real processes of a fake vLLM."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chats import DONE, streamed_chat
from mesh_process import MeshProcess, eventually, running_mesh, write_config

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
    out = await mesh.weft("get", *words, "-o", "json")
    return json.loads(out)


async def _is_in(mesh: MeshProcess, phase: str) -> bool:
    document = await _document(mesh, "model", MODEL)
    return phase in json.dumps(document["status"])


async def test_lost_worker_fails_the_model_visibly_until_the_worker_returns(
    tmp_path: Path,
) -> None:
    port = free_port()
    config = write_config(tmp_path, _head(tmp_path, port))
    with _worker(port) as worker, running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        runner = await _document(mesh, "runner", "head")
        assert runner["status"]["workerHosts"] == [WORKER_HOST]
        began = asyncio.Event()
        streaming = asyncio.create_task(streamed_chat(mesh.url, MODEL, begun=began, max_tokens=400))
        await began.wait()
        worker.kill()
        last = (await streaming)[-1]
        assert last != DONE, "a cut answer looks whole"
        assert last["error"]["code"] == "server_died", last
        await eventually(lambda: _says(mesh, LOST), STATE_SECONDS, "the loss is not said")
        # The runner has started the head again, which waits for its worker.
        await eventually(lambda: _is_in(mesh, "loading"), STATE_SECONDS, "the head does not wait for its worker")
        with _worker(port):
            await eventually(lambda: _is_in(mesh, "ready"), STATE_SECONDS, "the model is not ready again")
            assert (await streamed_chat(mesh.url, MODEL, max_tokens=3))[-1] == DONE


async def _says(mesh: MeshProcess, text: str) -> bool:
    out = await mesh.weft("describe", "model", MODEL)
    return text in out

"""Models that sleep until somebody asks for them, with real processes."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import running_apart
from chats import answers, chat
from kit.quick_weft import within
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config
from sleepy_server import SleepyServer

from weft.api.registry.v1 import model_pb2, registry_service_pb2, registry_service_pb2_grpc
from weft.client import connect_async
from weft.documents.kinds import record_in
from weft.kernel.channels.rpc import open_channel

MODEL = "sleepy"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SleepyServer]:
    server = SleepyServer(tmp_path_factory.mktemp("server"))
    yield server
    server.end()


@pytest.fixture(scope="module")
def mesh(server: SleepyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh whose model sleeps."""
    folder = tmp_path_factory.mktemp("sleepers")
    quick = within({"gateway.gateway_config:GatewayConfig": {"sse_keepalive_seconds": 0.2}})
    config = write_config(folder, server.runner("box", MODEL))
    with running_mesh(folder / "home", "--config", str(config), within=quick) as mesh:
        yield mesh


async def _status(address: str) -> "model_pb2.Model.Status.ValueType":
    async with open_channel(address) as channel:
        stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        response = await stub.GetResource(
            registry_service_pb2.GetResourceRequest(kind="model", name=MODEL), timeout=5.0
        )
        status: model_pb2.Model.Status.ValueType = record_in(response.resource).status
        return status


async def _until(address: str, wanted: "model_pb2.Model.Status.ValueType") -> None:
    async def reached() -> bool:
        return await _status(address) == wanted

    await eventually(reached, 10.0, f"the model does not become {model_pb2.Model.Status.Name(wanted)}")


async def test_first_request_wakes_a_sleeping_model_and_reports_the_wait(
    mesh: MeshProcess, server: SleepyServer
) -> None:
    assert await _status(mesh.grpc) == model_pb2.Model.STATUS_HIBERNATING
    async with connect_async(mesh.grpc) as client:
        events = [event async for event in client.chat(MODEL, "hi", max_tokens=5, timeout=30.0)]
    stages = [event.loading.stage for event in events if event.HasField("loading")]
    assert any("waking" in stage for stage in stages), stages
    assert events[-1].finished.receipt.usage.completion_tokens == 5
    assert events[-1].finished.receipt.load_wait.ToNanoseconds() > 0
    assert server.wakes == 1
    await _until(mesh.grpc, model_pb2.Model.STATUS_ACTIVE)


async def test_recipe_cannot_call_the_mesh_itself(mesh: MeshProcess) -> None:
    """Its gateway would take a request from this machine for one of its operator."""
    recipe = {"type": "http", "url": f"{mesh.url}/api/v1/models/looped", "method": "DELETE"}
    document = {"kind": "model", "name": "looped", "operations": ["chat"], "wake": {"byMesh": recipe}}
    async with aiohttp.ClientSession(mesh.url) as http, http.put("/api/v1/models/looped", json=document) as answer:
        assert answer.status == 201
    status, body = await chat(mesh.url, "looped")
    assert (status, body["error"]["code"]) == (503, "wake_failed")
    assert "a port of the mesh itself" in body["error"]["message"]
    async with aiohttp.ClientSession(mesh.url) as http, http.get("/api/v1/models/looped") as answer:
        assert answer.status == 200


async def test_mesh_wakes_a_host_with_a_missing_runner_by_magic_packet(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as network_card:
        network_card.bind(("127.0.0.1", 0))
        network_card.setblocking(False)
        packet = {
            "by": "mesh",
            "type": "wake_on_lan",
            "mac_address": "02:00:5e:10:00:01",
            "max_wait_seconds": 30,
            "broadcast_address": "127.0.0.1",
            "port": network_card.getsockname()[1],
        }
        runner = fake_runner("box")
        runner["models"][0] |= {"name": MODEL, "pool": None, "wake": packet}
        with running_apart(tmp_path, write_config(tmp_path, runner)) as mesh:
            await eventually(partial(answers, mesh.url, MODEL), 20.0, "the mesh does not answer")
            mesh.end("runner", signal.SIGTERM)
            registry = f"unix:{tmp_path / 'home' / 'run' / 'registry.sock'}"
            await _until(registry, model_pb2.Model.STATUS_HIBERNATING)
            asking = asyncio.create_task(chat(mesh.url, MODEL, max_tokens=5))
            async with asyncio.timeout(10):
                heard = await asyncio.get_running_loop().sock_recv(network_card, 200)
            assert heard == b"\xff" * 6 + bytes.fromhex("02005e100001") * 16
            await asyncio.to_thread(mesh.start, "runner")
            assert (await asking)[0] == 200

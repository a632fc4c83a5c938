"""Models that sleep until somebody asks for them, with real processes."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import running_apart
from kit.quick_weft import within
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config
from sleepy_server import SleepyServer

from weft.api.registry.v1 import model_pb2, registry_service_pb2, registry_service_pb2_grpc
from weft.client import connect_async
from weft.documents.kinds import record_in
from weft.kernel.rpc import open_channel

MODEL = "sleepy"
"""Of the tests whose mesh is their own."""
MODELS = ("first", "idle", "streamed")


@dataclass(frozen=True, slots=True)
class Sleepers:
    """A mesh whose models sleep, each on a server of its own: a test uses those that are named after it."""

    mesh: MeshProcess
    servers: dict[str, SleepyServer]


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleepers]:
    folder = tmp_path_factory.mktemp("sleepers")
    servers = {name: SleepyServer(folder / name) for name in MODELS}
    config = write_config(folder, _box(servers))
    quick = within({"gateway.config:GatewayConfig": {"sse_keepalive_seconds": 0.2}})
    try:
        with running_mesh(folder / "home", "--config", str(config), within=quick) as mesh:
            yield Sleepers(mesh, servers)
    finally:
        for server in servers.values():
            server.end()


def _box(servers: dict[str, SleepyServer]) -> dict[str, Any]:
    """A runner with a model on each of these servers."""
    changes: dict[str, dict[str, Any]] = {
        "idle": {"sleep": {"after_seconds": 0.5, "type": "command", "argv": servers["idle"].sleep_argv}},
    }
    sections = [server.runner("box", name, **changes.get(name, {})) for name, server in servers.items()]
    return sections[0] | {"models": [section["models"][0] for section in sections]}


async def _ask(http: aiohttp.ClientSession, url: str, model: str = MODEL) -> tuple[int, dict[str, Any]]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def _status(address: str, model: str = MODEL) -> "model_pb2.Model.Status.ValueType":
    async with open_channel(address) as channel:
        stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        response = await stub.GetResource(
            registry_service_pb2.GetResourceRequest(kind="model", name=model), timeout=5.0
        )
        status: model_pb2.Model.Status.ValueType = record_in(response.resource).status
        return status


async def _until(address: str, wanted: "model_pb2.Model.Status.ValueType", model: str = MODEL) -> None:
    async def reached() -> bool:
        return await _status(address, model) == wanted

    await eventually(reached, 10.0, f"the model does not become {model_pb2.Model.Status.Name(wanted)}")


async def _until_asleep_again(address: str, sleeps: Callable[[], Any], model: str = MODEL) -> None:
    """Once `sleeps` is true and the registry says so too.

    The registry alone is no witness: a router believes a runner that says that its model is awake, so a request may be
    answered before the registry has heard that the model had woken at all.
    """
    await eventually(sleeps, 10.0, "it stays awake")
    await _until(address, model_pb2.Model.STATUS_HIBERNATING, model)


async def _has_no_process(mesh: MeshProcess) -> bool:
    return (await mesh.describe("box")).process_id == 0


async def test_first_request_wakes_a_sleeping_model_and_reports_the_wait(sleepers: Sleepers) -> None:
    mesh, server = sleepers.mesh, sleepers.servers["first"]
    assert await _status(mesh.grpc, "first") == model_pb2.Model.STATUS_HIBERNATING
    async with connect_async(mesh.grpc) as client:
        events = [event async for event in client.chat("first", "hi", max_tokens=5, timeout=30.0)]
    stages = [event.loading.stage for event in events if event.HasField("loading")]
    assert any("waking" in stage for stage in stages), stages
    assert events[-1].finished.receipt.usage.completion_tokens == 5
    assert events[-1].finished.receipt.load_wait.ToNanoseconds() > 0
    assert server.wakes == 1
    await _until(mesh.grpc, model_pb2.Model.STATUS_ACTIVE, "first")


async def test_idle_model_goes_back_to_sleep_and_wakes_again(sleepers: Sleepers) -> None:
    mesh, server = sleepers.mesh, sleepers.servers["idle"]
    async with aiohttp.ClientSession() as http:
        assert (await _ask(http, mesh.url, model="idle"))[0] == 200
        await _until_asleep_again(mesh.grpc, lambda: server.sleeps, "idle")
        assert server.sleeps == 1
        assert (await _ask(http, mesh.url, model="idle"))[0] == 200
    assert server.wakes == 2


async def test_managed_model_unloads_when_idle_and_the_next_request_loads_it(
    tmp_path: Path,
) -> None:
    runner = fake_runner("box")
    runner["models"][0] |= {"name": MODEL, "pool": None, "start_asleep": True, "sleep": {"after_seconds": 0.5}}
    config = write_config(tmp_path, runner)
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        assert (await mesh.describe("box")).process_id == 0
        async with aiohttp.ClientSession() as http:
            assert (await _ask(http, mesh.url))[0] == 200
            assert (await mesh.describe("box")).process_id > 0
            await _until_asleep_again(mesh.grpc, lambda: _has_no_process(mesh))
            assert (await mesh.describe("box")).process_id == 0
            assert (await _ask(http, mesh.url))[0] == 200


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
            async with aiohttp.ClientSession() as http:
                await eventually(lambda: _answers(http, mesh.url), 20.0, "the mesh does not answer")
                mesh.end("runner", signal.SIGTERM)
                registry = f"unix:{tmp_path / 'home' / 'run' / 'registry.sock'}"
                await _until(registry, model_pb2.Model.STATUS_HIBERNATING)
                asking = asyncio.create_task(_ask(http, mesh.url))
                async with asyncio.timeout(10):
                    heard = await asyncio.get_running_loop().sock_recv(network_card, 200)
                assert heard == b"\xff" * 6 + bytes.fromhex("02005e100001") * 16
                await asyncio.to_thread(mesh.start, "runner")
                assert (await asking)[0] == 200


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    return (await _ask(http, url))[0] == 200

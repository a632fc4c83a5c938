"""A joined laptop with memory to book: its leases are in the mesh's book, and its models give way to each other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from chats import answers
from join_process import make_token, relay_facts, running_join
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft.api.runner.v1 import permit_pb2, runner_service_pb2_grpc
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.channels.rpc import error_from_call, open_channel
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import metadata_of

SECONDS = 30.0
MODELS = ("first", "second")


def _section(name: str, models: tuple[str, ...]) -> dict[str, Any]:
    section = fake_runner(name)
    section["models"] = [
        {"name": model, "path": __file__, "memory_mb": 2000, "publish": True, "start_asleep": True} for model in models
    ]
    return section


@asynccontextmanager
async def _joined(tmp_path: Path, memory_mb: int, *runners: dict[str, Any]) -> AsyncIterator[MeshProcess]:
    """A mesh with these runners of its own that a laptop with two models has joined."""
    (tmp_path / "laptop").mkdir()
    memory = {"declared": [{"name": "budget", "memory_mb": memory_mb}]}
    laptop = write_config(tmp_path / "laptop", _section("laptop", MODELS), accelerators=memory)
    config = write_config(tmp_path, *runners, relay={"listen": "127.0.0.1:0"}, accelerators=memory)
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        token, url = (await make_token(mesh.home))["token"], relay_facts(mesh.home)["url"]
        with running_join(tmp_path / "laptop" / "home", url, token, "--config", str(laptop)) as joined:
            await joined.until("joined as laptop")
            yield mesh


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshProcess]:
    """A mesh without runners of its own; the laptop has room for one of its models."""
    async with _joined(tmp_path, 3000) as mesh:
        yield mesh


async def _leases(mesh: MeshProcess) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}/v1/admin/gpu-memory") as response:
        return [lease for host in (await response.json())["hosts"] for lease in host["leases"]]


async def test_registry_loads_and_unloads_a_model_on_a_joined_laptop(mesh: MeshProcess) -> None:
    for command, left in ((("load", "first"), ["first"]), (("unload", "first"), [])):
        await mesh.weft(*command, "--watch")

        async def is_so(left: list[str] = left) -> bool:
            return [lease["purpose"] for lease in await _leases(mesh)] == left

        await eventually(is_so, SECONDS, f"after {command} the leases are not {left}")


async def test_relay_operations_require_a_registry_permit(mesh: MeshProcess) -> None:
    await eventually(partial(answers, mesh.url, "first"), SECONDS, "first does not answer")
    (runner,) = await mesh.runners()
    forged = permit_pb2.OperationPermit(claims=b"x", mac=b"y" * 32)
    metadata = metadata_of(runner.address)
    async with open_channel(runner.address) as channel:
        control: Any = runner_service_pb2_grpc.RunnerServiceStub(channel)
        for permit in (None, forged):
            calls: tuple[Any, ...] = (
                control.Unload(pb.UnloadRequest(model="first", permit=permit), metadata=metadata),
                control.YieldMemory(pb.YieldMemoryRequest(model="first", permit=permit), metadata=metadata),
                control.FlushCache(
                    pb.FlushCacheRequest(scope=pb.FlushCacheRequest.SCOPE_ALL, permit=permit), metadata=metadata
                ),
                control.Load(pb.LoadRequest(model="second", permit=permit), metadata=metadata).read(),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert error_from_call(refused.value, Reason.INTERNAL).reason is Reason.PERMIT_INVALID
    assert [lease["purpose"] for lease in await _leases(mesh)] == ["first"]

"""A laptop that can reach the mesh and that nobody can reach: behind address translation, in a namespace of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from join_process import JoinProcess, make_token, relay_facts, running_join
from mesh_process import eventually, fake_runner, running_mesh, write_config
from nat_world import (
    ESTABLISHED,
    GATEWAY_OUTSIDE,
    LAPTOP_ADDRESS,
    LISTENING,
    MESH_ADDRESS,
    NatWorld,
    Place,
    nat_world,
)

from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.client import connect_async
from weft.client._home import mesh_address
from weft.documents.kinds import record_in
from weft.kernel.channels.rpc import open_channel

pytestmark = pytest.mark.nightly("a network of its own that is cut")

CABLE_SECONDS = 45.0
"""Keepalive finds out within 20 s; dialing again waits up to 30 s."""
CONNECT = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


def _can_connect(place: Place, address: str, port: int) -> bool:
    command = [*place.enter, sys.executable, "-c", CONNECT, address, str(port)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


async def test_laptop_behind_nat_serves_the_mesh(tmp_path: Path) -> None:
    with nat_world() as world:
        (tmp_path / "mesh").mkdir()
        config = write_config(tmp_path / "mesh", relay={"listen": f"{MESH_ADDRESS}:0"})
        home = tmp_path / "mesh" / "home"
        with running_mesh(home, "--config", str(config), within=world.mesh.enter):
            await _serves_from_behind(world, tmp_path, home)


async def _serves_from_behind(world: NatWorld, folder: Path, home: Path) -> None:
    (folder / "laptop").mkdir()
    runner = fake_runner("laptop", answer_tokens=3)
    runner["models"][0] |= {"name": "llama", "publish": True}
    config = write_config(folder / "laptop", runner)
    facts, token = relay_facts(home), (await make_token(home))["token"]
    arguments = ("--fingerprint", facts["fingerprint"], "--config", str(config))
    with running_join(folder / "laptop" / "home", facts["url"], token, *arguments, within=world.laptop.enter) as laptop:
        await laptop.until("joined as laptop: llama")
        async with connect_async(home=home) as client:
            events = [event async for event in client.chat("llama", "hi")]
        assert "".join(event.delta.text for event in events) == "tok0 tok1 tok2"
        # The mesh sees the gateway and not the laptop, and cannot go the other way.
        port = int(facts["url"].rpartition(":")[2])
        remotes = {remote for _, remote in world.mesh.tcp_sockets(ESTABLISHED)}
        assert GATEWAY_OUTSIDE in remotes
        assert LAPTOP_ADDRESS not in remotes
        assert _can_connect(world.laptop, MESH_ADDRESS, port)
        assert {local for local, _ in world.laptop.tcp_sockets(LISTENING)} <= {"127.0.0.1"}
        assert not _can_connect(world.mesh, LAPTOP_ADDRESS, 22)
        await _survives_a_pulled_cable(world, home, laptop)
        assert await laptop.stop() == 0


async def _survives_a_pulled_cable(world: NatWorld, home: Path, laptop: JoinProcess) -> None:
    """Nobody is told that the connection is gone; both ends must find out by themselves."""
    world.gateway.run("ip", "link", "set", "in", "down")
    await eventually(lambda: _is_active(home, False), CABLE_SECONDS, "the mesh does not notice a pulled cable")
    await laptop.until("no link")
    world.gateway.run("ip", "link", "set", "in", "up")
    await eventually(lambda: _is_active(home, True), CABLE_SECONDS, "the laptop does not come back")


async def _is_active(home: Path, wanted: bool) -> bool:
    async with open_channel(mesh_address(home, "registry")) as channel:
        stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        response = await stub.GetResource(
            registry_service_pb2.GetResourceRequest(kind="runner", name="laptop"), timeout=5.0
        )
        return bool((record_in(response.resource).status == runner_pb2.Runner.STATUS_ACTIVE) is wanted)

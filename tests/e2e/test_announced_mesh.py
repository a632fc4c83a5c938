"""`weft up --announce` on one machine, `weft runner join` without an address on another one of its network."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from join_process import make_token, relay_facts, running_join
from mesh_process import (
    WEFT,
    MeshProcess,
    fake_runner,
    run_weft,
    running_mesh,
    user_environment,
    write_config,
)
from nat_world import LAN_MESH, LanWorld, lan_world

from weft.client import connect_async


@pytest.fixture(scope="module")
def world() -> Iterator[LanWorld]:
    with lan_world() as world:
        yield world


@pytest.fixture(scope="module")
def mesh(world: LanWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("mesh")
    config = write_config(folder, fake_runner("a"), announce={"name": "atlas"})
    options = ("--config", str(config), "--host", "0.0.0.0", "--join-port", "0", "--announce")
    with running_mesh(folder / "home", *options, within=world.mesh.enter) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def laptop_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner = fake_runner("laptop", pool="laptops", answer_tokens=3)
    runner["models"][0] |= {"name": "llama", "publish": True}
    return write_config(tmp_path_factory.mktemp("laptop"), runner)


def found_meshes(world: LanWorld, home: Path) -> list[dict[str, Any]]:
    environment = {**user_environment(), "PATH": os.environ["PATH"]}
    command = [*world.laptop.enter, *WEFT, "models", "discover", "--home", str(home), "-o", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=home.parent)
    found: list[dict[str, Any]] = json.loads(done.stdout)["meshes"]
    return found


async def test_laptop_joins_the_announced_mesh_with_the_invitation_fingerprint(
    world: LanWorld, mesh: MeshProcess, laptop_config: Path, tmp_path: Path
) -> None:
    token, facts = str((await make_token(mesh.home))["token"]), relay_facts(mesh.home)
    home, options = tmp_path / "home", ("--config", str(laptop_config), "--fingerprint", facts["fingerprint"])
    with running_join(home, "", token, *options, within=world.laptop.enter) as laptop:
        await laptop.until("joined as laptop: llama")
        async with connect_async(home=mesh.home) as client:
            events = [event async for event in client.chat("llama", "hi")]
        assert "".join(event.delta.text for event in events) == "tok0 tok1 tok2"
        assert await laptop.stop() == 0


async def test_announcement_is_listed_and_contains_no_secret(
    world: LanWorld, mesh: MeshProcess, tmp_path: Path
) -> None:
    facts = relay_facts(mesh.home)
    (found,) = found_meshes(world, tmp_path / "home")
    port = int(facts["url"].rpartition(":")[2])
    assert found.pop("version")
    assert found == {"name": "atlas", "port": port, "addresses": [LAN_MESH], "fingerprint": facts["fingerprint"]}
    banner = (mesh.home.parent / "home.out").read_text()
    assert "as atlas on this network" in banner
    assert f"and for this fingerprint: {facts['fingerprint']}" in banner


async def test_announce_is_rejected_for_a_loopback_only_mesh(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    code, _, error = await run_weft("up", "--config", str(config), "--announce", home=tmp_path / "home")
    assert code == 2
    assert "--announce: needs a relay that other machines reach: add --host 0.0.0.0" in error

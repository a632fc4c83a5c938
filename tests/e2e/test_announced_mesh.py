"""`weft up --announce` on one machine, `weft runner join` without an address on another one of its network."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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

FORGED = f"sha256:{'0' * 64}"
FORGE = """
import asyncio, sys
from weft_app.compose.announcement import Announcement
from weft_app.compose.announcer import Announcer
from weft_app.config.config import AnnounceSettings
from weft.kernel.clock import SystemClock

async def announce():
    port, fingerprint = int(sys.argv[1]), sys.argv[2]
    said = Announcement(name="atlas-forged", port=port, addresses=(), fingerprint=fingerprint, version="0.1.0")
    one = Announcer(said, AnnounceSettings(), SystemClock(), lambda: (sys.argv[3],))
    await one.start()
    print("announced as", one.state.name, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await one.stop()

asyncio.run(announce())
"""
"""Announces somebody's relay with another fingerprint, by a name that no other asks for: which of two gets a name first
is chance where a machine is slow to defend its own."""


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


@contextmanager
def forged_announcement(world: LanWorld, port: int) -> Iterator[str]:
    """The name that a forged announcement of the relay at this port has got."""
    command = [*world.mesh.enter, sys.executable, "-c", FORGE, str(port), FORGED, LAN_MESH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = "announced as "
        yield next(line for line in process.stdout if line.startswith(said)).removeprefix(said).strip()
        process.stdin.close()
        assert process.wait(30) == 0


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


@pytest.mark.nightly("joins that are refused, one after the other")
async def test_forged_announcement_receives_no_token(
    world: LanWorld, mesh: MeshProcess, laptop_config: Path, tmp_path: Path
) -> None:
    token, facts = str((await make_token(mesh.home))["token"]), relay_facts(mesh.home)
    home, within = tmp_path / "home", world.laptop.enter
    options = ("--config", str(laptop_config))
    with forged_announcement(world, int(facts["url"].rpartition(":")[2])) as name:
        assert name == "atlas-forged"
        with running_join(home, "", token, *options, "--fingerprint", FORGED, within=within) as laptop:
            assert await laptop.exit_code() == 1
            assert "showed another certificate" in laptop.output
        with running_join(home, "", token, *options, within=within) as laptop:
            assert await laptop.exit_code() == 2
            assert facts["fingerprint"] in laptop.output
            assert FORGED in laptop.output
            assert "weft runner join --fingerprint" in laptop.output
    unknown = f"sha256:{'1' * 64}"
    with running_join(home, "", token, *options, "--fingerprint", unknown, within=within) as laptop:
        assert await laptop.exit_code() == 3
        assert f"no mesh with the fingerprint {unknown} is announced" in laptop.output


async def test_announce_is_rejected_for_a_loopback_only_mesh(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    code, _, error = await run_weft("up", "--config", str(config), "--announce", home=tmp_path / "home")
    assert code == 2
    assert "--announce: needs a relay that other machines reach: add --host 0.0.0.0" in error

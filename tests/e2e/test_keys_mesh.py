"""A mesh that asks for keys, over HTTP and gRPC, with real processes: a key works at once, and is useless at once."""

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from chats import chat
from mesh_process import WEFT, MeshProcess, fake_runner, running_mesh, user_environment, write_config

from weft.client import WeftError, connect
from weft.kernel.errors.reasons import Reason


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("keys-mesh")
    config = write_config(folder, fake_runner("box"), auth={"required": True})
    with running_mesh(folder / "home", "--config", str(config), "--grpc-port", "0") as running:
        yield running


def weft(mesh: MeshProcess, *arguments: str) -> str:
    done = subprocess.run(
        [*WEFT, *arguments, "--home", str(mesh.home)], capture_output=True, text=True, check=False,
        env=user_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def new_key(mesh: MeshProcess, *arguments: str) -> str:
    return weft(mesh, "keys", "create", "-o", "name", *arguments)


async def test_key_works_from_creation_until_revocation(mesh: MeshProcess) -> None:
    assert (await chat(mesh.url))[0] == 401
    key = new_key(mesh, "--tenant", "ann")
    assert (await chat(mesh.url, headers={"Authorization": f"Bearer {key}"}))[0] == 200
    weft(mesh, "keys", "revoke", key.split("_")[1])
    assert (await chat(mesh.url, headers={"Authorization": f"Bearer {key}"}))[0] == 401


async def test_grpc_port_requires_keys_and_the_users_socket_does_not(mesh: MeshProcess) -> None:
    key = new_key(mesh)
    with connect(home=mesh.home) as local:
        assert list(local.chat("m-box", "hi", timeout=20.0))
    address = str(mesh.facts["grpcPort"])

    def chat(**options: Any) -> int:
        with connect(address, **options) as remote:
            return len(list(remote.chat("m-box", "hi", timeout=20.0)))

    with pytest.raises(WeftError) as refused:
        await asyncio.to_thread(chat)
    assert refused.value.reason is Reason.UNAUTHENTICATED
    assert await asyncio.to_thread(chat, api_key=key) > 0

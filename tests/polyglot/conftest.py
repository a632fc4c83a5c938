"""The three programs, each built once, and the two meshes that they are run against."""

from collections.abc import Iterator

import pytest
from client_programs import COMMANDS, ClientProgram, built
from keyed_router import KeyedRouter, running_keyed_router
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config


@pytest.fixture(scope="session", params=sorted(COMMANDS))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ClientProgram:
    return built(request.param, tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh on this machine, without keys: a model that answers, and one that does not stop."""
    folder = tmp_path_factory.mktemp("polyglot")
    talk = fake_runner("talk", pool="answers", answer_tokens=3)
    endless = fake_runner("endless", pool="streams", answer_tokens=0, tokens_per_second=20)
    config = write_config(folder, talk, endless)
    with running_mesh(folder / "home", "--config", str(config), "--grpc-port", "0") as running:
        yield running


@pytest.fixture(scope="session")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedRouter]:
    with running_keyed_router(tmp_path_factory.mktemp("keyed-router")) as running:
        yield running

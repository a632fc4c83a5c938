"""One mesh for all tests of a worker that use a mesh and leave it as it was.

It has one runner, `a`, with the model `m-a` of one slot in the pool `pool`. A test gives its requests ids that no other
module has, expects things of others beside its own in every list, and takes back what it declares. Tests that kill
processes, reload a configuration or fill a queue have a mesh of their own.
"""

from collections.abc import Iterator

import pytest
from kit import left_behind
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config

ROUTER = {
    "tenants": {"filed": {"weight": 2.0}},
    "rate_limits": {"tenants": {"filed": ["3req/month"]}},
}


@pytest.fixture(scope="session")
def mesh_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Started for the first test that asks for it, ended after the last test of the worker."""
    folder = tmp_path_factory.mktemp("shared")
    config = write_config(folder, fake_runner("a", slots=1), router=ROUTER)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        left_behind.keep(mesh.process.pid)
        yield mesh


@pytest.fixture
async def common_mesh(mesh_of_the_session: MeshProcess) -> MeshProcess:
    """The mesh of the session, its engine with its normal behaviour."""
    assert mesh_of_the_session.process.poll() is None, "a test before this one has ended the mesh of all"
    await mesh_of_the_session.reset("a")
    return mesh_of_the_session

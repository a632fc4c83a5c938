"""What was taken out of weft.yaml is out of the mesh after the next `weft up`, and nothing else is."""

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from mesh_process import MeshProcess, fake_runner, run_weft, running_mesh, write_config

from weft.api.registry.v1 import model_pb2, runner_pb2, runner_session_service_pb2, runner_session_service_pb2_grpc
from weft.kernel.rpc import open_channel

if TYPE_CHECKING:
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub

# Several meshes come up one after the other; many times that where the machine is shared.
pytestmark = pytest.mark.timeout(300)

ELSEWHERE = "laptop"


def _config(folder: Path, *names: str, **switches: Any) -> Path:
    """One runner `<name>` with the model `m-<name>` in the pool `pool-<name>` for each."""
    return write_config(folder, *(fake_runner(name, pool=f"pool-{name}", slots=1, **switches) for name in names))


async def _names(mesh: MeshProcess, kind: str) -> list[str]:
    code, out, error = await run_weft("get", kind, "-o", "json", home=mesh.home)
    assert code == 0, error
    return [item["name"] for item in json.loads(out)["items"]]


async def _open_elsewhere(mesh: MeshProcess) -> None:
    """A runner that this home never started: it registers, and is silent from then on."""
    runner = runner_pb2.Runner(name=ELSEWHERE, incarnation="life-1", address="127.0.0.1:1", host="h", runtime="fake")
    chat = model_pb2.MODEL_OPERATION_CHAT
    models = [model_pb2.ModelManifest(name="m-laptop", operations=[chat])]
    async with open_channel(mesh.grpc) as channel:
        stub = cast("RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(channel))
        opening = runner_session_service_pb2.OpenSessionRequest(request_id="open-1", runner=runner, models=models)
        await stub.OpenSession(opening, timeout=5.0)


def _said(mesh: MeshProcess) -> str:
    """What `weft up` printed."""
    return (mesh.home.parent / f"{mesh.home.name}.out").read_text()


@pytest.mark.nightly("repeats restarts of a mesh")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh")),
        signal.SIGKILL,
    ],
    ids=["stopped", "killed"],
)
async def test_models_removed_from_the_config_are_gone_after_the_next_start(
    tmp_path: Path, number: signal.Signals
) -> None:
    home = tmp_path / "home"
    with running_mesh(home, "--config", str(_config(tmp_path, "a", "b", "c"))) as mesh:
        await _open_elsewhere(mesh)
        code, _, error = await run_weft("apply", "-f", "-", home=home, stdin=b"{kind: model, name: declared}")
        assert code == 0, error
        assert await _names(mesh, "models") == ["declared", "m-a", "m-b", "m-c", "m-laptop"]
        mesh.stop(number)
    with running_mesh(home, "--config", str(_config(tmp_path, "a"))) as mesh:
        assert await _names(mesh, "models") == ["declared", "m-a", "m-laptop"]
        assert await _names(mesh, "runners") == ["a", ELSEWHERE]
        assert "pool-b" not in await _names(mesh, "pools")
        assert "runner b is not in the configuration any more and was taken out of the mesh with m-b" in _said(mesh)
    with running_mesh(home, "--config", str(_config(tmp_path, "a", "b"))) as mesh:
        assert await _names(mesh, "models") == ["declared", "m-a", "m-b", "m-laptop"], "it may come back"
        assert "not in the configuration" not in _said(mesh)

"""`weft status` on a real mesh: the health of its processes."""

import json
from pathlib import Path

import pytest
from mesh_process import MeshProcess, eventually


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    return common_mesh


async def test_mesh_status_includes_process_health(mesh: MeshProcess) -> None:
    async def is_well() -> bool:
        return "Health:       ok" in await mesh.weft("status")

    await eventually(is_well, 30.0, "the mesh is never well")
    facts = json.loads(await mesh.weft("status", "-o", "json"))
    health = {each["process"]: each for each in facts["health"]}
    assert [health[name]["status"] for name in ("mesh", "runner/a")] == ["ok", "ok"]
    names = [{each["name"] for each in health[name]["components"]} for name in ("mesh", "runner/a")]
    assert names == [{"event_loop", "store", "fleet_view", "journal"}, {"event_loop", "engines", "registry"}]


async def test_files_left_by_a_killed_process_are_reported_as_not_answering(mesh: MeshProcess) -> None:
    stale = Path(mesh.home) / "run" / "runner-gone.sock"
    stale.touch()
    try:
        out = await mesh.weft("status")
    finally:
        stale.unlink()
    assert "runner/gone: no_answer" in out

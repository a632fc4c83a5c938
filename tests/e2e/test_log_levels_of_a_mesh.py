"""`weft status`, `weft mesh log-level` and `weft logs request/ID` on a real mesh."""

import json
from pathlib import Path

import pytest
from chats import answers
from mesh_process import MeshProcess, eventually


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    return common_mesh


async def _lines(mesh: MeshProcess, request_id: str) -> list[tuple[str, str]]:
    """Service and event of the lines of a request."""
    out = await mesh.weft("logs", f"request/{request_id}", "-o", "json")
    return [(line["service"], line["event"]) for line in map(json.loads, out.splitlines())]


async def test_mesh_status_includes_process_health(mesh: MeshProcess) -> None:
    async def is_well() -> bool:
        return "Health:       ok" in await mesh.weft("status")

    await eventually(is_well, 30.0, "the mesh is never well")
    facts = json.loads(await mesh.weft("status", "-o", "json"))
    health = {each["process"]: each for each in facts["health"]}
    assert [health[name]["status"] for name in ("mesh", "runner/a")] == ["ok", "ok"]
    names = [{each["name"] for each in health[name]["components"]} for name in ("mesh", "runner/a")]
    assert names == [{"event_loop", "store", "fleet_view", "journal"}, {"event_loop", "engines", "registry"}]


async def test_log_level_change_affects_request_logs_and_is_audited(mesh: MeshProcess) -> None:
    assert await answers(mesh.url, headers={"X-Request-Id": "req-quiet"})
    assert await _lines(mesh, "req-quiet") == [("host", "request")], "the control: without it there is one line"
    assert (await mesh.weft("mesh", "log-level", "runner/a", "debug", "--for", "5m")).startswith(
        "runner/a: info -> debug un"
    )
    assert (await mesh.weft("mesh", "log-level", "gateway", "debug")).startswith("mesh: info -> debug until ")
    assert await answers(mesh.url, headers={"X-Request-Id": "req-loud"})
    assert sorted(await _lines(mesh, "req-loud")) == [
        ("host", "granted"),
        ("host", "request"),
        ("runner-a", "attempt begun"),
        ("runner-a", "attempt ended"),
    ]
    assert (await mesh.weft("mesh", "log-level", "runner/a")).startswith("runner/a: debug until ")
    assert await mesh.weft("mesh", "log-level", "runner/a", "reset") == "runner/a: debug -> info\n"
    assert await mesh.weft("mesh", "log-level", "reset") == "mesh: debug -> info\n"
    assert await answers(mesh.url, headers={"X-Request-Id": "req-quiet-again"})
    assert await _lines(mesh, "req-quiet-again") == [("host", "request")]
    entries = json.loads(await mesh.weft("mesh", "audit", "list", "-o", "json"))["items"]
    details = [json.loads(each["detail"]) if isinstance(each["detail"], str) else each["detail"] for each in entries]
    found = [(each["process"], each["level"]) for each in details if "level" in each]
    assert found == [("runner/a", "debug"), ("mesh", "debug"), ("runner/a", "info"), ("mesh", "info")]


async def test_files_left_by_a_killed_process_are_reported_as_not_answering(mesh: MeshProcess) -> None:
    stale = Path(mesh.home) / "run" / "runner-gone.sock"
    stale.touch()
    try:
        out = await mesh.weft("status")
    finally:
        stale.unlink()
    assert "runner/gone: no_answer" in out

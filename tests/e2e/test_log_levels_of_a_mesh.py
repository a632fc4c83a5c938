"""`weft status`, `weft mesh log-level` and `weft logs request/ID` on a real mesh."""

import json
from pathlib import Path

import aiohttp
import pytest
from mesh_process import POOL, MeshProcess, eventually, run_weft


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    return common_mesh


async def _weft(mesh: MeshProcess, *words: str) -> str:
    code, out, error = await run_weft(*words, home=mesh.home)
    assert code == 0, error
    return out


async def _chat(mesh: MeshProcess, request_id: str) -> None:
    body = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"X-Request-Id": request_id}
    async with (
        aiohttp.ClientSession(mesh.url) as http,
        http.post("/v1/chat/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()


async def _lines(mesh: MeshProcess, request_id: str) -> list[tuple[str, str]]:
    """Service and event of the lines of a request."""
    out = await _weft(mesh, "logs", f"request/{request_id}", "-o", "json")
    return [(line["service"], line["event"]) for line in map(json.loads, out.splitlines())]


async def test_mesh_status_includes_process_health(mesh: MeshProcess) -> None:
    async def is_well() -> bool:
        return "Health:       ok" in await _weft(mesh, "status")

    await eventually(is_well, 30.0, "the mesh is never well")
    facts = json.loads(await _weft(mesh, "status", "-o", "json"))
    health = {each["process"]: each for each in facts["health"]}
    assert [health[name]["status"] for name in ("mesh", "runner/a")] == ["ok", "ok"]
    names = [{each["name"] for each in health[name]["components"]} for name in ("mesh", "runner/a")]
    assert names == [{"event_loop", "store", "fleet_view", "journal"}, {"event_loop", "engines", "registry"}]


async def test_log_level_change_affects_request_logs_and_is_audited(mesh: MeshProcess) -> None:
    await _chat(mesh, "req-quiet")
    assert await _lines(mesh, "req-quiet") == [("host", "request")], "the control: without it there is one line"
    assert (await _weft(mesh, "mesh", "log-level", "runner/a", "debug", "--for", "5m")).startswith(
        "runner/a: info -> debug un"
    )
    assert (await _weft(mesh, "mesh", "log-level", "gateway", "debug")).startswith("mesh: info -> debug until ")
    await _chat(mesh, "req-loud")
    assert sorted(await _lines(mesh, "req-loud")) == [
        ("host", "granted"),
        ("host", "request"),
        ("runner-a", "attempt begun"),
        ("runner-a", "attempt ended"),
    ]
    assert (await _weft(mesh, "mesh", "log-level", "runner/a")).startswith("runner/a: debug until ")
    assert await _weft(mesh, "mesh", "log-level", "runner/a", "reset") == "runner/a: debug -> info\n"
    assert await _weft(mesh, "mesh", "log-level", "reset") == "mesh: debug -> info\n"
    await _chat(mesh, "req-quiet-again")
    assert await _lines(mesh, "req-quiet-again") == [("host", "request")]
    entries = json.loads(await _weft(mesh, "mesh", "audit", "list", "-o", "json"))["items"]
    details = [json.loads(each["detail"]) if isinstance(each["detail"], str) else each["detail"] for each in entries]
    found = [(each["process"], each["level"]) for each in details if "level" in each]
    assert found == [("runner/a", "debug"), ("mesh", "debug"), ("runner/a", "info"), ("mesh", "info")]


async def test_files_left_by_a_killed_process_are_reported_as_not_answering(mesh: MeshProcess) -> None:
    stale = Path(mesh.home) / "run" / "runner-gone.sock"
    stale.touch()
    try:
        out = await _weft(mesh, "status")
    finally:
        stale.unlink()
    assert "runner/gone: no_answer" in out

"""`weft doctor --mesh` on a mesh apart and on one process, and on a registry that does not answer."""

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
from apart_mesh import Apart, running_apart
from mesh_process import POOL, MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

from registry_svc.store.database import SCHEMA
from weft import __version__


async def _findings(home: Path, expected_code: int) -> list[dict[str, Any]]:
    code, out, error = await run_weft("doctor", "--mesh", "-o", "json", home=home)
    assert code == expected_code, out + error
    found: list[dict[str, Any]] = json.loads(out)["items"]
    return found


async def _until_listed(mesh: Apart, prefix: str) -> list[dict[str, Any]]:
    async def listed() -> list[dict[str, Any]]:
        found = await _findings(mesh.home, 0)
        return found if any(each["detail"].startswith(prefix) for each in found) else []

    found: list[dict[str, Any]] = await eventually(listed, 20.0, f"{prefix} is not listed")
    return found


async def test_doctor_lists_each_process_of_a_distributed_mesh_with_its_version(tmp_path: Path) -> None:
    with running_apart(tmp_path, write_config(tmp_path, fake_runner("a"))) as mesh:
        details = [each["detail"] for each in await _until_listed(mesh, "gateway@")]
        version = f"weft {__version__}"
        assert details[0] == f"registry: {version}, registry schema {SCHEMA.newest}"
        assert any(detail.startswith("router/") and f"{version}, router schema" in detail for detail in details)
        assert f"runner/a: {version}" in details
        assert details[-1] == f"all on one release: {__version__}"


async def test_doctor_names_a_registry_with_a_database_from_a_newer_release(tmp_path: Path) -> None:
    with running_apart(tmp_path, write_config(tmp_path, fake_runner("a")), ("registry", "gateway")) as mesh:
        with closing(sqlite3.connect(mesh.home / "state" / "registry.db")) as database, database:
            database.execute(f"UPDATE {SCHEMA.version_table} SET version_num = '9999'")
        (finding,) = [each for each in await _findings(mesh.home, 1) if each["check"] == "schema"]
        assert finding["detail"].startswith("registry: the registry database has the schema 9999")
        assert finding["remedy"] == "upgrade registry"


async def test_doctor_lists_the_process_of_up_once(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        names = [each["detail"].partition(":")[0] for each in await _findings(mesh.home, 0)]
        assert names.count("mesh") == 1
        assert names.count("runner/a") == 1
        mesh.stop(signal.SIGTERM)
        (gone,) = await _findings(mesh.home, 1)
        assert gone["detail"].startswith("the registry does not answer")


async def test_a_session_whose_system_prompt_changes_with_each_request_is_named_by_doctor_and_explain(
    common_mesh: MeshProcess,
) -> None:
    async with aiohttp.ClientSession(headers={"X-Session-Id": "s-1"}) as client:
        for minute in range(4):
            prompt = f"You are a helpful agent with rules that never change. It is 12:0{minute}. Be brief."
            messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "hi"}]
            asked = {"model": POOL, "messages": messages}
            async with client.post(f"{common_mesh.url}/v1/chat/completions", json=asked) as answer:
                assert answer.status == 200, await answer.text()
    _, out, _ = await run_weft("doctor", "-o", "json", home=common_mesh.home)
    (finding,) = [each for each in json.loads(out)["items"] if each["check"] == "prompts"]
    where = "the system prompt of session s-1 changes between characters 65 and 80 (3 of 4 requests)"
    assert finding["detail"] == f"{where}; nothing after this is cached"
    _, explained, _ = await run_weft("explain", home=common_mesh.home)
    assert where in explained

"""`weft models trial` on the real demo model: pair and verdict outlive a restart, between a switch and its undo."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mesh_process import MeshProcess, eventually, running_mesh, write_config

from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("two meshes with real engines"), pytest.mark.real, pytest.mark.timeout(300)]
SECONDS = 120.0
TENANT = {"X-Tenant-ID": "acme"}
SCHEMA = {
    "type": "object",
    "properties": {"ocean": {"enum": ["Pacific", "Atlantic"]}},
    "required": ["ocean"],
    "additionalProperties": False,
}
CHAT = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Which ocean is the largest?"}],
    "max_tokens": 40,
    "response_format": {"type": "json_schema", "json_schema": {"name": "ocean", "schema": SCHEMA}},
}
ALIAS = "kind: alias\nname: chat\ntarget: old\n"
CAPTURED = "kind: tenant\nname: acme\ncapture: true\n"
START = ("models", "trial", "start", "new", "--against", "chat", "--tenant", "acme", "--share", "100%")


async def _report(mesh: MeshProcess, *states: str) -> dict[str, Any]:
    """The report, once the mesh has it and its pairs have these states."""

    async def found() -> dict[str, Any] | None:
        async with aiohttp.ClientSession(mesh.url) as http, http.get("/v1/trials/new-vs-old") as answer:
            report: dict[str, Any] = (
                await answer.json() if answer.status == 200 else {"pairs": [], "stopped": "unknown"}
            )
        is_reachable = "stopped" not in report and [each["state"] for each in report["pairs"]] == list(states)
        return report if is_reachable else None

    return dict(await eventually(found, SECONDS, f"the trial has no pairs {states}"))


async def test_pair_of_a_trial_is_judged_and_outlives_a_restart_between_switch_and_revert(tmp_path: Path) -> None:
    model = {"path": str(demo_model_path()), "context_tokens": 1024, "embeddings": False}
    models = [{**model, "name": "old", "slots": 1}, {**model, "name": "new", "slots": 2}]
    config = ("--config", str(write_config(tmp_path, {"name": "r", "models": models})))
    with running_mesh(tmp_path / "home", *config) as mesh:
        await mesh.weft("apply", "-f", "-", stdin=f"{ALIAS}---\n{CAPTURED}")
        assert await mesh.weft(*START) == "trial/new-vs-old created\n"
        await _report(mesh)
        async with aiohttp.ClientSession(mesh.url) as http:
            headers = {**TENANT, "X-Request-Id": "req-asked"}
            async with http.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
                text = (await answer.json())["choices"][0]["message"]["content"]
            (pair,) = (await _report(mesh, "answered"))["pairs"]
            assert pair["requestId"] == "req-asked"
            assert (pair["checks"]["candidateValid"], pair["checks"]["againstValid"]) == (True, True)
            path = f"/v1/trials/new-vs-old/pairs/{pair['task']}"
            async with http.post(f"{path}/verdict", json={"verdict": "b"}) as answer:
                judged = await answer.json()
        assert judged["a" if judged["aBy"] == "old" else "b"]["text"] == text
        assert judged["verdict"] == {"new": "against", "old": "candidate"}[judged["aBy"]]
        assert await mesh.weft("models", "trial", "switch", "new-vs-old") == "alias/chat points to new instead of old\n"
    with running_mesh(tmp_path / "home", *config) as mesh:
        await _report(mesh, "answered")
        report = json.loads(await mesh.weft("models", "trial", "report", "new-vs-old", "-o", "json"))
        assert report["pairs"] == [pair | {"verdict": judged["verdict"]}]
        assert report["summary"][f"{judged['verdict']}Preferred"] == 1
        assert await mesh.weft("models", "trial", "revert", "new-vs-old") == "alias/chat points to old instead of new\n"
        assert (await mesh.weft("models", "trial", "report", "new-vs-old")).startswith("Pairs: ")

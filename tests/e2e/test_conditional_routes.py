"""A route whose candidates state which requests they accept, over a real model."""

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from mesh_process import MeshProcess, run_weft, running_mesh, write_config

from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a mesh with a real engine"), pytest.mark.real]

ROUTE = """
kind: route
name: sized
candidates: [quick, careful]
conditions:
  - {candidate: quick, maxPromptTokens: 100, tenants: [default, ann]}
"""


def ask(mesh: MeshProcess, text: str, tenant: str) -> tuple[str, str]:
    """The model that answers, and the id of the request."""
    body: dict[str, Any] = {"model": "route/sized", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", "X-Tenant-ID": tenant}
    with urlopen(Request(f"{mesh.url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=60) as answer:
        return json.loads(answer.read())["model"], answer.headers["X-Request-ID"]


async def test_conditions_of_a_declared_route_choose_the_model_and_are_explained(tmp_path: Path) -> None:
    facts = {"path": str(demo_model_path()), "slots": 1, "context_tokens": 2048}
    models = [{"name": name, **facts} for name in ("quick", "careful")]
    config = write_config(tmp_path, *({"name": f"on-{model['name']}", "models": [model]} for model in models))
    declared = tmp_path / "route.yaml"
    declared.write_text(ROUTE)
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        code, shown, error = await run_weft("apply", "-f", str(declared), home=mesh.home)
        assert code == 0, shown + error
        assert ask(mesh, "Hello.", "ann")[0] == "quick"
        for text, tenant, why in (
            ("word " * 400, "ann", "takes prompts of at most 100 tokens"),
            ("Hello.", "eve", "takes requests of default, ann"),
        ):
            model, request_id = ask(mesh, text, tenant)
            assert model == "careful"
            _, shown, _ = await run_weft("explain", request_id, home=mesh.home)
            assert why in shown, shown

"""One scripted mesh with a resource of each kind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_harness import ScriptedMesh, scripted_mesh
from cli_samples import some_model, some_runner
from kit.resource_samples import some_agent, some_event, some_route


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[ScriptedMesh]:
    with scripted_mesh(tmp_path / "home") as mesh:
        target = json.loads((mesh.home / "run" / "up.json").read_text())["grpc"]
        mesh.add(some_model(), some_model("qwen-2"), some_model("solo", pool=""), some_agent(), some_runner(target))
        mesh.add(some_route())
        mesh.events.extend([some_event(1), some_event(2, "solo")])
        yield mesh

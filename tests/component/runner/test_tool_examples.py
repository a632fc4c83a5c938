"""The example of docs/agents.md: its configuration, its functions and its server, as they stand."""

import datetime as dt
import json
import os
import sys
from pathlib import Path

import pytest

from runner_svc.tools.tool_box import build_tool_box
from weft_app.compose.tool_sources import tool_sources
from weft_app.config.loader import load_config

pytestmark = pytest.mark.slow("starts a mesh")

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "tools"


async def test_tool_example_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(ROOT)
    config = load_config(FOLDER / "weft.yaml")
    assert config.runners is not None
    (runner,) = config.runners
    # `python` is the one that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    box = build_tool_box(tool_sources(runner, {**os.environ, "PATH": path}))
    try:
        await box.start()
        (agent,) = runner.agents
        wires = [tool.wire_name for tool in box.pick([*agent.tools, "count"])]
        assert wires == ["time_in", "notes_add", "notes_search", "count"]

        assert (await box.run("count", box.check("count", '{"text": "one two three"}'))).content == "3"
        told = json.loads((await box.run("time_in", box.check("time_in", '{"zone": "Europe/Berlin"}'))).content)
        assert dt.date.fromisoformat(told["date"])
        assert "there is no time zone Mars" in (await box.run("time_in", {"zone": "Mars"})).content

        note = box.check("notes.add", '{"note": "Buy milk"}')
        assert (await box.run("notes.add", note)).content == "Note 1 kept."
        assert "Buy milk" in (await box.run("notes.search", {"word": "milk"})).content
    finally:
        await box.stop()
        sys.modules.pop("word_tools", None)

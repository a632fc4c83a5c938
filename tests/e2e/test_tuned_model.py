"""`weft models tune` on the real demo model: a trial that is faster is applied and undone, and callers come first."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mesh_process import WEFT, MeshProcess, run_weft, running_mesh, write_config

from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a mesh with a real engine"), pytest.mark.real, pytest.mark.timeout(300)]
SLOW = "4"
"""A batch size with which the engine reads a prompt hardly faster than it writes."""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[MeshProcess]:
    model = {"name": "smol", "path": str(demo_model_path()), "slots": 1, "context_tokens": 1024, "embeddings": False}
    runner = {"name": "r", "models": [{**model, "extra_arguments": ["--ubatch-size", SLOW]}]}
    with running_mesh(tmp_path / "home", "--config", str(write_config(tmp_path, runner))) as mesh:
        yield mesh


def _parameters(mesh: MeshProcess) -> Any:
    """The load parameters with which the model is loaded."""
    (instance,) = httpx2.get(f"{mesh.url}/v1/admin/runners/r/instances").json()["instances"]
    return instance["loadOptions"]["parameters"]


async def test_faster_settings_are_applied_as_a_profile_and_undone(mesh: MeshProcess) -> None:
    options = ("--minutes", "0.75", "--vary", "ubatch_tokens", "--min-agreement", "0.7", "--apply", "-o", "json")
    code, out, err = await run_weft("models", "tune", "smol", *options, home=mesh.home, seconds=240)
    assert code == 0, err
    report = json.loads(out)
    assert report["trials"][0]["settings"] == {}
    assert report["trials"][0]["agreement"] == 1.0
    assert report["best"]["promptTokensPerSecond"] > 1.1 * report["present"]["promptTokensPerSecond"], report
    assert _parameters(mesh) == report["best"]["settings"]

    code, _, err = await run_weft("mesh", "profile", "switch", report["undoProfile"], home=mesh.home)
    assert (code, _parameters(mesh)) == (0, {}), err


def test_caller_interrupts_a_trial_and_ctrl_c_leaves_the_model_as_it_was(mesh: MeshProcess) -> None:
    line = [*WEFT, "models", "tune", "smol", "--vary", "ubatch_tokens", "--home", str(mesh.home)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as tuning:
        assert tuning.stderr is not None
        lines = iter(tuning.stderr)
        assert any("trial 1: as now: measured" in each for each in lines)
        asked = {"model": "smol", "prompt": "The sea is", "max_tokens": 16, "ignore_eos": True}
        answer = httpx2.post(f"{mesh.url}/v1/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        assert any("interrupted: a caller came" in each for each in lines)
        tuning.send_signal(signal.SIGINT)
        assert tuning.wait(60) == 130
    assert _parameters(mesh) == {}

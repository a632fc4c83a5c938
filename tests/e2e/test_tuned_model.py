"""`weft models tune`: faster settings are applied and undone, and callers come first, on the real demo model."""

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
from weft_testing.fake_backend.process import fake_backend_command

pytestmark = [pytest.mark.slow("a mesh with a real engine"), pytest.mark.real, pytest.mark.timeout(300)]
MODEL = {"name": "smol", "slots": 1, "context_tokens": 1024, "embeddings": False}
SLOW_BY_DEFAULT = """
case "$*" in
  *"--ubatch-size 512"*) ;;
  *) set -- "$@" --prefill-seconds 0.2 ;;
esac
exec "$0" "$@"
"""
"""A stand-in whose speed is known: how much faster a real engine gets depends on what else its machine does."""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[MeshProcess]:
    runner = {"name": "r", "models": [{**MODEL, "path": str(demo_model_path())}]}
    with running_mesh(tmp_path / "home", "--config", str(write_config(tmp_path, runner))) as mesh:
        yield mesh


@pytest.fixture
def stand_in_mesh(tmp_path: Path) -> Iterator[MeshProcess]:
    command = ("sh", "-c", SLOW_BY_DEFAULT, *fake_backend_command())
    runner = {"name": "r", "command": command, "models": [{**MODEL, "path": __file__}]}
    with running_mesh(tmp_path / "home", "--config", str(write_config(tmp_path, runner))) as mesh:
        yield mesh


def _parameters(mesh: MeshProcess) -> Any:
    """The load parameters with which the model is loaded."""
    (instance,) = httpx2.get(f"{mesh.url}/v1/admin/runners/r/instances").json()["instances"]
    return instance["loadOptions"]["parameters"]


async def test_faster_settings_are_applied_and_undone(stand_in_mesh: MeshProcess) -> None:
    mesh = stand_in_mesh
    options = ("--minutes", "4", "--vary", "ubatch_tokens", "--apply", "-o", "json")
    code, out, err = await run_weft("models", "tune", "smol", *options, home=mesh.home, seconds=270)
    assert code == 0, err
    report = json.loads(out)
    assert report["trials"][0]["settings"] == {}
    assert [each["agreement"] for each in report["trials"]] == [1.0] * 6
    assert report["best"]["settings"] == {"ubatch_tokens": 512}, report
    assert report["best"]["promptTokensPerSecond"] > report["present"]["promptTokensPerSecond"]
    assert _parameters(mesh) == {"ubatch_tokens": 512}

    code, _, err = await run_weft(*report["undo"].split()[1:], home=mesh.home)
    assert code == 0, err
    asked = {"model": "smol", "prompt": "The sea is", "max_tokens": 1}
    httpx2.post(f"{mesh.url}/v1/completions", json=asked, timeout=60).raise_for_status()
    assert _parameters(mesh) == {}


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

"""A runtime of another package in `weft doctor`, `weft up` and `weft runner conformance`."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.runtime_plugin import EXAMPLE, install
from mesh_process import COLD_WEFT, MeshProcess, running_mesh, user_environment, write_config

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plugin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(install(folder / "site")))
        yield folder


@pytest.fixture(scope="module")
def mesh(folder: Path) -> Iterator[MeshProcess]:
    with running_mesh(folder / "home", "--config", str(_config(folder)), weft=COLD_WEFT) as mesh:
        yield mesh


def _config(folder: Path, **model: Any) -> Path:
    text = EXAMPLE / "README.md"
    entry = {"name": "weaver", "text": str(text), "tokens_per_second": 200.0, **model}
    return write_config(folder, {"name": "cloth", "runtime": "ngram", "models": [entry], "first_term_seconds": 0.5})


def _weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COLD_WEFT, *arguments], env=user_environment(), capture_output=True, text=True, timeout=120, check=False
    )


def test_doctor_lists_the_plugin_and_runs_its_checks(folder: Path) -> None:
    done = _weft("doctor", "--home", str(folder / "other"), "--config", str(_config(folder)), "-p", "0", "-o", "json")
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["items"]}
    assert "ngram (weft-ngram 0.1.0)" in findings["runtimes"]["detail"]
    assert "weaver (" in findings["models"]["detail"]
    assert findings["n-gram server"]["verdict"] == "ok"
    assert done.returncode == 0, done.stdout


def test_unknown_setting_is_rejected_and_error_names_it(folder: Path) -> None:
    (folder / "wrong").mkdir()
    config = _config(folder / "wrong", path="/m.gguf")
    done = _weft("up", "--home", str(folder / "wrong" / "home"), "--config", str(config))
    assert done.returncode != 0
    assert "model weaver cannot have path, because the runtime is ngram: this runtime learns from a text" in done.stderr


async def test_plugin_runner_reports_the_runtime_and_passes_every_conformance_check(mesh: MeshProcess) -> None:
    assert [runner.runtime for runner in await mesh.runners()] == ["ngram"]
    done = _weft("runner", "conformance", "cloth", "--home", str(mesh.home), "-o", "json")
    findings = json.loads(done.stdout)["items"]
    assert [finding for finding in findings if finding["verdict"] == "broken"] == []
    assert done.returncode == 0, done.stderr
    assert sum(finding["verdict"] == "honoured" for finding in findings) >= 12

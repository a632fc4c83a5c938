"""`--no-demo`: where no runner is configured, one without models, of which nothing is required."""

from pathlib import Path

import pytest

from weft_app.compose.demo import DEMO_RUNNER, load_without_demo
from weft_app.compose.environment import environment_of_mesh, read_environment


def test_missing_configuration_gives_a_runner_without_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_without_demo(None, {"port": 0}, lambda document: environment_of_mesh(document, {}))
    assert [(runner.name, runner.models) for runner in config.runners or ()] == [(DEMO_RUNNER, ())]
    assert config.port == 0


def test_runner_without_demo_respects_the_visible_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (runner,) = load_without_demo(None, {}, read_environment({"CUDA_VISIBLE_DEVICES": "1,3"}).applied_to).runners or ()
    assert (runner.models, runner.devices) == ((), (1, 3))


def test_existing_configuration_is_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("runners: [{name: box, models: [{name: qwen, path: /models/qwen.gguf}]}]")
    (runner,) = load_without_demo(file).runners or ()
    assert [model.name for model in runner.models] == ["qwen"]

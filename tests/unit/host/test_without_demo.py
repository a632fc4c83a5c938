"""`--no-demo`: where no runner is configured, one without models, of which nothing is required."""

from pathlib import Path

import pytest

from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.demo import DEMO_RUNNER
from weft_app.compose.environment import environment_of_mesh, read_environment


def test_missing_configuration_gives_a_runner_without_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = (
        ConfigurationSource(
            overrides={"port": 0}, below=lambda document: environment_of_mesh(document, {}), runners=tuple
        )
        .load()
        .config
    )
    assert [(runner.name, runner.models) for runner in config.runners or ()] == [(DEMO_RUNNER, ())]
    assert config.port == 0


def test_runner_without_demo_respects_the_visible_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    below = read_environment({"CUDA_VISIBLE_DEVICES": "1,3"}).applied_to
    (runner,) = ConfigurationSource(below=below, runners=tuple).load().config.runners or ()
    assert (runner.models, runner.devices) == ((), (1, 3))


def test_existing_configuration_is_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("runners: [{name: box, models: [{name: qwen, path: /models/qwen.gguf}]}]")
    (runner,) = ConfigurationSource(path=file, runners=tuple).load().config.runners or ()
    assert [model.name for model in runner.models] == ["qwen"]

"""The configuration file: layers, limits, and a reference that is true."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from reference_pages.settings import page

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft_app.config.config import WeftConfig
from weft_app.config.document import merge
from weft_app.config.loader import load_config, load_with_sources
from weft_app.config.schema import schema_text


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def schema() -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads(schema_text()))


@pytest.mark.parametrize(
    ("runner", "is_valid"),
    [
        ({"models": [{"name": "m", "path": "m.gguf"}]}, True),
        ({"models": [{"name": "m", "url": "http://box/v1"}]}, False),
        ({"runtime": "llama_server", "models": [{"name": "m", "path": "m.gguf", "threads": 4}]}, True),
        ({"runtime": "openai_http", "models": [{"name": "m", "url": "http://box/v1"}]}, True),
        ({"runtime": "openai_http", "models": [{"name": "m", "path": "m.gguf"}]}, False),
        ({"runtime": "openai_remote", "models": [{"name": "m", "url": "https://box/v1", "threads": 4}]}, False),
        ({"runtime": "somebody_elses", "models": [{"name": "m", "flavour": "lemon"}]}, True),
        ({"runtime": "somebody_elses", "models": [{"flavour": "lemon"}]}, False),
        ({"models": []}, False),
        ({"models": [{"name": "m", "path": "m.gguf"}], "port_range": "any"}, False),
    ],
)
def test_schema_ties_model_settings_to_the_runtime_of_the_runner(
    schema: jsonschema_rs.Draft202012Validator, runner: dict[str, Any], is_valid: bool
) -> None:
    assert schema.is_valid({"runners": [{"name": "r", **runner}]}) is is_valid


def test_every_setting_has_a_description() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert not [row for row in rows if row.endswith("|  |")]


def test_local_file_overrides_the_main_one_and_the_command_line_overrides_both(tmp_path: Path) -> None:
    path = _write(tmp_path, "weft.yaml", "port: 1\nrouter: {queue_timeout_seconds: 5.0, max_attempts: 2}\n")
    _write(tmp_path, "weft.local.yaml", "router: {max_attempts: 4}\ndrain_seconds: 1\n")
    config = load_config(path, {"port": 3})
    assert config.port == 3
    assert config.drain_seconds == 1
    assert (config.router.queue_timeout_seconds, config.router.max_attempts) == (5.0, 4)


def test_empty_configuration_is_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(None) == WeftConfig()
    assert load_config(_write(tmp_path, "empty.yaml", "")) == WeftConfig()


def test_missing_file_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(FieldError) as refused:
        load_config(tmp_path / "absent.yaml")
    assert "absent.yaml" in refused.value.message


@pytest.mark.parametrize(
    "runners",
    [
        "[{name: a, models: [{name: m, path: x}]}, {name: a, models: [{name: n, path: x}]}]",
        "[{name: a, models: [{name: m, path: x}]}, {name: b, models: [{name: m, path: x}]}]",
        "[{name: a, models: [{name: m, path: x, replicas: 2}]}, {name: b, models: [{name: m-2, path: x}]}]",
        "[{name: a, models: [{name: m, path: x, replica_max: 3}]}, {name: m-3, models: [{name: n, path: x}]}]",
    ],
)
def test_duplicate_names_are_refused_with_a_remedy(tmp_path: Path, runners: str) -> None:
    with pytest.raises(FieldError) as refused:
        load_config(_write(tmp_path, "weft.yaml", f"runners: {runners}"))
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert "pool" in refused.value.message


@pytest.mark.parametrize(
    ("base", "over", "result"),
    [
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({}, {"b": 1}, {"b": 1}),
        ({"a": [{"name": "x"}]}, {"a": [{"path": "y"}]}, {"a": [{"path": "y"}]}),
        ({"a": [{"name": "x"}]}, {"a": []}, {"a": []}),
        ({"a": [{"name": "x"}, {"name": "x"}]}, {"a": [{"name": "x", "b": 1}]}, {"a": [{"name": "x", "b": 1}]}),
        (
            {"a": [{"name": "x", "b": 1}, {"name": "y"}]},
            {"a": [{"name": "z"}, {"name": "x", "c": 2}]},
            {"a": [{"name": "x", "b": 1, "c": 2}, {"name": "y"}, {"name": "z"}]},
        ),
    ],
)
def test_mappings_and_named_entries_are_merged_and_the_rest_is_replaced(
    base: dict[str, Any], over: dict[str, Any], result: dict[str, Any]
) -> None:
    assert merge(base, over) == result


def test_variables_name_both_files_and_the_command_line_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (away := tmp_path / "away").mkdir()
    named = _write(away, "pool.yaml", "drain_seconds: 3\nport: 4001\n")
    local = _write(tmp_path, "mine.yaml", "port: 4002\n")
    given = _write(tmp_path, "given.yaml", "drain_seconds: 5\n")
    _write(away, "pool.local.yaml", "drain_seconds: 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_POOL_SETTINGS_PATH", str(named))
    assert (load_config(None).drain_seconds, load_config(None).port) == (4, 4001), "with the local file beside it"
    monkeypatch.setenv("LLM_POOL_LOCAL_SETTINGS_PATH", str(local))
    loaded = load_with_sources(None)
    assert (loaded.config.drain_seconds, loaded.config.port) == (3, 4002), "in place of the local file beside it"
    assert "mine.yaml" in loaded.sources["port",]
    assert (load_config(given).drain_seconds, load_config(given).port) == (5, 4002)
    monkeypatch.setenv("LLM_POOL_SETTINGS_PATH", "")
    assert load_config(None).port == 4002, "an empty variable is none, and a local file needs no main file"


@pytest.mark.parametrize("variable", ["LLM_POOL_SETTINGS_PATH", "LLM_POOL_LOCAL_SETTINGS_PATH"])
def test_variable_for_a_missing_file_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "nowhere.yaml")
    with pytest.raises(FieldError, match="which is no file") as raised:
        load_config(None)
    assert raised.value.field == variable


def test_file_is_read_although_none_can_be_looked_for_beside_it(tmp_path: Path) -> None:
    """Of a file in a folder of another user, the traceback named the local file, of which nobody had spoken."""
    assert load_config(_write(tmp_path, f"{'x' * 245}.yaml", "port: 4001\n")).port == 4001


@pytest.mark.parametrize("variable", ["LLM_POOL_SETTINGS_PATH", "LLM_POOL_LOCAL_SETTINGS_PATH"])
def test_unreachable_file_of_a_variable_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, f"{'x' * 300}.yaml")
    with pytest.raises(FieldError, match="cannot be read: File name too long"):
        load_config(None)


_OVERLAID = """
runners:
  - name: left
    models:
      - {name: a, path: /m/a.gguf, slots: 2, default_max_tokens: 64, default_params: {temperature: 0.2, top_k: 5}}
      - {name: b, path: /m/b.gguf, enabled: false}
"""


def test_disabled_model_is_ignored_until_the_local_file_enables_it(tmp_path: Path) -> None:
    path = _write(tmp_path, "weft.yaml", _OVERLAID)
    (left,) = load_config(path).runners or ()
    assert [model.name for model in left.models] == ["a"]
    _write(tmp_path, "weft.local.yaml", "runners: [{name: left, models: [{name: b, enabled: true}]}]")
    (left,) = load_config(path).runners or ()
    assert [model.name for model in left.models] == ["a", "b"]


def test_runner_with_only_disabled_models_is_refused_by_name(tmp_path: Path) -> None:
    path = _write(tmp_path, "weft.yaml", _OVERLAID)
    _write(tmp_path, "weft.local.yaml", "runners: [{name: left, models: [{name: a, enabled: false}]}]")
    with pytest.raises(FieldError) as refused:
        load_config(path)
    assert refused.value.field == "runners.left.models"
    assert "enabled: true" in refused.value.message


def test_settings_of_a_disabled_model_are_still_validated(tmp_path: Path) -> None:
    path = _write(tmp_path, "weft.yaml", _OVERLAID.replace("enabled: false", "enabled: false, slots: 0"))
    with pytest.raises(FieldError) as refused:
        load_config(path)
    assert "slots" in refused.value.field

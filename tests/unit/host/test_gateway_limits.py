"""Every bound of the HTTP edge has a name in the configuration file, with the same default."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import pytest

from gateway.config import ConnectionLimits, GatewayConfig, RequestLimits
from weft.dispatch.schema_guard import SchemaLimits
from weft_app.compose.gateway import gateway_config
from weft_app.config.config import GatewaySection, WeftConfig
from weft_app.config.gateway_sections import ConnectionsSection, LimitsSection, SchemasSection

NAMED_ELSEWHERE = {"host", "port", "allowed_hosts", "tls", "auth_required"}
"""At the top of the file, or in a section of their own."""
NOT_CONFIGURED = {"deadline_slack_seconds"}
"""How long the edge waits for the mesh to end a request that is out of time: no bound on what a caller may do."""
PATHS = [
    *((("limits", "schemas"), field.name) for field in fields(SchemaLimits)),
    *((("limits",), field.name) for field in fields(RequestLimits) if field.name != "schemas"),
    *((("connections",), field.name) for field in fields(ConnectionLimits)),
]


def configured(said: Mapping[str, Any]) -> GatewayConfig:
    return gateway_config(WeftConfig.model_validate({"gateway": said}))


def test_no_bound_is_without_a_name_in_the_file() -> None:
    assert {field.name for field in fields(SchemaLimits)} == set(SchemasSection.model_fields)
    assert {field.name for field in fields(RequestLimits)} == set(LimitsSection.model_fields)
    assert {field.name for field in fields(ConnectionLimits)} == set(ConnectionsSection.model_fields)
    left = {field.name for field in fields(GatewayConfig)} - NAMED_ELSEWHERE - NOT_CONFIGURED
    assert left <= set(GatewaySection.model_fields)


def test_a_file_that_says_nothing_means_the_edges_own_defaults() -> None:
    found = configured({})
    assert found.limits == RequestLimits()
    assert found.connections == ConnectionLimits()
    assert found.body_timeout_seconds == GatewayConfig().body_timeout_seconds


@pytest.mark.parametrize(("path", "name"), PATHS)
def test_what_the_file_says_arrives(path: tuple[str, ...], name: str) -> None:
    default = _at(GatewayConfig(), path)[name]
    other = default / 2 if isinstance(default, float) else default - 1
    said: dict[str, Any] = {name: other}
    for step in reversed(path):
        said = {step: said}
    assert _at(configured(said), path)[name] == other


def _at(config: GatewayConfig, path: tuple[str, ...]) -> dict[str, Any]:
    found = asdict(config)
    for step in path:
        found = found[step]
    return found

"""Every setting of the file reaches the service that declares it, and a file that says nothing means its defaults.

Most sections are the service's own class. Those that a service extends are tried one setting at a time.
"""

from dataclasses import asdict, fields
from typing import Any

import pytest

from gateway.config import (
    BatchEdgeSettings,
    ConnectionSettings,
    GatewayConfig,
    GatewaySettings,
    MediaSettings,
    RequestSettings,
    ResultConfig,
)
from registry_svc.config import LedgerConfig, LedgerSettings, RegistryConfig, RegistrySettings
from router_svc.durable.limits import BatchSettings, ResultSettings, TaskLimits, TaskSettings
from router_svc.policy.limits import QueueLimits, SchedulerLimits
from weft_app.compose.durable_services import task_limits
from weft_app.compose.gateway import gateway_config
from weft_app.compose.home import WeftHome
from weft_app.compose.registry import registry_config
from weft_app.compose.router import scheduler_limits
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config

IN_THE_GATEWAY: dict[tuple[str, ...], Any] = {
    ("limits",): RequestSettings,
    ("connections",): ConnectionSettings,
    ("batches",): BatchEdgeSettings,
    ("results",): ResultConfig,
    ("media",): MediaSettings,
}


def _names(kind: Any, default: Any) -> list[str]:
    """Its numbers: those can be changed by a little, whatever they mean."""
    plain = asdict(default)
    return [
        field.name
        for field in fields(kind)
        if isinstance(plain[field.name], (int, float)) and plain[field.name] is not True
    ]


def _other(value: Any) -> Any:
    return value / 2 if isinstance(value, float) else value - 1 if value > 1 else value + 1


def _within(path: tuple[str, ...], value: dict[str, Any]) -> dict[str, Any]:
    for step in reversed(path):
        value = {step: value}
    return value


def _at(config: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        config = getattr(config, step)
    return config


def test_empty_file_uses_the_services_defaults() -> None:
    config = WeftConfig()
    edge = gateway_config(config)
    assert edge == GatewayConfig()
    assert scheduler_limits(config.router) == SchedulerLimits()
    assert task_limits(config) == TaskLimits()


def test_receipts_at_stream_end_can_be_disabled() -> None:
    assert not gateway_config(parse_config({"gateway": {"receipt_comments": False}})).receipt_comments


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((path, name) for path, kind in IN_THE_GATEWAY.items() for name in _names(kind, kind())),
        *(((), name) for name in _names(GatewaySettings, GatewaySettings())),
    ],
)
def test_gateway_settings_reach_the_gateway(path: tuple[str, ...], name: str) -> None:
    default = getattr(_at(GatewayConfig(), path), name)
    other = True if default is False else _other(default)
    config = parse_config({"gateway": _within(path, {name: other})})
    assert getattr(_at(gateway_config(config), path), name) == other


@pytest.mark.parametrize("name", [field.name for field in fields(QueueLimits)])
def test_scheduler_settings_reach_the_scheduler(name: str) -> None:
    other = _other(getattr(SchedulerLimits(), name))
    config = parse_config({"router": {name: other}})
    assert getattr(scheduler_limits(config.router), name) == other


@pytest.mark.parametrize("name", [field.name for field in fields(TaskSettings)])
def test_task_settings_reach_the_task_service(name: str) -> None:
    other = getattr(TaskLimits(), name) + 1
    assert getattr(task_limits(parse_config({"router": {"tasks": {name: other}}})), name) == other


@pytest.mark.parametrize("name", [field.name for field in fields(BatchSettings)])
def test_batch_settings_reach_the_batch_service(name: str) -> None:
    other = getattr(BatchSettings(), name) + 1
    assert getattr(parse_config({"router": {"batches": {name: other}}}).router.batches, name) == other


@pytest.mark.parametrize("name", [field.name for field in fields(ResultSettings)])
def test_result_settings_reach_the_result_store(name: str) -> None:
    other = getattr(ResultSettings(), name) + 1
    assert getattr(parse_config({"router": {"results": {name: other}}}).router.results, name) == other


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(((), name) for name in _names(RegistrySettings, RegistrySettings())),
        *((("ledger",), name) for name in _names(LedgerSettings, LedgerSettings())),
    ],
)
def test_registry_settings_reach_the_registry(path: tuple[str, ...], name: str, tmp_path: Any) -> None:
    default = getattr(_at(RegistrySettings(), path), name)
    other = default + 1 if "heartbeat" not in name else default - 1
    config = registry_config(parse_config({"registry": _within(path, {name: other})}), WeftHome(tmp_path))
    assert isinstance(config, RegistryConfig)
    assert isinstance(config.ledger, LedgerConfig)
    assert getattr(_at(config, path), name) == other

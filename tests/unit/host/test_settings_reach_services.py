"""Every setting of the file reaches the service that declares it, and a file that says nothing means its defaults.

Most sections are the service's own class. Those that a service extends are tried one setting at a time.
"""

from dataclasses import fields
from typing import Any

import pytest

from gateway.gateway_config import GatewayConfig
from router_svc.policy.limits import QueueLimits, SchedulerLimits
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.service_configs import gateway_config, scheduler_limits
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config
from weft_app.config.schema import schema


def _other(value: Any) -> Any:
    return value / 2 if isinstance(value, float) else value - 1 if value > 1 else value + 1


def test_empty_file_uses_the_services_defaults() -> None:
    config = WeftConfig()
    edge = gateway_config(config)
    assert edge == GatewayConfig()
    assert scheduler_limits(config.router) == SchedulerLimits()


def test_receipts_at_stream_end_can_be_disabled() -> None:
    assert not gateway_config(parse_config({"gateway": {"receipt_comments": False}})).receipt_comments


@pytest.mark.parametrize("name", [field.name for field in fields(QueueLimits)])
def test_scheduler_settings_reach_the_scheduler(name: str) -> None:
    other = _other(getattr(SchedulerLimits(), name))
    config = parse_config({"router": {name: other}})
    assert getattr(scheduler_limits(config.router), name) == other


def test_constant_of_a_section_is_no_setting() -> None:
    with pytest.raises(FieldError, match=r"router\.tasks\.sweep_batch: is not a setting"):
        parse_config({"router": {"tasks": {"sweep_batch": 1}}})
    assert "sweep_batch" not in schema()["$defs"]["TaskLimits"]["properties"]

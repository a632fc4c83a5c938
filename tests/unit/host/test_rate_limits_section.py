"""Requests per tenant: from weft.yaml to the edge, and from the environment where the file says nothing."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.gateway_config import RateLimitConfig
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.units import Rate
from weft_app.compose.environment import read_environment
from weft_app.compose.runner_http import runner_api_config
from weft_app.compose.service_configs import gateway_config
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_config, parse_config
from weft_app.config.settings_tree import plain_value

LIMITED = {"rate_limits": {"default": "10req/sec", "tenants": {"big": "500req/min"}}}
RUNNERS = [{"name": "a", "models": [{"name": "m", "path": "m.gguf"}]}]
AS_CONFIG = RateLimitConfig(default=Rate(10, 1), tenants={"big": Rate(500, 60)})


def config(**gateway: Any) -> WeftConfig:
    return parse_config({"runners": RUNNERS, "gateway": gateway})


def limits_of_runner(environment: dict[str, str], **gateway: Any) -> RateLimitConfig | None:
    read = read_environment(environment)
    found = parse_config(read.applied_to({"runners": RUNNERS, "gateway": gateway}))
    return runner_api_config(found, read, 0).edge.rate_limits


def test_gateway_has_no_rate_limits_by_default() -> None:
    assert gateway_config(config()).rate_limits is None
    assert gateway_config(config(**LIMITED)).rate_limits == AS_CONFIG


@pytest.mark.parametrize("window", ["sec", "min", "hour", "day", "week", "month"])
def test_rate_of_every_window_is_shown_as_weft_yaml_has_it(window: str) -> None:
    """`weft config show`, a reload and ENABLE_MULTI_TENANT ended with KeyError: 86400 for a rate per day."""
    rates = [f"1000req/{window}", f"90000tok/{window}"]
    found = parse_config({"router": {"rate_limits": {"default": rates}}}).router.rate_limits
    assert found is not None
    assert plain_value(found.default) == rates


def test_invalid_rate_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text(yaml.safe_dump({"gateway": {"rate_limits": {"tenants": {"big": "often"}}}}))
    with pytest.raises(FieldError, match=r"gateway\.rate_limits\.tenants\.big: .*must be a rate such as"):
        load_config(path)


def test_runner_has_no_rate_limits_unless_it_is_multi_tenant() -> None:
    assert limits_of_runner({}) is None
    assert limits_of_runner({"DEFAULT_RATE_LIMIT": "1req/s", "TENANT_RATE_LIMIT_x": "1req/s"}) is None


def test_multi_tenant_runner_defaults_to_fifty_requests_per_minute() -> None:
    assert limits_of_runner({"ENABLE_MULTI_TENANT": "true"}) == RateLimitConfig(default=Rate(50, 60))
    environment = {"ENABLE_MULTI_TENANT": "true", "DEFAULT_RATE_LIMIT": "7req/s", "TENANT_RATE_LIMIT_x": "1req/hour"}
    assert limits_of_runner(environment) == RateLimitConfig(default=Rate(7, 1), tenants={"x": Rate(1, 3600)})


def test_file_takes_precedence_over_the_environment() -> None:
    assert limits_of_runner({"ENABLE_MULTI_TENANT": "true", "DEFAULT_RATE_LIMIT": "7req/s"}, **LIMITED) == AS_CONFIG

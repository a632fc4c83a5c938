"""Tenants, clients and rates: from weft.yaml and the environment to the router."""

from typing import Any

import pytest

from router_svc.policy.pool_settings import ClientProfile, RateLimitConfig, RemotePermission, TenantSettings
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.units import Rate, RateUnit
from weft_app.compose.environment import environment_of, read_environment
from weft_app.compose.service_configs import router_config
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config

FIFTY = Rate(50, 60)
TOKENS = Rate(20_000, 60, RateUnit.TOKENS)


def config(**router: Any) -> WeftConfig:
    return parse_config({"router": router})


def limits(environment: dict[str, str], **router: Any) -> RateLimitConfig:
    with_environment = environment_of("router", environment)({"router": router})
    return router_config(parse_config(with_environment), "unix:/registry").rate_limits


def test_default_configuration_sets_no_rate_limits() -> None:
    assert limits({}) == RateLimitConfig()
    assert limits({"TENANT_RATE_LIMIT_x": "1req/s", "DEFAULT_RATE_LIMIT": "1req/s"}) == RateLimitConfig()


def test_multi_tenant_mesh_defaults_to_fifty_requests_per_minute_per_tenant() -> None:
    assert limits({}, multi_tenant=True) == RateLimitConfig(default=(FIFTY,))
    assert limits({"ENABLE_MULTI_TENANT": "true"}) == RateLimitConfig(default=(FIFTY,))
    named = {"tenants": {"big": ["500req/min", "20000tok/min"]}}
    expected = RateLimitConfig(default=(FIFTY,), tenants={"big": (Rate(500, 60), TOKENS)})
    assert limits({}, multi_tenant=True, rate_limits=named) == expected


def test_environment_sets_tenants_and_both_units() -> None:
    environment = {
        "ENABLE_MULTI_TENANT": "true",
        "TENANT_RATE_LIMIT_default": "100req/min, 20000tok/min",
        "TENANT_RATE_LIMIT_community-x": "5req/sec",
        "TENANT_RATE_LIMIT_tokens": "20000tok/min",
    }
    assert limits(environment) == RateLimitConfig(
        default=(Rate(100, 60), TOKENS), tenants={"community-x": (Rate(5, 1),), "tokens": (TOKENS,)}
    )
    assert limits({"ENABLE_MULTI_TENANT": "1", "DEFAULT_RATE_LIMIT": "7req/s"}).default == (Rate(7, 1),)


def test_file_takes_precedence_over_the_router_environment() -> None:
    environment = {"ENABLE_MULTI_TENANT": "true", "TENANT_RATE_LIMIT_x": "1req/s"}
    assert limits(environment, rate_limits={"default": ["9req/min"]}) == RateLimitConfig(default=(Rate(9, 60),))
    assert limits(environment, rate_limits={"default": []}) == RateLimitConfig()


@pytest.mark.parametrize("text", ["often", "5req/min,6req/min", "5req/min,6req/sec", "5req/min,", "0tok/min"])
def test_invalid_rate_in_the_environment_is_refused_with_its_variable(text: str) -> None:
    with pytest.raises(FieldError, match="TENANT_RATE_LIMIT_x: "):
        read_environment({"TENANT_RATE_LIMIT_x": text})


def test_tenants_have_shares_caps_and_permissions() -> None:
    found = router_config(
        config(
            default_tenant={"max_in_flight": 4, "allow_remote": "never"},
            tenants={"research": {"weight": 2.5, "allow_remote": "always"}},
        ),
        "unix:/registry",
    ).settings
    assert found.tenant("research") == TenantSettings(weight=2.5, allow_remote=RemotePermission.ALWAYS)
    assert found.tenant("else") == TenantSettings(max_in_flight=4, allow_remote=RemotePermission.NEVER)


def test_clients_have_profiles() -> None:
    section = {
        "priority": "low",
        "route": "drafts",
        "rates": ["10req/min"],
        "cooldown_after_refusals": 3,
        "cooldown_seconds": 5.0,
        "max_cooldown_seconds": 50.0,
    }
    found = router_config(config(clients={"nightly": section, "plain": {}}), "unix:/registry").clients
    assert found.profiles == {
        "nightly": ClientProfile(
            priority=Priority.LOW,
            route="drafts",
            rates=(Rate(10, 60),),
            cooldown_after_refusals=3,
            cooldown_seconds=5.0,
            max_cooldown_seconds=50.0,
        ),
        "plain": ClientProfile(),
    }


@pytest.mark.parametrize(
    ("router", "place"),
    [
        ({"tenants": {"two words": {}}}, "router.tenants"),
        ({"tenants": {"a": {"weight": 0.0}}}, "router.tenants.a.weight"),
        ({"tenants": {"a": {"allow_remote": "sometimes"}}}, "router.tenants.a.allow_remote"),
        ({"clients": {"a": {"priority": "system"}}}, "router.clients.a.priority"),
        ({"clients": {"a": {"route": "a b"}}}, "router.clients.a.route"),
        ({"clients": {"a": {"cooldown_seconds": 9.0, "max_cooldown_seconds": 5.0}}}, "router.clients.a"),
        ({"clients": {"-a": {}}}, "router.clients"),
        ({"rate_limits": {"default": ["often"]}}, "router.rate_limits.default"),
        ({"rate_limits": {"default": ["5req/min", "6req/min"]}}, "router.rate_limits.default"),
        ({"rate_limits": {"tenants": {"a": "5req/min"}}}, "router.rate_limits.tenants.a"),
    ],
)
def test_invalid_setting_is_refused_with_its_path(router: dict[str, Any], place: str) -> None:
    with pytest.raises(FieldError) as caught:
        config(**router)
    assert caught.value.field.startswith(place)

"""From the configuration to what a router knows of those who ask."""

from collections.abc import Mapping

from router_svc.client_registry import ClientProfile, ClientsConfig
from router_svc.policy.client_usage import CooldownRule
from router_svc.policy.settings import RemotePermission, TenantSettings
from router_svc.rate_limits import RateLimitConfig
from weft.kernel.request import Priority
from weft.kernel.units import Rate, parse_rates
from weft_app.compose.runner_environment import RunnerEnvironment
from weft_app.config.caller_sections import ClientSection, TenantSection
from weft_app.config.config import RouterSection

DEFAULT_RATES = (Rate(50, 60),)
"""50 requests a minute, where tenants are limited at all."""


def rate_limits(section: RouterSection, environment: RunnerEnvironment | None = None) -> RateLimitConfig:
    """How much tenants may ask for. What the file says of it wins over the environment, whole."""
    written = section.rate_limits
    if written is not None:
        default = DEFAULT_RATES if section.multi_tenant else ()
        return RateLimitConfig(
            default=default if written.default is None else parse_rates(written.default, "router.rate_limits.default"),
            tenants={
                tenant: parse_rates(rates, f"router.rate_limits.tenants.{tenant}")
                for tenant, rates in written.tenants.items()
            },
            max_tenants=written.max_tenants,
        )
    if environment is not None and environment.multi_tenant:
        return _of_environment(environment)
    return RateLimitConfig(default=DEFAULT_RATES if section.multi_tenant else ())


def _of_environment(environment: RunnerEnvironment) -> RateLimitConfig:
    names = {*environment.tenant_rates, *environment.tenant_token_rates}
    default_requests = environment.default_rate or (None if environment.default_token_rate else DEFAULT_RATES[0])
    return RateLimitConfig(
        default=_both(default_requests, environment.default_token_rate),
        tenants={
            name: _both(environment.tenant_rates.get(name), environment.tenant_token_rates.get(name)) for name in names
        },
    )


def _both(requests: Rate | None, tokens: Rate | None) -> tuple[Rate, ...]:
    return tuple(rate for rate in (requests, tokens) if rate is not None)


def tenant_settings(section: TenantSection) -> TenantSettings:
    """What the scheduler knows of a tenant."""
    return TenantSettings(
        weight=section.weight,
        max_in_flight=section.max_in_flight,
        allow_remote=RemotePermission(section.allow_remote),
    )


def clients_config(sections: Mapping[str, ClientSection]) -> ClientsConfig:
    """The profiles of clients."""
    return ClientsConfig(profiles={client: _profile(client, section) for client, section in sections.items()})


def _profile(client: str, section: ClientSection) -> ClientProfile:
    return ClientProfile(
        priority=Priority[section.priority.upper()],
        route=section.route or "",
        rates=parse_rates(section.rates, f"router.clients.{client}.rates"),
        cooldown=CooldownRule(
            after_refusals=section.cooldown_after_refusals,
            seconds=section.cooldown_seconds,
            max_seconds=section.max_cooldown_seconds,
        ),
    )

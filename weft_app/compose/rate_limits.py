"""The rate limits of tenants, from the file or the environment."""

from router_svc.policy.settings import RateLimitConfig
from router_svc.settings import RouterSettings
from weft.kernel.units import Rate
from weft_app.compose.runner_environment import RunnerEnvironment

DEFAULT_RATES = (Rate(50, 60),)
"""50 requests a minute, where tenants are limited at all."""


def rate_limits(section: RouterSettings, environment: RunnerEnvironment | None = None) -> RateLimitConfig:
    """How much tenants may ask for. What the file says of it wins over the environment, whole."""
    written = section.rate_limits
    default = DEFAULT_RATES if section.multi_tenant else ()
    if written is not None:
        return RateLimitConfig(
            default=default if written.default is None else written.default,
            tenants=written.tenants,
            max_tenants=written.max_tenants,
        )
    if environment is not None and environment.multi_tenant:
        return environment_rates(environment)
    return RateLimitConfig(default=default)


def environment_rates(environment: RunnerEnvironment) -> RateLimitConfig:
    """Returns the rates that the environment sets, where it has several tenants."""
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

"""Rate limits of tenants and clients: requests and tokens per window, counted before a request is queued."""

from collections.abc import Mapping
from dataclasses import dataclass

from router_svc.policy.settings import RateLimitConfig
from weft.dispatch.rate_windows import Claim, RateWindows, TrackedKeys
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.units import Rate, RateUnit

_TENANT, _CLIENT = "tenant/", "client/"
_BETWEEN = "\0"
"""Separator between a tenant and its client; neither name can contain it."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted for one request, to be corrected at its end."""

    token_keys: tuple[tuple[str, Rate], ...]
    tokens: int
    counted_at: float
    """Time of the count, in seconds on the monotonic clock."""


NOTHING_COUNTED = Counted((), 0, 0.0)


class RateLimits:
    """Counts in this process. Several routers count separately: each sees its own share of a tenant's requests."""

    def __init__(
        self, config: RateLimitConfig, client_rates: Mapping[str, tuple[Rate, ...]], clock: Clock, *, max_clients: int
    ) -> None:
        """`client_rates`: rates of clients with a profile, applied per tenant."""
        self._config = config
        self._client_rates = client_rates
        self._windows = RateWindows(clock)
        self._tenants = TrackedKeys(self._windows, config.default, config.max_tenants, _TENANT, clock)
        self._clients = {
            client: TrackedKeys(self._windows, rates, max_clients, f"{_CLIENT}{client}{_BETWEEN}", clock)
            for client, rates in client_rates.items()
        }

    def take(self, tenant: str, client_id: str, tokens: int) -> Counted:
        """Count a request and the estimated tokens of its prompt.

        Raises RATE_LIMIT_EXCEEDED with tenant, limit, remaining and resetAt (unix seconds) if it exceeds a limit.
        """
        claims = [*self._tenant_claims(tenant, tokens), *self._client_claims(tenant, client_id, tokens)]
        if not claims:
            return NOTHING_COUNTED
        try:
            counted_at = self._windows.take(claims)
        except WeftError as error:
            error.metadata["tenant"] = tenant
            raise
        keys = tuple((claim.key, claim.rate) for claim in claims if claim.rate.unit is RateUnit.TOKENS)
        return Counted(keys, tokens, counted_at)

    def correct(self, counted: Counted, tokens: int) -> None:
        """Correct the count of a finished request to the tokens that it used."""
        if tokens != counted.tokens:
            for key, rate in counted.token_keys:
                self._windows.correct(key, rate, tokens - counted.tokens, counted_at=counted.counted_at)

    def _tenant_claims(self, tenant: str, tokens: int) -> list[Claim]:
        rates = self._config.tenants.get(tenant)
        named = rates is not None
        rates = self._config.default if rates is None else rates
        if not rates:
            return []
        key = _TENANT + tenant if named else self._tenants.key_of(tenant)
        return _claims(rates, key, f"Tenant {tenant}", tokens)

    def _client_claims(self, tenant: str, client_id: str, tokens: int) -> list[Claim]:
        rates = self._client_rates.get(client_id) if client_id else None
        if not rates:
            return []
        return _claims(rates, self._clients[client_id].key_of(tenant), f"Client {client_id}", tokens)


def _claims(rates: tuple[Rate, ...], key: str, who: str, tokens: int) -> list[Claim]:
    return [Claim(key=key, who=who, rate=rate, amount=tokens if rate.unit is RateUnit.TOKENS else 1) for rate in rates]

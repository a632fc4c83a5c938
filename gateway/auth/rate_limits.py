"""Rate limits per tenant for the API of one runner. In a mesh the router counts instead, including gRPC callers."""

from gateway.errors import DetailedError, figures_of
from gateway.gateway_config import RateLimitConfig
from weft.dispatch.rate_windows import Amount, RateWindows, TrackedKeys
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.clock import Clock

_PREFIX = "tenant/"


class TenantRateLimits:
    """Counts requests per tenant in moving windows."""

    def __init__(self, config: RateLimitConfig, clock: Clock) -> None:
        self._config = config
        self._windows = RateWindows(clock)
        self._tracked = TrackedKeys(self._windows, _PREFIX)

    @property
    def tracked(self) -> int:
        """Number of tenants with their own window that the configuration does not name."""
        return len(self._tracked)

    def take(self, tenant: str) -> None:
        """Counts a request. Raises RATE_LIMIT_EXCEEDED with limit, remaining and resetAt above the rate limit."""
        config, named = self._config, self._config.tenants.get(tenant)
        key = _PREFIX + tenant if named is not None else self._tracked.key_of(tenant, config.max_tenants)
        wanted = Amount(key=key, who=f"Tenant {tenant}", rate=named or config.default)
        try:
            self._windows.take((wanted,))
        except WeftError as error:
            raise DetailedError(
                error.reason,
                error.message,
                details=figures_of(error),
                retry_after_seconds=error.retry_after_seconds,
            ) from None

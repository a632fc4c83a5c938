"""How many requests each tenant may make: a moving window per tenant, counted before anything is queued."""

from collections import OrderedDict

from limits import RateLimitItem, RateLimitItemPerHour, RateLimitItemPerMinute, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from gateway.config import RateLimitConfig
from gateway.errors import DetailedError
from weft.kernel.clock import Clock
from weft.kernel.reasons import Reason

_ITEMS: dict[int, type[RateLimitItem]] = {
    1: RateLimitItemPerSecond,
    60: RateLimitItemPerMinute,
    3600: RateLimitItemPerHour,
}
# No tenant can be called so: it begins with none of the letters that a name may begin with.
_EVERYBODY_ELSE = "+everybody-else"


class TenantRateLimits:
    """Counts requests per tenant in this process."""

    def __init__(self, config: RateLimitConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._storage = MemoryStorage()
        self._limiter = MovingWindowRateLimiter(self._storage)
        self._last_seen: OrderedDict[str, float] = OrderedDict()
        """When tenants that are not named were last counted, oldest first, on the monotonic clock."""

    @property
    def tracked(self) -> int:
        """How many tenants that are not named are counted one by one."""
        return len(self._last_seen)

    def take(self, tenant: str) -> None:
        """Count one request. Raises RATE_LIMIT_EXCEEDED with limit, remaining and resetAt when it is one too many."""
        named = self._config.tenants.get(tenant)
        rate = named or self._config.default
        key = tenant if named is not None else self._key_of(tenant)
        item = _ITEMS[rate.window_seconds](rate.amount)
        if self._limiter.hit(item, key):
            return
        reset_at, remaining = self._limiter.get_window_stats(item, key)
        wait = max(0.0, reset_at - self._clock.utc_now().timestamp())
        raise DetailedError(
            Reason.RATE_LIMIT_EXCEEDED,
            f"Tenant {tenant} exceeded {rate}",
            details={"limit": rate.amount, "remaining": max(0, remaining), "resetAt": int(reset_at) + 1},
            retry_after_seconds=wait,
        )

    def _key_of(self, tenant: str) -> str:
        seen, now = self._last_seen, self._clock.monotonic()
        if tenant not in seen and len(seen) >= self._config.max_tenants:
            self._forget_idle(now)
            if len(seen) >= self._config.max_tenants:
                return _EVERYBODY_ELSE
        seen[tenant] = now
        seen.move_to_end(tenant)
        return tenant

    def _forget_idle(self, now: float) -> None:
        """Forget those whose window is empty by now: nothing is lost with them."""
        rate = self._config.default
        item = _ITEMS[rate.window_seconds](rate.amount)
        while self._last_seen:
            tenant, last = next(iter(self._last_seen.items()))
            if now - last <= rate.window_seconds:
                return
            del self._last_seen[tenant]
            # The library keeps an empty list for every key that it ever saw.
            self._limiter.clear(item, tenant)

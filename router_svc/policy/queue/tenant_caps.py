"""Concurrency caps: how many requests each tenant has running, and how many it may have."""

from router_svc.policy.settings import Settings


class TenantCaps:
    """Counts running requests per tenant."""

    def __init__(self, settings: Settings) -> None:
        self._most = {name: tenant.max_in_flight for name, tenant in settings.tenants.items()}
        self._usual_most = settings.default_tenant.max_in_flight
        self._running: dict[str, int] = {}

    def may_run(self, tenant: str) -> bool:
        """Whether the tenant may have one more request running."""
        most = self._most.get(tenant, self._usual_most)
        return not most or self._running.get(tenant, 0) < most

    def most(self, tenant: str) -> int:
        """Return the tenant's maximum of running requests; 0: unlimited."""
        return self._most.get(tenant, self._usual_most)

    def running(self, tenant: str) -> int:
        """Return the number of running requests of the tenant."""
        return self._running.get(tenant, 0)

    def take(self, tenant: str) -> None:
        """Count one more running request."""
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def release(self, tenant: str) -> bool:
        """Count one running request less. Returns whether the tenant was at its cap."""
        most, running = self._most.get(tenant, self._usual_most), self._running[tenant]
        if running > 1:
            self._running[tenant] = running - 1
        else:
            del self._running[tenant]
        return 0 < most <= running

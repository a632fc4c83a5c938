"""How many requests each tenant has running, and how many it may have."""

from router_svc.policy.settings import Settings


class TenantCaps:
    """Counts only."""

    def __init__(self, settings: Settings) -> None:
        self._most = {name: tenant.max_in_flight for name, tenant in settings.tenants.items()}
        self._usual_most = settings.default_tenant.max_in_flight
        self._running: dict[str, int] = {}

    def may_run(self, tenant: str) -> bool:
        """Whether it may have one more running."""
        most = self._most.get(tenant, self._usual_most)
        return not most or self._running.get(tenant, 0) < most

    def most(self, tenant: str) -> int:
        """How many it may have running; 0: any number."""
        return self._most.get(tenant, self._usual_most)

    def running(self, tenant: str) -> int:
        """How many it has running."""
        return self._running.get(tenant, 0)

    def take(self, tenant: str) -> None:
        """One more runs."""
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def release(self, tenant: str) -> bool:
        """One less runs. Returns whether it may have one more running only now."""
        most, running = self._most.get(tenant, self._usual_most), self._running[tenant]
        if running > 1:
            self._running[tenant] = running - 1
        else:
            del self._running[tenant]
        return 0 < most <= running

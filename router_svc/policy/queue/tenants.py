"""The settings of tenants: those that operators declared, over those of the configuration."""

from collections.abc import Mapping

from router_svc.policy.settings import Settings, TenantSettings


class TenantTable:
    """The settings of every tenant. They change while its requests wait and run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._declared: Mapping[str, TenantSettings] = {}

    def get(self, name: str) -> TenantSettings:
        """Return the settings of a tenant."""
        return self._declared.get(name) or self._settings.tenant(name)

    def declare(self, tenants: Mapping[str, TenantSettings]) -> list[str]:
        """Use these in place of those that were declared. Returns the tenants with other settings than before."""
        touched = sorted({*self._declared, *tenants})
        before = {name: self.get(name) for name in touched}
        self._declared = dict(tenants)
        return [name for name in touched if self.get(name) != before[name]]

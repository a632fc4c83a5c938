"""All tenants: what operators declared, over what the configuration of the mesh has."""

from collections.abc import Iterable, Mapping

from weft.api.registry.v1 import tenant_pb2


class TenantIndex:
    """The tenants that are declared or configured; any other tenant may ask for something, too."""

    def __init__(self) -> None:
        self._declared: dict[str, tenant_pb2.Tenant] = {}
        self._configured: dict[str, tenant_pb2.Tenant] = {}
        self.shown: Mapping[str, tenant_pb2.Tenant] = {}
        """The tenants that count, by name: a configured one does not where one is declared with its name. Another
        mapping after each change."""

    def __len__(self) -> int:
        """How many are declared."""
        return len(self._declared)

    def declared(self, name: str) -> tenant_pb2.Tenant | None:
        """The declared tenant of this name."""
        return self._declared.get(name)

    def configure(self, tenants: Iterable[tenant_pb2.Tenant]) -> None:
        """Sets the tenants of the configuration."""
        self._configured = {tenant.manifest.name: tenant for tenant in tenants}
        self._refresh()

    def replace(self, new: Iterable[tenant_pb2.Tenant], gone: Iterable[str]) -> None:
        """Puts declared tenants in place of earlier ones of their names, and removes others."""
        self._declared |= {tenant.manifest.name: tenant for tenant in new}
        for name in gone:
            self._declared.pop(name, None)
        self._refresh()

    def _refresh(self) -> None:
        self.shown = dict(sorted((self._configured | self._declared).items()))


def configured_tenant(manifest: tenant_pb2.TenantManifest) -> tenant_pb2.Tenant:
    """Returns a tenant of the configuration."""
    return tenant_pb2.Tenant(manifest=manifest, source=tenant_pb2.Tenant.SOURCE_CONFIGURED)

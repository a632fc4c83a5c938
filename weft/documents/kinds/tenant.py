"""Tenants: their share of scarce capacity and their limits."""

from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest
from weft.documents.kind import DeclaredKind
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.field_rules import check_message
from weft.kernel.principal import Resource
from weft.kernel.tenant_rules import to_canonical_limits


def check_tenant(manifest: TenantManifest, field: str) -> None:
    """Check a tenant; see `DeclaredKind.check`. The field may be one such as "limits[2].window"."""
    check_message(manifest, field)
    manifest.DiscardUnknownFields()
    to_canonical_limits(manifest, field)


KIND = DeclaredKind(
    kind=ResourceKind.TENANT,
    declared=TenantManifest,
    record=Tenant,
    summary="A tenant: its share of scarce capacity and its limits.",
    check=check_tenant,
    by_name=False,
    resource=Resource.SETTINGS,
    shares_namespace=False,
    configured="router.tenants, router.rate_limits",
    initial={"source": Tenant.SOURCE_DECLARED},
)

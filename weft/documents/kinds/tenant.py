"""Tenants: their share of scarce capacity and their limits."""

from urllib.parse import urlsplit

from weft.api.registry.v1.tenant_pb2 import Tenant, TenantLimit, TenantManifest, Webhook
from weft.documents.kind import DeclaredKind
from weft.documents.kinds.model import require_secret_ref
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import Resource
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.names import ANY, MAX_NAME_CHARS, ROUTE_PREFIX, SECRET_PREFIX, is_token


def check_tenant(manifest: TenantManifest, field: str) -> None:
    """Checks a tenant; see `DeclaredKind.check`. The error's field may be nested, such as "limits[2].window"."""
    check_message(manifest, field)
    manifest.DiscardUnknownFields()
    to_canonical_limits(manifest, field)
    if manifest.HasField("webhook"):
        _check_webhook(manifest.webhook, f"{field}.webhook" if field else "webhook")


def webhook_secret(manifest: TenantManifest) -> str:
    """Returns the name of the secret that signs a tenant's events; empty: none."""
    return manifest.webhook.secret_ref.removeprefix(SECRET_PREFIX)


def _check_webhook(webhook: Webhook, field: str) -> None:
    require_secret_ref(webhook.secret_ref, f"{field}.secret_ref")
    parts = urlsplit(webhook.url)
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise invalid_field(f"{field}.url", "must not contain a user, a password or a fragment")


def to_canonical_limits(manifest: TenantManifest, field: str = "") -> None:
    """Clears empty values in a tenant's limits. Raises INVALID_ARGUMENT naming the field, prefixed by `field`."""
    within = f"{field}." if field else ""
    if manifest.unlimited and manifest.limits:
        raise invalid_field(f"{within}unlimited", "must not be set together with limits")
    known: dict[tuple[int, int, str], int] = {}
    for index, limit in enumerate(manifest.limits):
        where = f"{within}limits[{index}]"
        _check_limit(limit, where)
        if limit.per == TenantLimit.SUBJECT_TENANT:
            limit.per = TenantLimit.SUBJECT_UNSPECIFIED
        earlier = known.setdefault((limit.window, limit.per, limit.model), index)
        if earlier != index:
            raise invalid_field(where, f"is of the same window, per and model as limits[{earlier}]; write one of them")


def _check_limit(limit: TenantLimit, field: str) -> None:
    if not (limit.requests or limit.tokens):
        raise invalid_field(field, "must set requests or tokens")
    if not limit.model:
        return
    name = limit.model.removeprefix(ROUTE_PREFIX).removesuffix(ANY)
    if name and not is_token(name, MAX_NAME_CHARS):
        raise invalid_field(
            f"{field}.model",
            "must be the name of a model or a pool, or route/ and that of a route; with '*' at its end all names that "
            "begin so",
        )


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

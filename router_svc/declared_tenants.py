"""Tenants declared by operators, converted for the router's policies."""

from collections.abc import Mapping
from types import MappingProxyType

from router_svc.policy.pool_settings import RemotePermission, TenantSettings
from router_svc.policy.tenant_budgets import LimitScope, LimitSubject, TenantLimit
from weft.api.registry.v1 import tenant_pb2 as pb
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK, Rate, RateUnit

_WINDOWS: Mapping[int, int] = MappingProxyType(
    {
        pb.TenantLimit.WINDOW_SECOND: SECOND,
        pb.TenantLimit.WINDOW_MINUTE: MINUTE,
        pb.TenantLimit.WINDOW_HOUR: HOUR,
        pb.TenantLimit.WINDOW_DAY: DAY,
        pb.TenantLimit.WINDOW_WEEK: WEEK,
        pb.TenantLimit.WINDOW_MONTH: MONTH,
    }
)
_SUBJECTS: Mapping[int, LimitSubject] = MappingProxyType(
    {
        pb.TenantLimit.SUBJECT_KEY: LimitSubject.KEY,
        pb.TenantLimit.SUBJECT_MODEL: LimitSubject.MODEL,
    }
)
_PERMISSIONS: Mapping[int, RemotePermission] = MappingProxyType(
    {
        pb.REMOTE_PERMISSION_NEVER: RemotePermission.NEVER,
        pb.REMOTE_PERMISSION_ALWAYS: RemotePermission.ALWAYS,
    }
)


def declared_in(tenants: Mapping[str, pb.Tenant]) -> dict[str, pb.TenantManifest]:
    """Return the manifests that operators declared; configured tenants come from this router's own weft.yaml."""
    return {name: each.manifest for name, each in tenants.items() if each.source == pb.Tenant.SOURCE_DECLARED}


def settings_of(manifest: pb.TenantManifest) -> TenantSettings:
    """Return a tenant's settings; `weft.durable.journal_policy` handles its journal mode."""
    return TenantSettings(
        weight=manifest.weight if manifest.HasField("weight") else 1.0,
        max_in_flight=manifest.max_in_flight,
        allow_remote=_PERMISSIONS.get(manifest.allow_remote, RemotePermission.ON_REQUEST),
        max_priority=Priority.ceiling(manifest.max_priority),
    )


def limits_of(manifest: pb.TenantManifest) -> tuple[TenantLimit, ...] | None:
    """Return a tenant's limits; None: the default of all tenants.

    An unknown window counts as a month.
    """
    if not (manifest.limits or manifest.unlimited):
        return None
    return tuple(limit for each in manifest.limits for limit in _limits_in(each))


def _limits_in(limit: pb.TenantLimit) -> tuple[TenantLimit, ...]:
    # The same amount is stricter per month than per any shorter window.
    window = _WINDOWS.get(limit.window, MONTH)
    scope = LimitScope(_SUBJECTS.get(limit.per, LimitSubject.TENANT), limit.model)
    amounts = ((limit.requests, RateUnit.REQUESTS), (limit.tokens, RateUnit.TOKENS))
    return tuple(TenantLimit(Rate(amount, window, unit), scope) for amount, unit in amounts if amount)

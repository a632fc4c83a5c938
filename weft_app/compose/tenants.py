"""The tenants of a configuration as documents, which the registry shows where none is declared of their name."""

from collections.abc import Mapping, Sequence

from router_svc.policy.settings import RemotePermission, TenantSettings
from router_svc.settings import RouterSettings
from weft.api.registry.v1 import journal_pb2
from weft.api.registry.v1 import tenant_pb2 as pb
from weft.kernel.request import journal_mode_of
from weft.kernel.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK, Rate, RateUnit

_WINDOWS: Mapping[int, "pb.TenantLimit.Window.ValueType"] = {
    SECOND: pb.TenantLimit.WINDOW_SECOND,
    MINUTE: pb.TenantLimit.WINDOW_MINUTE,
    HOUR: pb.TenantLimit.WINDOW_HOUR,
    DAY: pb.TenantLimit.WINDOW_DAY,
    WEEK: pb.TenantLimit.WINDOW_WEEK,
    MONTH: pb.TenantLimit.WINDOW_MONTH,
}
_PERMISSIONS: Mapping[RemotePermission, "pb.RemotePermission.ValueType"] = {
    RemotePermission.NEVER: pb.REMOTE_PERMISSION_NEVER,
    RemotePermission.ON_REQUEST: pb.REMOTE_PERMISSION_UNSPECIFIED,
    RemotePermission.ALWAYS: pb.REMOTE_PERMISSION_ALWAYS,
}


def configured_tenants(section: RouterSettings) -> tuple[pb.TenantManifest, ...]:
    """Returns the tenants that a configuration names, by name."""
    rates = {} if section.rate_limits is None else section.rate_limits.tenants
    names = sorted({*section.tenants, *rates})
    return tuple(_tenant(name, section.tenants.get(name, section.default_tenant), rates.get(name)) for name in names)


def _tenant(name: str, settings: TenantSettings, rates: Sequence[Rate] | None) -> pb.TenantManifest:
    return pb.TenantManifest(
        name=name,
        weight=None if settings.weight == 1.0 else settings.weight,
        max_in_flight=settings.max_in_flight,
        allow_remote=_PERMISSIONS[settings.allow_remote],
        journal=journal_pb2.JournalMode.ValueType(journal_mode_of(settings.journal).value),
        limits=_limits(rates or ()),
        unlimited=rates is not None and not rates,
    )


def _limits(rates: Sequence[Rate]) -> list[pb.TenantLimit]:
    """Returns rates as limits, those of requests and tokens of one window together."""
    found: dict[int, pb.TenantLimit] = {}
    for rate in rates:
        limit = found.setdefault(rate.window_seconds, pb.TenantLimit(window=_WINDOWS[rate.window_seconds]))
        if rate.unit is RateUnit.TOKENS:
            limit.tokens = rate.amount
        else:
            limit.requests = rate.amount
    return list(found.values())

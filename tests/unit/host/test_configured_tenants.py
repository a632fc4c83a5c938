"""The tenants of weft.yaml as documents."""

from router_svc.declared_tenants import limits_of, settings_of
from router_svc.policy.pool_settings import RemotePermission, TenantRates, TenantSettings
from router_svc.policy.tenant_budgets import over_the_whole
from router_svc.router_settings import RouterSettings
from weft.api.registry.v1.tenant_pb2 import TenantLimit
from weft.documents.codec import document_of
from weft.documents.kinds.tenant import to_canonical_limits
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK, Rate, RateUnit
from weft_app.cli.columns import limit_words
from weft_app.compose.service_configs import configured_tenants

RATES = (
    Rate(10, MINUTE),
    Rate(500, MINUTE, RateUnit.TOKENS),
    *(Rate(20, length) for length in (SECOND, HOUR, DAY, WEEK, MONTH)),
)


def test_settings_and_rates_of_one_tenant_merge_into_one_equivalent_document() -> None:
    settings = TenantSettings(
        weight=3.0, max_in_flight=4, allow_remote=RemotePermission.NEVER, max_priority=Priority.NORMAL
    )
    section = RouterSettings(tenants={"a": settings}, rate_limits=TenantRates(tenants={"a": RATES, "b": ()}))
    first, second = configured_tenants(section)
    assert (first.name, second.name, second.unlimited) == ("a", "b", True)
    assert settings_of(first) == settings
    assert set(limits_of(first) or ()) == set(over_the_whole(RATES))
    assert limits_of(second) == ()
    for manifest in (first, second):
        to_canonical_limits(manifest)
    assert limit_words(document_of(first.limits[0])) == "10 req/min and 500 tok/min"


def test_tenant_without_rates_has_the_default() -> None:
    (tenant,) = configured_tenants(RouterSettings(tenants={"a": TenantSettings()}))
    assert limits_of(tenant) is None
    assert not tenant.HasField("weight")


def test_limit_is_written_with_its_unit() -> None:
    limit = TenantLimit(window=TenantLimit.WINDOW_MONTH, tokens=5, per=TenantLimit.SUBJECT_KEY, model="llama-*")
    assert limit_words(document_of(limit)) == "5 tok/month per key for llama-*"

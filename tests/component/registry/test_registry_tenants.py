"""Tenants in the registry: declared, checked, published, kept, and over those of weft.yaml."""

from pathlib import Path

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import RunningRegistry, SomeRunner, running_registry

from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantLimit, TenantManifest
from weft.documents.kinds.tenant import check_tenant
from weft.kernel.reasons import Reason

TENANT = "tenant"
MINUTE = TenantLimit.WINDOW_MINUTE


def a_tenant(name: str = "a", requests: int = 10, **fields: object) -> ResourceDocument:
    limit = TenantLimit(window=MINUTE, requests=requests)
    return declared(tenant=TenantManifest(name=name, limits=[limit], **fields))  # type: ignore[arg-type]


async def tenants(mesh: RunningRegistry) -> dict[str, Tenant]:
    return {each.manifest.name: each for each in await mesh.listed("tenant")}


async def test_tenant_can_have_the_name_of_a_model(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1",)).open()
    await mesh.apply(a_tenant("m1"))
    assert set(await tenants(mesh)) == {"m1"}
    assert (await mesh.model("m1")).manifest.name == "m1"


async def test_declared_tenant_overrides_the_configured_one_until_deleted(tmp_path: Path) -> None:
    configured = (TenantManifest(name="a", weight=2), TenantManifest(name="b"))
    async with running_registry(tmp_path, tenants=configured) as mesh:
        assert {name: each.source for name, each in (await tenants(mesh)).items()} == dict.fromkeys(
            "ab", Tenant.SOURCE_CONFIGURED
        )
        await mesh.apply(a_tenant())
        found = await tenants(mesh)
        assert (found["a"].source, found["b"].source) == (Tenant.SOURCE_DECLARED, Tenant.SOURCE_CONFIGURED)
        await mesh.delete(TENANT, "a")
        assert (await tenants(mesh))["a"].manifest.weight == 2
        with refused(Reason.RESOURCE_IN_USE) as errors:
            await mesh.delete(TENANT, "b")
        assert "router.tenants" in errors[0].message


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        (TenantManifest(name="a b"), "tenant.name"),
        (TenantManifest(name="a" * 65), "tenant.name"),
        (TenantManifest(name="a", weight=0), "tenant.weight"),
        (TenantManifest(name="a", limits=[TenantLimit(requests=1)]), "tenant.limits[0].window"),
        (TenantManifest(name="a", limits=[TenantLimit(window=MINUTE)]), "tenant.limits[0]"),
        (TenantManifest(name="a", limits=[TenantLimit(window=MINUTE, requests=-1)]), "tenant.limits[0].requests"),
        (
            TenantManifest(name="a", limits=[TenantLimit(window=MINUTE, requests=1, model="?")]),
            "tenant.limits[0].model",
        ),
        (TenantManifest(name="a", limits=[TenantLimit(window=MINUTE, requests=1)] * 2), "tenant.limits[1]"),
        (TenantManifest(name="a", limits=[TenantLimit(window=MINUTE, requests=1)], unlimited=True), "tenant.unlimited"),
    ],
)
def test_invalid_tenant_is_rejected_and_error_names_the_field(manifest: TenantManifest, field: str) -> None:
    with refused(field=field):
        check_tenant(manifest, "tenant")


def test_one_window_can_have_limits_per_tenant_key_and_model() -> None:
    given = [
        TenantLimit(window=MINUTE, requests=1, per=per, model=model)
        for per in TenantLimit.Subject.values()[1:]
        for model in ("", "big-*", "route/way")
    ]
    check_tenant(TenantManifest(name="a", limits=given), "tenant")

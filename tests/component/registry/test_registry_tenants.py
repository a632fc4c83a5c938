"""Tenants in the registry: declared, checked, published, kept, and over those of weft.yaml."""

from pathlib import Path

import pytest
from kit.resources import declared
from registry_harness import RunningRegistry, SomeRunner, refused, running_registry

from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantLimit, TenantManifest
from weft.documents.kinds.tenant import check_tenant
from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason

TENANT = "tenant"
MINUTE = TenantLimit.WINDOW_MINUTE


def a_tenant(name: str = "a", requests: int = 10, **fields: object) -> ResourceDocument:
    limit = TenantLimit(window=MINUTE, requests=requests)
    return declared(tenant=TenantManifest(name=name, limits=[limit], **fields))  # type: ignore[arg-type]


async def tenants(mesh: RunningRegistry) -> dict[str, Tenant]:
    return {each.manifest.name: each for each in await mesh.listed("tenant")}


async def test_a_tenant_is_kept_over_a_restart_and_declaring_it_again_changes_nothing(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        assert await mesh.apply(a_tenant(weight=3)) == ["tenant a created"]
        assert await mesh.apply(a_tenant(weight=3)) == ["tenant a unchanged"]
        assert await mesh.apply(a_tenant(requests=20)) == ["tenant a configured"]
        before = await tenants(mesh)
    async with running_registry(tmp_path) as mesh:
        assert await tenants(mesh) == before
        assert await mesh.shown("tenant", "a") == before["a"]
        await mesh.delete(TENANT, "a")
        assert await tenants(mesh) == {}
    assert (before["a"].source, before["a"].manifest.limits[0].requests) == (Tenant.SOURCE_DECLARED, 20)


async def test_a_tenant_may_be_called_like_a_model(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        await SomeRunner(mesh, models=("m1",)).open()
        await mesh.apply(a_tenant("m1"))
        assert set(await tenants(mesh)) == {"m1"}
        assert (await mesh.model("m1")).manifest.name == "m1"


async def test_a_declared_tenant_comes_before_the_configured_one_which_is_back_after_it(tmp_path: Path) -> None:
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
def test_what_makes_no_sense_is_refused_and_its_field_named(manifest: TenantManifest, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        check_tenant(manifest, "tenant")
    assert caught.value.field == field


def test_one_window_may_have_a_limit_for_the_tenant_one_per_key_and_one_per_model() -> None:
    given = [
        TenantLimit(window=MINUTE, requests=1, per=per, model=model)
        for per in TenantLimit.Subject.values()[1:]
        for model in ("", "big-*", "route/way")
    ]
    check_tenant(TenantManifest(name="a", limits=given), "tenant")

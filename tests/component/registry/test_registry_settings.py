"""What operators set for the whole mesh: kept before it is answered, told to whoever watches."""

from pathlib import Path

import pytest
from gated_store import GatedStore
from kit.refusals import refused
from kit.resources import declared
from registry_harness import RunningRegistry, SomeRunner, running_registry
from roster_harness import BareRegistry

from registry_svc.registry_config import RegistryConfig
from weft.api.registry.v1 import journal_pb2, settings_service_pb2
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantLimit, TenantManifest
from weft.documents.kinds.tenant import check_tenant
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

pb = settings_service_pb2


async def _allowed(mesh: RunningRegistry) -> tuple[bool, int]:
    settings = (await mesh.settings.GetSettings(pb.GetSettingsRequest())).settings
    return settings.allow_cloud_fallback, settings.revision


async def test_new_mesh_starts_as_configured_and_later_only_operators_change_it(tmp_path: Path) -> None:
    async with running_registry(tmp_path, allow_cloud_fallback=False) as mesh:
        assert await _allowed(mesh) == (False, 1)
    # Another seed changes nothing: the row is there.
    async with running_registry(tmp_path, allow_cloud_fallback=True) as mesh:
        assert await _allowed(mesh) == (False, 1)
        answer = await mesh.settings.UpdateSettings(pb.UpdateSettingsRequest(allow_cloud_fallback=True))
        assert (answer.settings.allow_cloud_fallback, answer.settings.revision) == (True, 2)
    async with running_registry(tmp_path, allow_cloud_fallback=False) as mesh:
        assert await _allowed(mesh) == (True, 2)


async def test_change_is_published_and_recorded_once(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    off = pb.UpdateSettingsRequest(allow_cloud_fallback=False)
    for _ in range(2):
        assert not (await mesh.settings.UpdateSettings(off)).settings.allow_cloud_fallback
    answer = await mesh.settings.UpdateSettings(pb.UpdateSettingsRequest())
    assert (answer.settings.allow_cloud_fallback, answer.settings.revision) == (False, 2)
    await SomeRunner(mesh, models=()).open()
    # What is set already, or is not named, is no change.
    assert await watch.read_changes(2) == ["settings at revision 2", "runner r1 active"]
    assert await mesh.events() == ["mesh settings configured", "runner r1 registered"]


async def test_change_that_could_not_be_stored_is_neither_set_nor_published() -> None:
    store = GatedStore()
    registry = BareRegistry(store, FakeClock(), RegistryConfig(database_url="sqlite://"))
    await registry.start()
    _, watcher = registry.core.watch()
    store.failing = True
    with refused(Reason.SERVICE_UNAVAILABLE):
        await registry.settings.update(False)
    assert registry.settings.current().allow_cloud_fallback
    store.failing = False
    changed = await registry.settings.update(False)
    assert (changed.allow_cloud_fallback, changed.revision) == (False, 2)
    assert (await anext(watcher)).change.settings == changed
    assert [(event.kind, event.name) for event in registry.core.events.newest(None, "", 10)] == [("mesh", "settings")]
    assert registry.core.events.newest(ResourceKind.ROUTE, "", 10) == []
    await registry.stop()
    await store.really_close()


async def test_mesh_journal_setting_survives_a_restart_and_is_published(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        watch = await mesh.watch()
        assert watch.snapshot.snapshot.settings.journal == journal_pb2.JOURNAL_MODE_UNSPECIFIED
        keep = pb.UpdateSettingsRequest(journal=journal_pb2.JOURNAL_MODE_KEEP)
        for _ in range(2):
            answer = await mesh.settings.UpdateSettings(keep)
            assert (answer.settings.journal, answer.settings.revision) == (journal_pb2.JOURNAL_MODE_KEEP, 2)
        # The other setting leaves this one as it is.
        answer = await mesh.settings.UpdateSettings(pb.UpdateSettingsRequest(allow_cloud_fallback=False))
        assert (answer.settings.journal, answer.settings.revision) == (journal_pb2.JOURNAL_MODE_KEEP, 3)
    async with running_registry(tmp_path) as mesh:
        settings = (await mesh.settings.GetSettings(pb.GetSettingsRequest())).settings
        assert (settings.journal, settings.allow_cloud_fallback) == (journal_pb2.JOURNAL_MODE_KEEP, False)


async def test_unknown_journal_mode_is_rejected(mesh: RunningRegistry) -> None:
    with refused(Reason.INVALID_ARGUMENT):
        await mesh.settings.UpdateSettings(pb.UpdateSettingsRequest(journal=9))  # type: ignore[arg-type]


TENANT = "tenant"

MINUTE = TenantLimit.WINDOW_MINUTE


def a_tenant(name: str = "a", **fields: object) -> ResourceDocument:
    limit = TenantLimit(window=MINUTE, requests=10)
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

"""Profiles: declared, saved from what is, and switched to as a whole, on a registry whose runners are scripted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.messages import changed
from kit.resources import declared, manifest_in
from operated_registry import GovernedGate, OperatedRegistry, opening, operated_registry
from registry_harness import a_route, an_agent, an_alias, refusal
from roster_harness import BareRegistry

from registry_svc.config import OperationLimits, RegistryConfig
from registry_svc.mesh.policy.declarations import Author
from registry_svc.mesh.requests import valid_batch
from registry_svc.operations.governance import Gatekeeper
from registry_svc.operations.profiles import Profiles
from weft.api.registry.v1.declaration_service_pb2 import ApplyRequest, ApplyResult
from weft.api.registry.v1.profile_pb2 import (
    Profile,
    ProfileLoad,
    ProfileLoadSettings,
    ProfileLoadValue,
    ProfileManifest,
)
from weft.api.registry.v1.profile_service_pb2 import ProfileStep, SaveProfileRequest, SwitchProfileRequest
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1.load_pb2 import LoadOptions, LoadValue
from weft.api.runner.v1.runner_service_pb2 import LoadResponse, LoadResult
from weft.documents.profiles import load_settings_of
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason

LIMIT_SECONDS = 20.0
MODELS = ("m1", "m2", "m3")
LONG = LoadOptions(parameters={"context_tokens": LoadValue(integer=8192)})
SETTINGS = load_settings_of(LONG)


def profiles_of(registry: BareRegistry) -> list[Profile]:
    return registry.core.mesh.documents[ResourceKind.PROFILE].all_declared()


@dataclass(kw_only=True)
class Mesh(OperatedRegistry):
    """A registry with one runner, r1, that serves MODELS."""

    profiles: Profiles

    async def apply(self, *declarations: ResourceDocument, dry_run: bool = False) -> list[str]:
        request = valid_batch(ApplyRequest(declarations=declarations, dry_run=dry_run), self.registry.core.config)
        return in_words(await self.declarations.apply(request))

    async def profile(self, manifest: ProfileManifest) -> list[str]:
        return await self.apply(declared(profile=manifest))

    async def save(self, name: str, **more: bool | str) -> str:
        request = SaveProfileRequest(name=name)
        for field, value in more.items():
            setattr(request, field, value)
        return in_words([await self.profiles.save(request, Author())])[0]

    async def switch(self, name: str, *, dry_run: bool = False) -> list[str]:
        """What was done with documents, and what is done with models."""
        async with asyncio.timeout(LIMIT_SECONDS):
            done = await self.profiles.switch(SwitchProfileRequest(name=name, dry_run=dry_run), "test")
        effective = [each for each in done.results if each.outcome != ApplyResult.OUTCOME_UNCHANGED]
        return in_words(effective) + [
            f"{ProfileStep.Kind.Name(step.kind).removeprefix('KIND_').lower()} {step.model}" for step in done.steps
        ]

    def shown(self, name: str) -> Profile:
        found: Profile = self.registry.catalogue.get(ResourceKind.PROFILE, name)
        return found

    def active(self) -> list[str]:
        return [each.manifest.name for each in profiles_of(self.registry) if each.active]

    async def report(self, *models: str, adapters: tuple[str, ...] = ()) -> None:
        """The runner reports these models as loaded."""
        ready = InstanceState(phase=InstanceState.PHASE_READY, slots_total=1)
        states = [changed(ready, model=model) for model in models]
        await self.beat(*states, *(changed(ready, model=model, base_model=models[0]) for model in adapters))

    async def until_heard(self, *calls: str) -> None:
        """Return once runners were asked for this, in this order."""
        async with asyncio.timeout(LIMIT_SECONDS):
            # The calls are in a list that a task of the registry fills.
            while [call for call in self.calls.heard if not call.startswith("options")] != list(calls):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def audited(self) -> list[str]:
        entries, _ = await self.desk.operations.audit_page(0, 100)
        return [entry.event for entry in entries]


@asynccontextmanager
async def mesh_of(
    tmp_path: Path,
    *,
    gate: Callable[[], Gatekeeper] = Gatekeeper,
    config: RegistryConfig | None = None,
    limits: OperationLimits | None = None,
) -> AsyncIterator[Mesh]:
    request = opening(models=MODELS)
    async with operated_registry(config or a_config(tmp_path), request, gate=gate, limits=limits) as operated:
        profiles = Profiles(operated.registry.core, operated.declarations, operated.desk.operations, operated.calls)
        yield Mesh(**vars(operated), profiles=profiles)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh_of(tmp_path) as mesh:
        yield mesh


def a_config(tmp_path: Path, **more: int) -> RegistryConfig:
    return RegistryConfig(database_url=f"sqlite:///{tmp_path / 'registry.db'}", **more)  # type: ignore[arg-type]


def in_words(results: list[ApplyResult]) -> list[str]:
    return [
        f"{each.name} {ApplyResult.Outcome.Name(each.outcome).removeprefix('OUTCOME_').lower()}" for each in results
    ]


def loading(*models: str | ProfileLoad, **more: object) -> ProfileManifest:
    loads = [ProfileLoad(model=each) if isinstance(each, str) else each for each in models]
    return ProfileManifest(name="day", load=loads, **more)  # type: ignore[arg-type]


async def test_saved_profile_contains_declared_and_loaded_resources_and_becomes_active(mesh: Mesh) -> None:
    await mesh.apply(declared(agent=an_agent("coder")), a_route("way"), an_alias("gpt", "agent/coder"))
    await mesh.report("m1", "m2")
    mesh.calls.loaded_with["m2"] = LONG
    assert await mesh.save("day", description="Work") == "day created"
    saved = mesh.shown("day")
    assert [each.model for each in saved.manifest.load] == ["m1", "m2"]
    assert saved.manifest.load[1].settings == SETTINGS
    assert not saved.manifest.load[0].HasField("settings"), "as it is configured"
    assert saved.manifest.unload_others
    assert [each.name for each in saved.manifest.agents] == ["coder"]
    assert [each.name for each in saved.manifest.routes] == ["way"]
    assert [each.name for each in saved.manifest.aliases] == ["gpt"]
    assert saved.active
    assert not saved.changes, "it is what is"
    assert await mesh.switch("day") == [], "nothing is different"


async def test_adapters_are_saved_with_the_model_that_serves_them(mesh: Mesh) -> None:
    await mesh.report("m1", adapters=("m2",))
    await mesh.save("day")
    assert [each.model for each in mesh.shown("day").manifest.load] == ["m1"]
    assert not mesh.shown("day").changes


async def test_saved_profile_keeps_its_description_and_a_dry_run_saves_nothing(mesh: Mesh) -> None:
    assert await mesh.save("day", dry_run=True) == "day created"
    assert mesh.active() == []
    await mesh.save("day", description="Work")
    await mesh.save("day", leave_others=True)
    assert mesh.shown("day").manifest.description == "Work"
    assert not mesh.shown("day").manifest.unload_others


async def test_switch_declares_deletes_previous_declarations_and_loads_after_unloading(mesh: Mesh) -> None:
    await mesh.apply(declared(agent=an_agent("own")))
    await mesh.profile(
        ProfileManifest(
            name="day",
            agents=[an_agent("coder"), an_agent("both", prompt="By day.")],
            aliases=[manifest_in(an_alias("gpt", "agent/coder"))],
        )
    )
    await mesh.profile(
        ProfileManifest(
            name="night",
            unload=["m1"],
            load=[ProfileLoad(model="m2", settings=SETTINGS)],
            agents=[an_agent("both", prompt="By night.")],
            aliases=[manifest_in(an_alias("gpt", "agent/both"))],
        )
    )
    await mesh.switch("day")
    await mesh.report("m1", "m3")
    mesh.calls.held["m1"] = asyncio.Event()
    expected = ["both configured", "gpt configured", "coder deleted", "unload m1", "load m2"]
    assert await mesh.switch("night", dry_run=True) == expected
    assert mesh.active() == ["day"], "a dry run changes nothing"
    assert await mesh.switch("night") == expected
    assert mesh.active() == ["night"]
    assert set(mesh.registry.core.mesh.names_of(ResourceKind.AGENT)) == {"own", "both"}, (
        "what no profile declares stays"
    )
    await mesh.until_heard("unload m1 on r1")
    mesh.calls.held["m1"].set()
    await mesh.until_heard("unload m1 on r1", "load m2 on r1")
    assert mesh.calls.options == [LONG]
    assert mesh.events(ResourceKind.PROFILE) == ["day created", "night created", "day switched", "night switched"]
    assert (await mesh.audited()).count("profile.switch_requested") == 2


async def test_loads_start_even_if_a_previous_unload_failed(mesh: Mesh) -> None:
    await mesh.report("m1")
    await mesh.profile(loading("m2", unload=["m1"]))
    mesh.calls.failures["m1"] = [WeftError(Reason.INTERNAL, "it does not end")]
    await mesh.switch("day")
    await mesh.until_heard("unload m1 on r1", "load m2 on r1")
    mesh.calls.answer("m2", LoadResponse(result=LoadResult()))


@pytest.mark.parametrize(
    "broken",
    [
        ProfileManifest(name="day", agents=[an_agent("good"), an_agent("bad", "nothing")]),
        ProfileManifest(name="day", agents=[an_agent("good")], load=[ProfileLoad(model="nothing")]),
    ],
    ids=["an agent of no model", "a load of no model"],
)
async def test_rejected_switch_changes_nothing_and_error_names_the_problem(mesh: Mesh, broken: ProfileManifest) -> None:
    await mesh.profile(broken)
    error = await refusal(Reason.MODEL_NOT_FOUND, mesh.switch("day"))
    assert "nothing" in error.message
    assert not set(mesh.registry.core.mesh.names_of(ResourceKind.AGENT))
    assert mesh.active() == []
    assert not mesh.calls.heard


async def test_target_of_a_remaining_alias_is_not_deleted_by_a_switch(mesh: Mesh) -> None:
    await mesh.profile(ProfileManifest(name="day", agents=[an_agent("coder")]))
    await mesh.profile(ProfileManifest(name="night"))
    await mesh.switch("day")
    await mesh.apply(an_alias("gpt", "agent/coder"))
    error = await refusal(Reason.RESOURCE_IN_USE, mesh.switch("night"))
    assert "gpt" in error.message
    assert mesh.active() == ["day"]


async def test_alias_of_the_next_profile_can_reuse_a_removed_pattern(mesh: Mesh) -> None:
    for name, alias in (("day", "one"), ("night", "two")):
        await mesh.profile(ProfileManifest(name=name, aliases=[manifest_in(an_alias(alias, pattern="gpt-*"))]))
    assert await mesh.switch("day") == ["one created"]
    assert await mesh.switch("night") == ["two created", "one deleted"]


async def test_switch_at_the_limit_of_aliases_has_room_for_those_that_replace_deleted_ones(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, config=a_config(tmp_path, max_aliases=1)) as mesh:
        for name, alias in (("day", "one"), ("night", "two")):
            await mesh.profile(ProfileManifest(name=name, aliases=[manifest_in(an_alias(alias))]))
        assert await mesh.switch("day") == ["one created"]
        assert await mesh.switch("night") == ["two created", "one deleted"]


async def test_switch_at_the_limit_of_bytes_has_room_for_those_that_replace_deleted_ones(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, config=a_config(tmp_path, max_manifest_bytes=4_000)) as mesh:
        for name, agent in (("day", "one"), ("night", "two")):
            await mesh.profile(ProfileManifest(name=name, agents=[an_agent(agent, prompt="x" * 1_000)]))
        assert await mesh.switch("day") == ["one created"]
        assert await mesh.switch("night") == ["two created", "one deleted"]


async def test_active_profile_lists_its_deviations(mesh: Mesh) -> None:
    await mesh.profile(loading("m1", agents=[an_agent("coder")], unload_others=True))
    await mesh.switch("day")
    await mesh.report("m1")
    assert list(mesh.shown("day").changes) == []
    await mesh.apply(declared(agent=an_agent("coder", prompt="Be long.")))
    await mesh.report("m2")
    assert list(mesh.shown("day").changes) == [
        "agent/coder is declared otherwise, or was deleted",
        "model/m2 is loaded",
        "model/m1 is not loaded",
    ]
    assert await mesh.switch("day") == ["coder configured", "unload m2", "load m1"]


async def test_switch_with_loads_is_rejected_if_operations_need_signatures(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, gate=GovernedGate) as mesh:
        await mesh.profile(loading("m1", agents=[an_agent("coder")]))
        await refusal(Reason.OPERATION_REFUSED, mesh.switch("day"))
        assert mesh.active() == []
        await mesh.report("m1")
        assert await mesh.switch("day") == ["coder created"], "it is loaded already"


async def test_profiles_and_the_active_one_survive_a_restart(tmp_path: Path) -> None:
    async with mesh_of(tmp_path) as mesh:
        await mesh.profile(ProfileManifest(name="day", agents=[an_agent("coder")]))
        await mesh.profile(ProfileManifest(name="night"))
        await mesh.switch("day")
        before = profiles_of(mesh.registry)
    async with mesh_of(tmp_path) as mesh:
        assert profiles_of(mesh.registry) == before
        assert await mesh.switch("night") == ["coder deleted"]


async def test_changed_active_profile_stays_active_and_can_be_deleted(mesh: Mesh) -> None:
    await mesh.profile(ProfileManifest(name="day", agents=[an_agent("coder")]))
    await mesh.switch("day")
    await mesh.profile(ProfileManifest(name="day", description="Work"))
    assert mesh.active() == ["day"]
    await mesh.declarations.delete(ResourceKind.PROFILE, "day")
    assert mesh.active() == []
    assert set(mesh.registry.core.mesh.names_of(ResourceKind.AGENT)) == {"coder"}, "what it declared stays"
    await refusal(Reason.NOT_FOUND, mesh.switch("day"))


async def test_step_that_cannot_start_reports_why_and_the_profile_stays_active(tmp_path: Path) -> None:
    async with mesh_of(tmp_path, limits=OperationLimits(max_unfinished=1)) as mesh:
        await mesh.profile(loading("m1", "m2"))
        done = await mesh.profiles.switch(SwitchProfileRequest(name="day"), "test")
        first, second = done.steps
        assert first
        assert not first.problem
        assert not second.operation
        assert "1 operations wait or run already" in second.problem
        assert mesh.active() == ["day"]


async def test_invalid_profile_is_rejected_with_the_field(mesh: Mesh) -> None:
    for manifest, field in (
        (loading("m1", "m1"), "profile.load[1].model"),
        (loading("m1", unload=["m1"]), "profile.unload"),
        (ProfileManifest(name="day", agents=[an_agent("a b")]), "profile.agents[0].name"),
        (ProfileManifest(name="day", agents=[an_agent("a"), an_agent("a")]), "profile.agents[1]"),
        (ProfileManifest(name="day", aliases=[manifest_in(an_alias("a", "b c"))]), "profile.aliases[0].target"),
        (
            loading(ProfileLoad(model="m1", settings=ProfileLoadSettings(parameters={"x": ProfileLoadValue()}))),
            "profile.load[0].settings.parameters.x",
        ),
    ):
        error = await refusal(Reason.INVALID_ARGUMENT, mesh.profile(manifest))
        assert isinstance(error, FieldError)
        assert error.field.endswith(field)


async def test_profile_count_size_and_document_limits_are_enforced(tmp_path: Path) -> None:
    config = a_config(tmp_path, max_profiles=1, max_profile_documents=1, max_profile_bytes=4096)
    async with mesh_of(tmp_path, config=config) as mesh:
        await mesh.profile(ProfileManifest(name="day"))
        await refusal(Reason.TOO_MANY_RESOURCES, mesh.profile(ProfileManifest(name="night")))
        two = ProfileManifest(name="day", agents=[an_agent("a"), an_agent("b")])
        assert "at most 1" in (await refusal(Reason.INVALID_ARGUMENT, mesh.profile(two))).message
        large = ProfileManifest(name="day", agents=[an_agent("a", prompt="x" * 5000)])
        assert "4096 bytes" in (await refusal(Reason.INVALID_ARGUMENT, mesh.profile(large))).message

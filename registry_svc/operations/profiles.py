"""Profiles of the mesh: saved from what is, and switched to as a whole."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.declarations import NOBODY, Declarations, Plan, events_of
from registry_svc.mesh.domain import EventDraft, EventReason, Kind
from registry_svc.mesh.manifests import valid_profile
from registry_svc.mesh.policy.declarations import in_use
from registry_svc.mesh.policy.ownership import Author
from registry_svc.mesh.policy.profile_steps import Step, StepKind, plan_steps
from registry_svc.mesh.profile_state import loaded_models, wanted_models
from registry_svc.mesh.records import kind_number
from registry_svc.mesh.rows import DeclaredNames
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.operations.operations import Operations
from weft.api.operations.v1.operation_pb2 import LoadModel, OperationAction, UnloadModel
from weft.api.operations.v1.operation_service_pb2 import CreateOperationRequest, GetGovernanceResponse
from weft.api.registry.v1.declaration_service_pb2 import ApplyRequest, ApplyResult, Declaration
from weft.api.registry.v1.model_pb2 import ModelDeclaration
from weft.api.registry.v1.profile_pb2 import Profile, ProfileLoad, ProfileLoadSettings, ProfileManifest
from weft.api.registry.v1.profile_service_pb2 import (
    ProfileStep,
    SaveProfileRequest,
    SwitchProfileRequest,
    SwitchProfileResponse,
)
from weft.api.runner.v1.load_pb2 import LoadOptions
from weft.documents.profiles import declarations_of, load_options_of, load_settings_of, profile_field
from weft.documents.rights import visible_names
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.names import AGENT_PREFIX, ROUTE_PREFIX, new_id
from weft.kernel.reasons import Reason
from weft.kernel.rpc_auth import caller
from weft.kernel.timestamps import stamp_of
from weft.kernel.unknown_names import MODEL, unknown_name

log = get_logger("weft.registry.operations")

MAX_DESCRIBED_AT_ONCE = 16
"""Runners that are asked at once how their models are loaded."""
_NUMBERS: Mapping[StepKind, ProfileStep.Kind.ValueType] = {
    StepKind.UNLOAD: ProfileStep.KIND_UNLOAD,
    StepKind.LOAD: ProfileStep.KIND_LOAD,
}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    """A switch as planned in its turn of writes."""

    plan: Plan
    deleted: Sequence[ApplyResult]
    previous: str

    @property
    def results(self) -> list[ApplyResult]:
        """What is done with each document, the deleted ones last."""
        return [*self.plan.results, *self.deleted]


@dataclass(slots=True)
class _Begun:
    """The operations of a switch that were begun, and what could not be."""

    steps: list[ProfileStep] = field(default_factory=list)
    unloads: set[str] = field(default_factory=set)


class Profiles:
    """Saves and switches the profiles of one registry, one switch at a time."""

    def __init__(
        self, core: RegistryCore, declarations: Declarations, operations: Operations, calls: RunnerCalls
    ) -> None:
        self._core = core
        self._declarations = declarations
        self._operations = operations
        self._calls = calls
        self._switching = asyncio.Lock()

    def get(self, name: str) -> Profile:
        """The profile of this name; raises NOT_FOUND."""
        self._core.require_open()
        profile = self._core.mesh.profiles.get(name)
        if profile is None:
            raise unknown_name(Kind.PROFILE.value, name, visible_names(caller(), self._core.mesh.profiles.names()))
        return profile

    async def save(self, request: SaveProfileRequest, author: Author) -> ApplyResult:
        """Declare a profile of what is now; see ProfileService.SaveProfile."""
        self._core.require_open()
        options = await self._load_options(self._runners_of(loaded_models(self._core.mesh)))
        return await self._core.write(lambda: self._save(request, author, options))

    async def switch(self, request: SwitchProfileRequest, requested_by: str) -> SwitchProfileResponse:
        """Switch to a profile; see ProfileService.SwitchProfile."""
        async with self._switching:
            manifest = self.get(request.name).manifest
            steps = await self._steps(manifest)
            self._require_permitted(request.name, steps)
            switch = await self._core.write(lambda: self._switch(request, requested_by, steps))
            begun = _Begun()
            for step in steps:
                await self._begin(step, manifest, begun, requested_by, dry_run=request.dry_run)
            if not request.dry_run:
                log.info("switched to a profile", profile=request.name, previous=switch.previous, steps=len(steps))
            return SwitchProfileResponse(results=switch.results, steps=begun.steps, previous=switch.previous)

    async def _save(
        self, request: SaveProfileRequest, author: Author, options: Mapping[str, LoadOptions]
    ) -> ApplyResult:
        mesh, earlier = self._core.mesh, self._core.mesh.profiles.get(request.name)
        settings_of = {model: load_settings_of(each) for model, each in options.items()}
        manifest = ProfileManifest(
            name=request.name,
            description=request.description or ("" if earlier is None else earlier.manifest.description),
            load=[
                ProfileLoad(model=model, settings=settings_of.get(model))
                for model, base in sorted(loaded_models(mesh).items())
                if not base
            ],
            unload_others=not request.leave_others,
            models=[
                ModelDeclaration(manifest=each.manifest, runner=each.declared_runner) for each in mesh.declared_models()
            ],
            agents=[each.manifest for each in mesh.declared_agents()],
            routes=[route.manifest for name in sorted(mesh.routes.names()) if (route := mesh.routes.get(name))],
            aliases=[each.manifest for each in mesh.aliases.all_declared()],
        )
        valid_profile(manifest, "profile", self._core.config)
        batch = ApplyRequest(declarations=[Declaration(profile=manifest)], dry_run=request.dry_run)
        plan = self._declarations.planned(batch, author)
        if not request.dry_run:
            self._activate(plan, request.name)
            await self._declarations.carry_out(plan)
        return plan.results[0]

    async def _switch(self, request: SwitchProfileRequest, requested_by: str, steps: Sequence[Step]) -> _Switch:
        # It may have been changed or deleted while runners were asked.
        manifest, active = self.get(request.name).manifest, self._core.mesh.profiles.active
        previous = "" if active is None else active.manifest.name
        leaving = self._leaving(manifest)
        self._require_unused(manifest, leaving)
        batch = ApplyRequest(declarations=declarations_of(manifest), dry_run=request.dry_run)
        self._declarations.name_targets(batch)
        try:
            plan = self._declarations.planned(batch, NOBODY, leaving)
        except WeftError as error:
            raise _of_profile(manifest, error) from error
        switch = _Switch(plan=plan, deleted=self._deleted(leaving), previous=previous)
        if request.dry_run:
            return switch
        documents = sum(each.outcome != ApplyResult.OUTCOME_UNCHANGED for each in switch.results)
        await self._operations.record_profile_switch(
            {"profile": request.name, "previous": previous, "documents": documents, "models": len(steps)}, requested_by
        )
        self._activate(plan, request.name)
        message = f"switched to by an operator: {_count(documents, 'document')}, {_count(len(steps), 'model')}"
        event = EventDraft(kind=Kind.PROFILE, name=request.name, reason=EventReason.SWITCHED, message=message)
        await self._declarations.carry_out(plan, leaving, [*events_of(switch.deleted), event])
        return switch

    def _activate(self, plan: Plan, name: str) -> None:
        """Have a profile be the active one with this plan."""
        profiles = self._core.mesh.profiles
        planned = {each.manifest.name: each for each in plan.profiles}
        active = profiles.active
        if active is not None and active.manifest.name != name:
            ended = planned.setdefault(active.manifest.name, _copy(active))
            ended.active = False
            ended.ClearField("active_time")
        profile = planned.get(name) or _copy(self.get(name))
        profile.active = True
        profile.active_time.CopyFrom(stamp_of(self._core.clock.utc_now()))
        planned[name] = profile
        plan.profiles[:] = planned.values()

    def _leaving(self, manifest: ProfileManifest) -> DeclaredNames:
        """Return what the profile that is active declares and this one does not."""
        mesh, active = self._core.mesh, self._core.mesh.profiles.active
        if active is None or active.manifest.name == manifest.name:
            return DeclaredNames()
        agents = _names(active.manifest.agents) - _names(manifest.agents)
        routes = _names(active.manifest.routes) - _names(manifest.routes)
        aliases = _names(active.manifest.aliases) - _names(manifest.aliases)
        return DeclaredNames(
            # What a runner publishes as well would be deleted with it.
            agents=sorted(
                name for name in agents if mesh.declared_agent(name) is not None and mesh.published_agent(name) is None
            ),
            routes=sorted(name for name in routes if name in mesh.routes),
            aliases=sorted(name for name in aliases if mesh.aliases.declared(name) is not None),
        )

    def _require_unused(self, manifest: ProfileManifest, leaving: DeclaredNames) -> None:
        """Raise RESOURCE_IN_USE where an alias that stays leads to what would be deleted."""
        mesh = self._core.mesh
        replaced = {*leaving.aliases, *_names(manifest.aliases)}
        for kind, prefix, names in (
            (Kind.AGENT, AGENT_PREFIX, leaving.agents),
            (Kind.ROUTE, ROUTE_PREFIX, leaving.routes),
        ):
            for name in names:
                users = mesh.aliases.leading_to({prefix + name}) - replaced
                if users:
                    raise in_use(kind, name, (), (), users)

    def _deleted(self, leaving: DeclaredNames) -> list[ApplyResult]:
        mesh = self._core.mesh
        agents = [(name, agent) for name in leaving.agents if (agent := mesh.declared_agent(name))]
        routes = [(name, route) for name in leaving.routes if (route := mesh.routes.get(name))]
        aliases = [(name, alias) for name in leaving.aliases if (alias := mesh.aliases.declared(name))]
        found = [
            *((Kind.AGENT, name, Declaration(agent=agent.manifest)) for name, agent in agents),
            *((Kind.ROUTE, name, Declaration(route=route.manifest)) for name, route in routes),
            *((Kind.ALIAS, name, Declaration(alias=alias.manifest)) for name, alias in aliases),
        ]
        return [
            ApplyResult(kind=kind_number(kind), name=name, outcome=ApplyResult.OUTCOME_DELETED, before=before)
            for kind, name, before in found
        ]

    async def _steps(self, manifest: ProfileManifest) -> list[Step]:
        """Return what is unloaded and loaded. Raises MODEL_NOT_FOUND for a model that is not known."""
        mesh = self._core.mesh
        arriving = {each.manifest.name for each in manifest.models}
        for index, load in enumerate(manifest.load):
            if mesh.model(load.model) is None and load.model not in arriving:
                names = visible_names(caller(), mesh.model_names())
                raise unknown_name(MODEL, load.model, names, field=f"load[{index}].model")
        loaded = loaded_models(mesh)
        wanted = {each.model: each for each in manifest.load if each.model in loaded}
        options = await self._load_options(self._runners_of(wanted))
        as_wanted = {model for model, load in wanted.items() if is_loaded_as(load, options.get(model, LoadOptions()))}
        return plan_steps(wanted_models(manifest), loaded, as_wanted)

    def _require_permitted(self, name: str, steps: Sequence[Step]) -> None:
        if steps and self._operations.rules().mode != GetGovernanceResponse.MODE_OFF:
            models = ", ".join(step.model for step in steps)
            raise WeftError(
                Reason.OPERATION_REFUSED,
                f"governance is on, and the profile {name!r} would load or unload {models}: do that with an "
                "authorization for each first (`weft load MODEL --token FILE`), then switch",
                metadata={Kind.PROFILE.value: name},
            )

    async def _begin(
        self, step: Step, manifest: ProfileManifest, begun: _Begun, requested_by: str, *, dry_run: bool
    ) -> None:
        """Begin the operation of a step; loads wait until what is unloaded is unloaded."""
        shown = ProfileStep(kind=_NUMBERS[step.kind], model=step.model)
        settings = next((each.settings for each in manifest.load if each.model == step.model), ProfileLoadSettings())
        if step.kind is StepKind.LOAD and settings.ByteSize():
            shown.settings.CopyFrom(settings)
        begun.steps.append(shown)
        if dry_run:
            return
        if step.kind is StepKind.UNLOAD:
            action = OperationAction(unload_model=UnloadModel(model=step.model))
        else:
            action = OperationAction(load_model=LoadModel(model=step.model, options=load_options_of(settings)))
        request = CreateOperationRequest(request_id=new_id("prf"), action=action, requested_by=requested_by)
        after = frozenset(begun.unloads) if step.kind is StepKind.LOAD else frozenset[str]()
        try:
            view, _ = await self._operations.create(request, after=after)
        except WeftError as error:
            shown.problem = error.message
            return
        shown.operation = view.operation.name
        if step.kind is StepKind.UNLOAD:
            begun.unloads.add(view.operation.id)

    def _runners_of(self, models: Iterable[str]) -> set[str]:
        """Return the runners of these models."""
        found = (self._core.mesh.model(name) for name in models)
        return {model.runner for model in found if model is not None and model.runner}

    async def _load_options(self, runners: Iterable[str]) -> dict[str, LoadOptions]:
        """Return how the models of some runners are loaded. Raises NO_RUNNER_AVAILABLE and WORKER_LOST."""
        found: dict[str, LoadOptions] = {}
        names = sorted(runners)
        for start in range(0, len(names), MAX_DESCRIBED_AT_ONCE):
            some = names[start : start + MAX_DESCRIBED_AT_ONCE]
            for options in await asyncio.gather(*map(self._calls.load_options, some)):
                found |= options
        return found


def is_loaded_as(wanted: ProfileLoad, loaded: LoadOptions) -> bool:
    """Whether a model that is loaded is loaded as a profile says. What the profile leaves open may be anything."""
    if not wanted.HasField("settings"):
        return not loaded.parameters and not loaded.quantization
    given, found = wanted.settings, LoadOptions()
    found.CopyFrom(loaded)
    if not given.HasField("keep_alive"):
        found.ClearField("keep_alive")
    return load_options_of(given) == found


def _of_profile(manifest: ProfileManifest, error: WeftError) -> WeftError:
    """Return a refusal of a declaration with its place in the profile."""
    index = error.metadata.get("declaration")
    if index is None:
        return error
    place = profile_field(manifest, int(index))
    return WeftError(error.reason, f"{place}: {error.message}", metadata=dict(error.metadata))


def _names(manifests: Iterable[_Named]) -> set[str]:
    return {each.name for each in manifests}


def _copy(profile: Profile) -> Profile:
    found = Profile()
    found.CopyFrom(profile)
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'} changed"

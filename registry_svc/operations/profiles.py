"""Profiles of the mesh: saved from its current state, and switched as a whole."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.declarations import NO_AUTHOR, Declarations, Plan, events_of
from registry_svc.mesh.policy.declarations import Author, in_use
from registry_svc.mesh.profile_state import loaded_models, plan_steps
from registry_svc.mesh.requests import Batch, valid_profile
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.operations.operations import Operations
from registry_svc.wire_values import cleaned_multiline, to_actor
from weft.api.operations.v1.operation_pb2 import LoadModel, OperationAction, UnloadModel
from weft.api.operations.v1.operation_service_pb2 import CreateOperationRequest, GetGovernanceResponse
from weft.api.registry.v1 import event_pb2, profile_service_pb2_grpc
from weft.api.registry.v1 import profile_service_pb2 as pb
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.model_pb2 import ModelDeclaration
from weft.api.registry.v1.profile_pb2 import Profile, ProfileLoad, ProfileLoadSettings, ProfileManifest
from weft.api.registry.v1.profile_service_pb2 import (
    ProfileStep,
    SaveProfileRequest,
    SwitchProfileRequest,
    SwitchProfileResponse,
)
from weft.api.runner.v1.load_pb2 import LoadOptions
from weft.documents.kinds import DECLARED_KINDS, Key, packed
from weft.documents.profiles import documents_of, load_options_of, load_settings_of, profile_field
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import new_document
from weft.documents.rights import names_secret, visible_names
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.names import new_id, require_name
from weft.kernel.principal import OPERATE, USE_SECRETS
from weft.kernel.reasons import Reason
from weft.kernel.rpc import AnsweringServicer
from weft.kernel.rpc_auth import caller
from weft.kernel.timestamps import stamp_of
from weft.kernel.unknown_names import MODEL, unknown_name

log = get_logger("weft.registry.operations")

MAX_DESCRIBED_AT_ONCE = 16
"""Maximum concurrent calls that ask runners for load options."""
_REPLACED = (ResourceKind.AGENT, ResourceKind.ROUTE, ResourceKind.ALIAS)
"""Kinds of documents of the previous profile that a switch deletes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    plan: Plan
    deleted: Sequence[ApplyResult]
    previous: str

    @property
    def results(self) -> list[ApplyResult]:
        """Results for all documents, the deleted ones last."""
        return [*self.plan.results, *self.deleted]


@dataclass(slots=True)
class _Begun:
    """The steps of a switch so far, including failed ones, and the names of its unload operations."""

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
        """Returns a profile. Raises NOT_FOUND."""
        self._core.require_open()
        profile: Profile | None = self._core.mesh.documents[ResourceKind.PROFILE].declared(name)
        if profile is None:
            raise unknown_name(
                ResourceKind.PROFILE.value,
                name,
                visible_names(caller(), self._core.mesh.names_of(ResourceKind.PROFILE)),
            )
        return profile

    async def save(self, request: SaveProfileRequest, author: Author) -> ApplyResult:
        """Declares a profile of the current state; see ProfileService.SaveProfile."""
        self._core.require_open()
        options = await self._load_options(self._runners_of(loaded_models(self._core.mesh)))
        return await self._core.write(lambda: self._save(request, author, options))

    async def switch(self, request: SwitchProfileRequest, requested_by: str) -> SwitchProfileResponse:
        """Switches to a profile; see ProfileService.SwitchProfile."""
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
        mesh = self._core.mesh
        earlier = mesh.documents[ResourceKind.PROFILE].declared(request.name)
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
                ModelDeclaration(manifest=each.manifest, runner=each.declared_runner)
                for each in mesh.documents[ResourceKind.MODEL].all_declared()
            ],
            **{kind.plural: [each.manifest for each in mesh.documents[kind].all_declared()] for kind in _REPLACED},
        )
        valid_profile(manifest, "profile", self._core.config)
        batch = Batch(documents=[new_document(ResourceKind.PROFILE, manifest)], dry_run=request.dry_run)
        plan = self._declarations.planned(batch, author)
        if not request.dry_run:
            self._activate(plan, request.name)
            await self._declarations.carry_out(plan)
        return plan.results[0]

    async def _switch(self, request: SwitchProfileRequest, requested_by: str, steps: Sequence[ProfileStep]) -> _Switch:
        # The profile may have been changed or deleted during the calls to runners.
        manifest, active = self.get(request.name).manifest, self._core.mesh.active_profile
        previous = "" if active is None else active.manifest.name
        leaving = self._leaving(manifest)
        self._require_unused(manifest, leaving)
        batch = Batch(documents=documents_of(manifest), dry_run=request.dry_run)
        self._declarations.name_targets(batch.documents)
        try:
            plan = self._declarations.planned(batch, NO_AUTHOR, leaving)
        except WeftError as error:
            raise _of_profile(manifest, error) from error
        switch = _Switch(plan=plan, deleted=self._deleted(leaving), previous=previous)
        if request.dry_run:
            return switch
        documents = sum(each.outcome != ApplyResult.OUTCOME_UNCHANGED for each in switch.results)
        detail = {"profile": request.name, "previous": previous, "documents": documents, "models": len(steps)}
        await self._operations.record_request("profile.switch_requested", detail, requested_by)
        self._activate(plan, request.name)
        message = f"switched to by an operator: {_count(documents, 'document')}, {_count(len(steps), 'model')}"
        event = event_pb2.Event(
            kind=ResourceKind.PROFILE, name=request.name, reason=event_pb2.EVENT_REASON_SWITCHED, message=message
        )
        await self._declarations.carry_out(plan, [*events_of(switch.deleted), event])
        return switch

    def _activate(self, plan: Plan, name: str) -> None:
        planned = {each.manifest.name: each for each in plan.records if isinstance(each, Profile)}
        active = self._core.mesh.active_profile
        if active is not None and active.manifest.name != name:
            ended = planned.setdefault(active.manifest.name, _copy(active))
            ended.active = False
            ended.ClearField("active_time")
        profile = planned.get(name) or _copy(self.get(name))
        profile.active = True
        profile.active_time.CopyFrom(stamp_of(self._core.clock.utc_now()))
        planned[name] = profile
        plan.records[:] = [*(each for each in plan.records if not isinstance(each, Profile)), *planned.values()]

    def _leaving(self, manifest: ProfileManifest) -> list[Key]:
        """Returns the documents of the active profile that are not in this one."""
        mesh, active = self._core.mesh, self._core.mesh.active_profile
        if active is None or active.manifest.name == manifest.name:
            return []
        return [
            (kind, name)
            for kind in _REPLACED
            for name in sorted(_names(active.manifest, kind) - _names(manifest, kind))
            # Keep agents that a runner also publishes, since deleting would remove those, too.
            if name in mesh.documents[kind] and not (kind is ResourceKind.AGENT and mesh.published_agent(name))
        ]

    def _require_unused(self, manifest: ProfileManifest, leaving: Collection[Key]) -> None:
        """Raises RESOURCE_IN_USE if a remaining document refers to one that would be deleted."""
        replaced = {*leaving, *((kind, name) for kind in _REPLACED for name in _names(manifest, kind))}
        for kind, name in leaving:
            prefix = DECLARED_KINDS[kind].prefix
            users = self._declarations.users_of((), {prefix + name}) if prefix else {}
            staying = {user: {each for each in names if (user, each) not in replaced} for user, names in users.items()}
            if any(staying.values()):
                raise in_use(kind, name, staying)

    def _deleted(self, leaving: Collection[Key]) -> list[ApplyResult]:
        found = [(kind, name, self._core.mesh.documents[kind].declared(name)) for kind, name in leaving]
        return [
            ApplyResult(
                kind=kind.value,
                name=name,
                outcome=ApplyResult.OUTCOME_DELETED,
                before=packed(kind, record.manifest),
            )
            for kind, name, record in found
            if record is not None
        ]

    async def _steps(self, manifest: ProfileManifest) -> list[ProfileStep]:
        """Returns the unloads and loads of a switch. Raises MODEL_NOT_FOUND."""
        mesh = self._core.mesh
        arriving = {each.manifest.name for each in manifest.models}
        for index, load in enumerate(manifest.load):
            if mesh.model(load.model) is None and load.model not in arriving:
                names = visible_names(caller(), mesh.names_of(ResourceKind.MODEL))
                raise unknown_name(MODEL, load.model, names, field=f"load[{index}].model")
        loaded = loaded_models(mesh)
        wanted = {each.model: each for each in manifest.load if each.model in loaded}
        options = await self._load_options(self._runners_of(wanted))
        as_wanted = {model for model, load in wanted.items() if is_loaded_as(load, options.get(model, LoadOptions()))}
        return plan_steps(manifest, loaded, as_wanted)

    def _require_permitted(self, name: str, steps: Sequence[ProfileStep]) -> None:
        if steps and self._operations.rules().mode != GetGovernanceResponse.MODE_OFF:
            models = ", ".join(step.model for step in steps)
            raise WeftError(
                Reason.OPERATION_REFUSED,
                f"governance is on, and the profile {name!r} would load or unload {models}: do that with an "
                "authorization for each first (`weft load MODEL --token FILE`), then switch",
                metadata={ResourceKind.PROFILE.value: name},
            )

    async def _begin(
        self, step: ProfileStep, manifest: ProfileManifest, begun: _Begun, requested_by: str, *, dry_run: bool
    ) -> None:
        """Creates the operation of a step; loads wait for the unloads."""
        settings = next((each.settings for each in manifest.load if each.model == step.model), ProfileLoadSettings())
        is_unload = step.kind == ProfileStep.KIND_UNLOAD
        if not is_unload and settings.ByteSize():
            step.settings.CopyFrom(settings)
        begun.steps.append(step)
        if dry_run:
            return
        if is_unload:
            action = OperationAction(unload_model=UnloadModel(model=step.model))
        else:
            action = OperationAction(load_model=LoadModel(model=step.model, options=load_options_of(settings)))
        request = CreateOperationRequest(request_id=new_id("prf"), action=action, requested_by=requested_by)
        after = frozenset[str]() if is_unload else frozenset(begun.unloads)
        try:
            operation, _ = await self._operations.create(request, after=after)
        except WeftError as error:
            step.problem = error.message
            return
        step.operation = operation.name
        if is_unload:
            begun.unloads.add(operation.name)

    def _runners_of(self, models: Iterable[str]) -> set[str]:
        found = (self._core.mesh.model(name) for name in models)
        return {model.runner for model in found if model is not None and model.runner}

    async def _load_options(self, runners: Iterable[str]) -> dict[str, LoadOptions]:
        """Returns the load options of the models of runners. Raises NO_RUNNER_AVAILABLE and WORKER_LOST."""
        found: dict[str, LoadOptions] = {}
        names = sorted(runners)
        for start in range(0, len(names), MAX_DESCRIBED_AT_ONCE):
            some = names[start : start + MAX_DESCRIBED_AT_ONCE]
            for options in await asyncio.gather(*map(self._calls.load_options, some)):
                found |= options
        return found


def is_loaded_as(wanted: ProfileLoad, loaded: LoadOptions) -> bool:
    """Whether a model is loaded with the settings of a profile. Omitted settings may have any value."""
    if not wanted.HasField("settings"):
        return not loaded.parameters and not loaded.quantization
    given, found = wanted.settings, LoadOptions()
    found.CopyFrom(loaded)
    if not given.HasField("keep_alive"):
        found.ClearField("keep_alive")
    return load_options_of(given) == found


def _of_profile(manifest: ProfileManifest, error: WeftError) -> WeftError:
    """Returns the error of a declaration with its field in the profile."""
    index = error.metadata.get("declaration")
    if index is None:
        return error
    place = profile_field(manifest, int(index))
    return WeftError(error.reason, f"{place}: {error.message}", metadata=dict(error.metadata))


def _names(manifest: ProfileManifest, kind: ResourceKind) -> set[str]:
    return {each.name for each in getattr(manifest, kind.plural)}


def _copy(profile: Profile) -> Profile:
    found = Profile()
    found.CopyFrom(profile)
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'} changed"


Context = grpc.aio.ServicerContext[Any, Any]

MAX_DESCRIPTION_CHARS = 1_024


class ProfileServicer(AnsweringServicer, profile_service_pb2_grpc.ProfileServiceServicer):
    """See ProfileService in the contract."""

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles

    @override
    async def SaveProfile(self, request: pb.SaveProfileRequest, context: Context) -> pb.SaveProfileResponse:
        require_name(request.name, "name")
        request.description = cleaned_multiline(request.description, "description", MAX_DESCRIPTION_CHARS)
        known = caller()
        author = Author(name=request.requested_by if known.names_tenants else known.name)
        return pb.SaveProfileResponse(result=await self._profiles.save(request, author))

    @override
    async def SwitchProfile(self, request: pb.SwitchProfileRequest, context: Context) -> pb.SwitchProfileResponse:
        require_name(request.name, "name")
        profile, known = self._profiles.get(request.name), caller()
        manifest = profile.manifest
        if manifest.load or manifest.unload or manifest.unload_others:
            known.require(OPERATE)
        if names_secret(documents_of(manifest)):
            known.require(USE_SECRETS)
        return await self._profiles.switch(request, to_actor(request.requested_by))

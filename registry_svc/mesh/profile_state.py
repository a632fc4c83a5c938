"""Comparison of profiles with the mesh: steps of a switch, and deviations from the active profile."""

from collections.abc import Container, Mapping

from registry_svc.mesh.mesh_state import Mesh
from registry_svc.mesh.records import is_loaded
from weft.api.registry.v1.profile_pb2 import Profile, ProfileManifest
from weft.api.registry.v1.profile_service_pb2 import ProfileStep
from weft.documents.profiles import documents_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument

MAX_CHANGES = 20
"""Maximum number of listed differences; further ones are counted."""


def loaded_models(mesh: Mesh) -> dict[str, str]:
    """Returns the models loaded by active runners, with the model that provides the engine, "" for a separate engine.

    Central models are never loaded.
    """
    found: dict[str, str] = {}
    for state in mesh:
        if not state.pulse.active:
            continue
        for instance in state.capability.message().instances:
            model = mesh.model(instance.model) if is_loaded(instance) else None
            if model is not None and model.runner == state.profile.name and instance.model not in mesh.central_models:
                found[instance.model] = instance.base_model
    return found


def plan_steps(wanted: ProfileManifest, loaded: Mapping[str, str], as_wanted: Container[str]) -> list[ProfileStep]:
    """Returns the steps to a profile: unloads to free memory, then loads in the profile's order.

    `loaded` maps loaded models to the model that provides their engine, "" for a separate engine. `as_wanted` are
    models loaded with the profile's settings. A model that shares its engine with a wanted one is not unloaded.
    """
    load = [each.model for each in wanted.load]
    needed = {*load, *(loaded[model] for model in load if loaded.get(model))}
    unwanted = set(loaded) if wanted.unload_others else set(wanted.unload) & set(loaded)
    unloads = [model for model in sorted(unwanted - needed) if loaded[model] not in needed]
    loads = [model for model in load if model not in loaded or model not in as_wanted]
    return [
        *(ProfileStep(kind=ProfileStep.KIND_UNLOAD, model=model) for model in unloads),
        *(ProfileStep(kind=ProfileStep.KIND_LOAD, model=model) for model in loads),
    ]


def differences(wanted: ProfileManifest, loaded: Mapping[str, str]) -> list[str]:
    """Returns the differences between a profile and the loaded models, in words."""
    as_wanted = frozenset(each.model for each in wanted.load)
    words = {ProfileStep.KIND_UNLOAD: "is loaded", ProfileStep.KIND_LOAD: "is not loaded"}
    return [f"model/{step.model} {words[step.kind]}" for step in plan_steps(wanted, loaded, as_wanted)]


def shown_profile(mesh: Mesh, name: str) -> Profile | None:
    """Returns a profile; the active one with the deviations from it."""
    profile: Profile | None = mesh.documents[ResourceKind.PROFILE].declared(name)
    if profile is None or not profile.active:
        return profile
    found = [
        f"{document.label} is declared otherwise, or was deleted"
        for document in documents_of(profile.manifest)
        if not mesh.is_declared_as(_owned(mesh, document))
    ]
    found += differences(profile.manifest, loaded_models(mesh))
    shown = Profile()
    shown.CopyFrom(profile)
    shown.changes.extend(found[:MAX_CHANGES] if len(found) <= MAX_CHANGES else found[: MAX_CHANGES - 1])
    if len(found) > MAX_CHANGES:
        shown.changes.append(f"{len(found) - MAX_CHANGES + 1} more")
    return shown


def _owned(mesh: Mesh, document: AnyDocument) -> AnyDocument:
    """Sets the current owner in a document of a profile without an owner, since a switch keeps owners."""
    views = {ResourceKind.MODEL: mesh.model, ResourceKind.AGENT: mesh.agent}
    view = views[document.kind](document.name) if document.kind in views else None
    if view is not None and view.manifest.tags.owner and not document.manifest.tags.owner:
        document.manifest.tags.owner = view.manifest.tags.owner
    return document

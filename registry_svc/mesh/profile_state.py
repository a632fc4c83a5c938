"""Profiles compared with the mesh: which models are loaded, and what is not as the active profile says."""

from registry_svc.mesh.mesh_state import Mesh
from registry_svc.mesh.policy.profile_steps import WantedModels, differences
from registry_svc.mesh.records import is_loaded
from weft.api.registry.v1.declaration_service_pb2 import Declaration
from weft.api.registry.v1.profile_pb2 import Profile, ProfileManifest
from weft.documents.kinds.declared import kind_of, manifest_of
from weft.documents.profiles import declarations_of
from weft.documents.resource_kinds import ResourceKind

MAX_CHANGES = 20
"""Differences that are named; of more, how many there are."""


def loaded_models(mesh: Mesh) -> dict[str, str]:
    """Return the models that runners which are there have loaded, and the model whose engine serves each.

    It is empty for a model with an engine of its own. Central models are never loaded.
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


def wanted_models(manifest: ProfileManifest) -> WantedModels:
    """Return the models that a profile names."""
    return WantedModels(
        load=[each.model for each in manifest.load], unload=manifest.unload, unload_others=manifest.unload_others
    )


def shown_profile(mesh: Mesh, name: str) -> Profile | None:
    """Return a profile; the active one with what is not as it says."""
    profile: Profile | None = mesh.documents[ResourceKind.PROFILE].declared(name)
    if profile is None or not profile.active:
        return profile
    found = [
        f"{kind_of(declaration)}/{manifest_of(declaration).name} is declared otherwise, or was deleted"
        for declaration in declarations_of(profile.manifest)
        if not mesh.is_declared_as(_owned(mesh, declaration))
    ]
    found += differences(wanted_models(profile.manifest), loaded_models(mesh))
    shown = Profile()
    shown.CopyFrom(profile)
    shown.changes.extend(found[:MAX_CHANGES] if len(found) <= MAX_CHANGES else found[: MAX_CHANGES - 1])
    if len(found) > MAX_CHANGES:
        shown.changes.append(f"{len(found) - MAX_CHANGES + 1} more")
    return shown


def _owned(mesh: Mesh, declaration: Declaration) -> Declaration:
    """Return a declaration of a profile that names no owner with the present owner, which a switch leaves."""
    kind, manifest = kind_of(declaration), manifest_of(declaration)
    views = {ResourceKind.MODEL: mesh.model, ResourceKind.AGENT: mesh.agent}
    view = views[kind](manifest.name) if kind in views else None
    if view is None:
        return declaration
    if view.manifest.tags.owner and not manifest.tags.owner:
        manifest.tags.owner = view.manifest.tags.owner
    return declaration

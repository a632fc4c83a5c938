"""Permissions by name: which names a declaration or an operation affects, and whether the caller may act on them.

A caller without name restrictions passes every check of names.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from weft.api.operations.v1.operation_pb2 import OperationAction
from weft.api.registry.v1.pool_pb2 import Pool
from weft.api.registry.v1.route_pb2 import RouteManifest
from weft.dispatch.agents import name_asked_for
from weft.dispatch.fleet import FleetView
from weft.documents.kind import DeclaredKind, PointsTo
from weft.documents.kinds import DECLARED_KINDS, KINDS
from weft.documents.mesh_state import pool_message
from weft.documents.reach import require_reach
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument
from weft.kernel.access.principal import (
    EDIT_MODELS,
    OPERATE,
    USE_MODELS,
    VIEW_MODELS,
    Access,
    Principal,
    Resource,
    Role,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

StandsFor = Callable[[ResourceKind, str], Iterable[str]]
"""Returns the names for which a present resource answers besides its own: a model's pool, an alias's pattern."""


def require_declarable(principal: Principal, documents: Iterable[AnyDocument], present: StandsFor) -> None:
    """Raises PERMISSION_DENIED for the first name that the caller may not edit, or may not refer to.

    Declaring a model also requires permission for its pool, since pool members serve each other's requests, and for the
    names for which the `present` resource answers, since it may end that. Agents, routes, aliases, workflows and trials
    may only refer to names that their author may edit or use, because they give access to them. Tenants and trials need
    the scope for settings. Addresses, variables, programs and tools need their own permission, see
    `weft.documents.reach`, and how long the candidates of a route stay loaded that for loads and unloads.
    """
    for each in documents:
        kind = DECLARED_KINDS.get(each.kind)
        if kind is not None and kind.resource is not Resource.MODELS:
            principal.require(Access(kind.resource, Role.EDIT))
        elif not principal.may(EDIT_MODELS):
            if kind is not None and not kind.by_name:
                principal.require(EDIT_MODELS)
            _require_edit(principal, (each.name,) if kind is None else kind.names(each.declared))
            _require_edit(principal, present(each.kind, each.name))
        if kind is not None and not principal.may(EDIT_MODELS):
            _require_references(principal, kind, each)
        if isinstance(each.manifest, RouteManifest) and each.manifest.HasField("keep_alive"):
            for candidate in each.manifest.candidates:
                principal.require_name(OPERATE, candidate)
        require_reach(principal, each.declared, each.label)


def _require_references(principal: Principal, kind: DeclaredKind, document: AnyDocument) -> None:
    """Raises PERMISSION_DENIED for a name that a caller with name restrictions may not refer to."""
    for reference in kind.references_of(document.manifest):
        is_request = reference.field.to is PointsTo.REQUESTABLE
        name = name_asked_for(reference.target) if is_request else reference.target
        if not principal.may_name(EDIT_MODELS, name):
            principal.require_name(USE_MODELS, name)


def _require_edit(principal: Principal, names: Iterable[str]) -> None:
    for name in names:
        principal.require_name(EDIT_MODELS, name)


def require_deletable(
    principal: Principal, kind: ResourceKind, name: str, present: StandsFor, *, unloads: bool
) -> None:
    """Raises PERMISSION_DENIED unless the caller may delete a resource, and unload the models that this ends."""
    if kind in DECLARED_KINDS and KINDS[kind].resource is Resource.MODELS and KINDS[kind].by_name:
        _require_edit(principal, (name, *present(kind, name)))
    else:
        principal.require(Access(KINDS[kind].resource, Role.EDIT))
    if unloads and kind is ResourceKind.MODEL:
        principal.require_name(OPERATE, name)
    elif unloads and kind is ResourceKind.RUNNER:
        principal.require(OPERATE)


def stands_for(view: FleetView, kind: ResourceKind, name: str) -> Iterable[str]:
    """See `StandsFor`."""
    if kind is ResourceKind.MODEL and (model := view.models.get(name)) is not None:
        return (model.pool,)
    if kind is ResourceKind.ALIAS and (alias := view.aliases.get(name)) is not None:
        return (alias.manifest.pattern,)
    return ()


def view_of(kind: ResourceKind) -> Access:
    """Returns the access required to see resources of a kind."""
    return Access(KINDS[kind].resource, Role.VIEW)


_NAMING = frozenset({Reason.RESOURCE_IN_USE, Reason.ALREADY_EXISTS})
"""Reasons of refused declarations and deletions that name other resources, also in metadata."""


def hide_names(error: WeftError, principal: Principal) -> None:
    """Removes the names of resources that the caller may not see from a refused declaration or deletion.

    Runners are not hidden: documents of models name them.
    """
    if error.reason not in _NAMING:
        return
    for kind in frozenset(ResourceKind) - {ResourceKind.RUNNER}:
        for key in {kind.value, kind.plural} & error.metadata.keys():
            names = error.metadata[key].split(",")
            seen = [name for name in names if principal.may_name(view_of(kind), name)]
            for name in set(names).difference(seen):
                error.message = re.sub(rf"(?<![\w.:/-]){re.escape(name)}(?![\w:/-])", "(hidden)", error.message)
            error.metadata[key] = ",".join(seen)


def visible_names(principal: Principal, names: Iterable[str]) -> Iterator[str]:
    """Yields the names that the caller may see."""
    return (name for name in names if principal.may_name(VIEW_MODELS, name))


def require_operable(principal: Principal, action: OperationAction, *, configured_source: bool = False) -> None:
    """Raises PERMISSION_DENIED for the first model that the caller may not load, unload or flush.

    Actions that concern no single model, or add a model, need the unrestricted scope. Addresses, files and variables
    need their own permission, see `weft.documents.reach`; `configured_source`: the source is not the caller's.
    """
    if not configured_source:
        require_reach(principal, action)
    match action.WhichOneof("kind"):
        case "load_model" if not action.load_model.source:
            principal.require_name(OPERATE, action.load_model.model)
            if action.load_model.evict_model:
                principal.require_name(OPERATE, action.load_model.evict_model)
        case "unload_model":
            principal.require_name(OPERATE, action.unload_model.model)
        case "remove_model":
            principal.require_name(OPERATE, action.remove_model.model)
        case "flush_cache" if action.flush_cache.model:
            principal.require_name(OPERATE, action.flush_cache.model)
        case _:
            principal.require(OPERATE)


def visible_pool(principal: Principal, pool: Pool) -> Pool:
    """Returns a pool with the members that the caller may see."""
    if principal.may(VIEW_MODELS):
        return pool
    members = [model for model in pool.members if principal.may_name(VIEW_MODELS, model.manifest.name)]
    found = pool_message(pool.name, members)
    found.explicit = pool.explicit
    return found

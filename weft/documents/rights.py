"""Rights by name: which names a declaration or an operation is about, and that a caller may do it to all of them.

A caller whose scopes are not limited to names passes every check here.
"""

from collections.abc import Iterable, Iterator, Sequence

from weft.api.operations.v1.operation_pb2 import OperationAction
from weft.api.registry.v1.declaration_service_pb2 import Declaration
from weft.api.registry.v1.pool_pb2 import Pool
from weft.dispatch.agents import name_asked_for
from weft.documents.kinds.declared import DECLARED_KINDS, declared_kind_of, kind_of, manifest_of
from weft.documents.kinds.kind import DeclaredKind, PointsTo
from weft.documents.mesh_state import pool_message
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.principal import EDIT_MODELS, OPERATE, USE_MODELS, VIEW_MODELS, Access, Principal, Resource, Role


def require_declarable(principal: Principal, declarations: Iterable[Declaration]) -> None:
    """Raises PERMISSION_DENIED for the first name that the caller may not edit, or not point to.

    The pool of a model is a name that it is about: its members answer for each other. An agent, a route, an alias or a
    workflow may point to what its caller may edit or use, since whoever may use it reaches that. A profile needs the
    scope for everything, a tenant the scope for settings.
    """
    for declaration in declarations:
        kind = declared_kind_of(declaration)
        if kind is not None and kind.resource is not Resource.MODELS:
            principal.require(Access(kind.resource, Role.EDIT))
        elif not principal.may(EDIT_MODELS):
            _require_names(principal, kind, declaration)


def _require_names(principal: Principal, kind: DeclaredKind | None, declaration: Declaration) -> None:
    """Raises PERMISSION_DENIED for a name that a caller with rights to some names may not edit, or not point to."""
    if kind is not None and not kind.by_name:
        principal.require(EDIT_MODELS)
    for name in _declared_names(declaration):
        principal.require_name(EDIT_MODELS, name)
    for name in _targets(declaration):
        if not principal.may_name(EDIT_MODELS, name):
            principal.require_name(USE_MODELS, name)


def resource_of(kind: ResourceKind) -> Resource:
    """Returns what a role must be granted for to see, declare or delete resources of a kind."""
    if kind is ResourceKind.RUNNER:
        return Resource.RUNNERS
    return DECLARED_KINDS[kind].resource if kind in DECLARED_KINDS else Resource.MODELS


def is_by_name(kind: ResourceKind) -> bool:
    """Whether rights to some names are enough to see, declare or delete resources of a kind."""
    return DECLARED_KINDS[kind].by_name if kind in DECLARED_KINDS else kind is not ResourceKind.RUNNER


def names_secret(declarations: Sequence[Declaration]) -> bool:
    """Whether a model among these, or in a profile among these, is of a provider whose key is a secret."""
    models = [
        *(each.model for each in declarations if each.HasField("model")),
        *(model for each in declarations for model in each.profile.models),
    ]
    return any(model.manifest.provider.api_key_ref for model in models)


def visible_names(principal: Principal, names: Iterable[str]) -> Iterator[str]:
    """Yields those of some names that the caller may see."""
    return (name for name in names if principal.may_name(VIEW_MODELS, name))


def _declared_names(declaration: Declaration) -> Iterable[str]:
    declared, kind = declared_kind_of(declaration), kind_of(declaration)
    if kind is None:
        return ()
    given = getattr(declaration, kind.value)
    return (given.name,) if declared is None else declared.names(given)


def _targets(declaration: Declaration) -> Iterator[str]:
    declared = declared_kind_of(declaration)
    if declared is not None:
        for reference in declared.references_of(manifest_of(declaration)):
            is_request = reference.field.to is PointsTo.REQUESTABLE
            yield name_asked_for(reference.target) if is_request else reference.target


def require_operable(principal: Principal, action: OperationAction) -> None:
    """Raises PERMISSION_DENIED for the first model that the caller may not load, unload or flush.

    What is about no one model, or brings a new one, needs the scope for everything.
    """
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

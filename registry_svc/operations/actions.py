"""Validation of operation actions, and the models that an action affects."""

from collections.abc import Iterable
from types import MappingProxyType

from registry_svc.operations.model_sources import choose_runner, load_target, source_of
from registry_svc.operations.runner_presence import RunnerDirectory
from registry_svc.wire_values import check_options
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.documents.rights import visible_names
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.field_rules import check_message
from weft.kernel.model_source import server_source
from weft.kernel.names import MODEL_NAME_WORDS, is_model_name
from weft.kernel.reasons import Reason
from weft.kernel.rpc_auth import caller
from weft.kernel.unknown_names import MODEL, MODEL_OR_POOL, RUNNER, unknown_name
from weft.signing.tokens import has_unknown_fields

MAX_ACTION_BYTES = 16 * 1024

Scope = runner_service_pb2.FlushCacheRequest
_NEEDED = MappingProxyType({Scope.SCOPE_MODEL: "model", Scope.SCOPE_TENANT: "tenant", Scope.SCOPE_TAG: "tag"})
"""Required field by scope."""


def check_action(action: operation_pb2.OperationAction) -> None:
    """Raises INVALID_ARGUMENT naming the field for an invalid action, without checking that names exist."""
    if action.ByteSize() > MAX_ACTION_BYTES:
        raise invalid_field("action", f"must be at most {MAX_ACTION_BYTES} bytes")
    # An operation must do exactly what was signed.
    if has_unknown_fields(action):
        raise invalid_field("action", "has a field that this release does not know")
    kind = action.WhichOneof("kind")
    if kind is None:
        raise invalid_field("action", "must be load_model, unload_model, flush_cache, pull_model or remove_model")
    check_message(action, "action")
    if kind == "load_model":
        _check_load(action.load_model, "action.load_model")
    elif kind == "flush_cache":
        _check_flush(action.flush_cache, "action.flush_cache")
    source_of(action)


def action_bytes(action: operation_pb2.OperationAction) -> bytes:
    """Returns the deterministic serialization of an action, for storage and comparison."""
    return action.SerializeToString(deterministic=True)


def action_summary(action: operation_pb2.OperationAction) -> str:
    """Returns a short description of an action, for the log."""
    match action.WhichOneof("kind"):
        case "load_model":
            return f"load {action.load_model.model or action.load_model.source}"
        case "unload_model":
            return f"unload {action.unload_model.model}"
        case "pull_model":
            return "pull a model"
        case "remove_model":
            return f"remove {action.remove_model.model}"
        case _:
            return "flush cache"


def _check_load(load: operation_pb2.LoadModel, field: str) -> None:
    if load.source:
        if load.replicas:
            raise invalid_field(f"{field}.replicas", "must be 0 for a source, which is one model")
    else:
        # Signed actions are stored unchanged, so that a name in other letters must be in Punycode here.
        if not is_model_name(load.model):
            raise invalid_field(f"{field}.model", f"must be {MODEL_NAME_WORDS}")
        if load.runner:
            raise invalid_field(f"{field}.runner", "must be empty without a source: the model's runner loads it")
    if load.evict_model and load.evict_model == load.model:
        raise invalid_field(f"{field}.evict_model", "must not be what is to be loaded")
    check_options(load.options, f"{field}.options")


def _check_flush(flush: operation_pb2.FlushCache, field: str) -> None:
    """Rejects a scope without its field, and fields that it ignores, which would flush more than the caller expects."""
    needed = _NEEDED.get(flush.scope)
    if needed is not None and not getattr(flush, needed):
        raise invalid_field(f"{field}.{needed}", f"must be set where scope is {needed}")
    if flush.tenant and flush.scope not in {Scope.SCOPE_TENANT, Scope.SCOPE_TAG}:
        raise invalid_field(f"{field}.tenant", "must be empty unless scope is tenant or tag")
    if flush.tag and flush.scope != Scope.SCOPE_TAG:
        raise invalid_field(f"{field}.tag", "must be empty unless scope is tag")


def require_known(action: operation_pb2.OperationAction, directory: RunnerDirectory) -> None:
    """Raises MODEL_NOT_FOUND or NOT_FOUND for unknown names, INVALID_ARGUMENT for names that do not fit together."""
    match action.WhichOneof("kind"):
        case "load_model":
            _require_loadable(action.load_model, "action.load_model", directory)
        case "unload_model":
            _require_unloadable(action.unload_model.model, "action.unload_model.model", directory)
        case "pull_model":
            choose_runner(action.pull_model.runner, "action.pull_model.runner", directory)
        case "remove_model":
            _require_removable(action.remove_model.model, "action.remove_model.model", directory)
        case _:
            _require_flushable(action.flush_cache, "action.flush_cache", directory)


def subjects_of(action: operation_pb2.OperationAction, directory: RunnerDirectory) -> frozenset[str]:
    """Returns the names that an action changes. Operations on the same name do not run concurrently."""
    match action.WhichOneof("kind"):
        case "load_model":
            load = action.load_model
            if load.source:
                return frozenset({_name_of(load, directory), *([load.evict_model] if load.evict_model else [])})
            pool = () if is_single(load, directory) else _member_names(load.model, directory)
            return frozenset({load.model, *pool, *([load.evict_model] if load.evict_model else [])})
        case "unload_model":
            return frozenset({action.unload_model.model, *models_to_unload(action.unload_model.model, directory)})
        case "pull_model":
            return frozenset()
        case "remove_model":
            return frozenset({action.remove_model.model})
        case _:
            model = action.flush_cache.model
            return frozenset({model, *models_named(model, directory)} if model else ())


def _name_of(load: operation_pb2.LoadModel, directory: RunnerDirectory) -> str:
    """Returns the name of a load by source; the source if its runner is not active, for example after a restart."""
    try:
        return load_target(load, directory).model
    except WeftError:
        return load.model or load.source


def models_named(name: str, directory: RunnerDirectory) -> list[str]:
    """Returns the models that an unload or flush of `name` affects: all of the pool, or the model with this name."""
    if directory.names_pool(name) or directory.runner_of(name) is None:
        return _member_names(name, directory)
    return [name]


def models_to_unload(name: str, directory: RunnerDirectory) -> list[str]:
    """As `models_named`, but also returns a model that its runner has loaded but no longer publishes."""
    named = models_named(name, directory)
    return named if named or directory.holder_of(name) is None else [name]


def is_single(load: operation_pb2.LoadModel, directory: RunnerDirectory) -> bool:
    """Whether a load is for one model, not for members of a pool."""
    return bool(load.source) or (not load.replicas and directory.runner_of(load.model) is not None)


def _require_model(name: str, field: str, directory: RunnerDirectory) -> None:
    if directory.runner_of(name) is None and not directory.pool(name):
        raise unknown_name(MODEL_OR_POOL, name, _visible(directory), field=field)


def _require_unloadable(name: str, field: str, directory: RunnerDirectory) -> None:
    if directory.holder_of(name) is None:
        _require_model(name, field, directory)


def _require_removable(name: str, field: str, directory: RunnerDirectory) -> None:
    if any(each.model == name for each in directory.added_models()) or directory.runner_of_server(name) is not None:
        return
    runner = directory.runner_of(name)
    if runner is None:
        raise unknown_name(MODEL, name, _visible(directory), field=field)
    if runner and not directory.is_active(runner):
        raise WeftError(
            Reason.NO_RUNNER_AVAILABLE,
            f"the runner {runner!r} of {name} is not there; start it",
            metadata={"field": field},
        )
    raise invalid_field(field, f"{name} was not loaded by its source: its runner's configuration names it")


def _require_loadable(load: operation_pb2.LoadModel, field: str, directory: RunnerDirectory) -> None:
    if load.source:
        if server_source(load.source, f"{field}.source") is not None and load.evict_model:
            raise invalid_field(f"{field}.evict_model", "must be empty: an attached server takes no memory of the mesh")
        members = [load_target(load, directory).model]
    else:
        _require_model(load.model, f"{field}.model", directory)
        members = [load.model] if is_single(load, directory) else _member_names(load.model, directory)
    if load.replicas and not members:
        raise invalid_field(f"{field}.replicas", "must be 0 for a model that is in a pool of another name")
    if load.replicas > len(members):
        raise invalid_field(f"{field}.replicas", f"must be at most {len(members)}: the pool has so many members")
    if load.evict_model in members:
        raise invalid_field(f"{field}.evict_model", "must not be what is to be loaded")
    if load.evict_model and directory.runner_of(load.evict_model) is None:
        raise unknown_name(MODEL, load.evict_model, _visible(directory), field=f"{field}.evict_model")


def _require_flushable(flush: operation_pb2.FlushCache, field: str, directory: RunnerDirectory) -> None:
    if flush.model:
        _require_model(flush.model, f"{field}.model", directory)
    if not flush.runner:
        return
    if flush.runner not in directory.runner_names():
        raise unknown_name(RUNNER, flush.runner, directory.runner_names(), field=f"{field}.runner")
    served_by = {directory.runner_of(model) for model in models_named(flush.model, directory)} if flush.model else set()
    if flush.model and flush.runner not in served_by:
        raise invalid_field(f"{field}.runner", "must be the runner of `model`, or empty")


def _visible(directory: RunnerDirectory) -> Iterable[str]:
    return visible_names(caller(), directory.known_names())


def _member_names(pool: str, directory: RunnerDirectory) -> list[str]:
    return [member.model for member in directory.pool(pool)]

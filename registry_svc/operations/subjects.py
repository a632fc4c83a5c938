"""Which models an action concerns, and whether they are known."""

from registry_svc.operations.directory import Directory
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason


def require_known(action: operation_pb2.OperationAction, directory: Directory) -> None:
    """Refuse an action on names that are not known, or that do not belong together.

    Raises MODEL_NOT_FOUND, NOT_FOUND for a runner, and INVALID_ARGUMENT naming the field.
    """
    match action.WhichOneof("kind"):
        case "load_model":
            _require_loadable(action.load_model, "action.load_model", directory)
        case "unload_model":
            _require_unloadable(action.unload_model.model, "action.unload_model.model", directory)
        case _:
            _require_flushable(action.flush_cache, "action.flush_cache", directory)


def subjects_of(action: operation_pb2.OperationAction, directory: Directory) -> frozenset[str]:
    """The names that an action changes: no two operations on one of them run at the same time."""
    match action.WhichOneof("kind"):
        case "load_model":
            load = action.load_model
            pool = () if is_single(load, directory) else _member_names(load.model, directory)
            return frozenset({load.model, *pool, *([load.evict_model] if load.evict_model else [])})
        case "unload_model":
            return frozenset({action.unload_model.model, *models_to_unload(action.unload_model.model, directory)})
        case _:
            model = action.flush_cache.model
            return frozenset({model, *models_named(model, directory)} if model else ())


def models_named(name: str, directory: Directory) -> list[str]:
    """The models that an unload or a flush of `name` concerns: all of the pool so called, or the model so called."""
    if directory.names_pool(name) or directory.runner_of(name) is None:
        return _member_names(name, directory)
    return [name]


def models_to_unload(name: str, directory: Directory) -> list[str]:
    """See `models_named`; also a model that is loaded on a runner which does not publish it any more."""
    named = models_named(name, directory)
    return named if named or directory.holder_of(name) is None else [name]


def is_single(load: operation_pb2.LoadModel, directory: Directory) -> bool:
    """Whether a load is for one model, rather than for some of a pool."""
    return not load.replicas and directory.runner_of(load.model) is not None


def _require_model(name: str, field: str, directory: Directory) -> None:
    if directory.runner_of(name) is None and not directory.pool(name):
        raise WeftError(Reason.MODEL_NOT_FOUND, f"no model or pool {name!r} is known", metadata={"field": field})


def _require_unloadable(name: str, field: str, directory: Directory) -> None:
    if directory.holder_of(name) is None:
        _require_model(name, field, directory)


def _require_loadable(load: operation_pb2.LoadModel, field: str, directory: Directory) -> None:
    _require_model(load.model, f"{field}.model", directory)
    members = [load.model] if is_single(load, directory) else _member_names(load.model, directory)
    if load.replicas and not members:
        raise invalid_field(f"{field}.replicas", "must be 0 for a model that is in a pool of another name")
    if load.replicas > len(members):
        raise invalid_field(f"{field}.replicas", f"must be at most {len(members)}: the pool has so many members")
    if load.evict_model in members:
        raise invalid_field(f"{field}.evict_model", "must not be what is to be loaded")
    if load.evict_model and directory.runner_of(load.evict_model) is None:
        evict_field = f"{field}.evict_model"
        raise WeftError(
            Reason.MODEL_NOT_FOUND, f"no model {load.evict_model!r} is known", metadata={"field": evict_field}
        )


def _require_flushable(flush: operation_pb2.FlushCache, field: str, directory: Directory) -> None:
    if flush.model:
        _require_model(flush.model, f"{field}.model", directory)
    if not flush.runner:
        return
    if directory.runner(flush.runner) is None:
        raise WeftError(Reason.NOT_FOUND, f"no runner {flush.runner!r} is known", metadata={"field": f"{field}.runner"})
    served_by = {directory.runner_of(model) for model in models_named(flush.model, directory)} if flush.model else set()
    if flush.model and flush.runner not in served_by:
        raise invalid_field(f"{field}.runner", "must be the runner of `model`, or empty")


def _member_names(pool: str, directory: Directory) -> list[str]:
    return [member.model for member in directory.pool(pool)]

"""Checks of operation actions that need no mesh."""

from types import MappingProxyType

from registry_svc.wire_values import check_options
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.load_parameters import API_KEY_ENV, REMOTE
from weft.kernel.models.model_source import ModelSource, ServerSource, UrlSource, asked_source, server_source
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.names import MODEL_NAME_WORDS, is_model_name
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


def source_of(action: operation_pb2.OperationAction) -> tuple[ModelSource | ServerSource, str] | None:
    """Returns the source in an action, and its field; None if it has none. Raises INVALID_ARGUMENT."""
    match action.WhichOneof("kind"):
        case "load_model" if action.load_model.source:
            text, field = action.load_model.source, "action.load_model.source"
            server = server_source(text, field)
            if server is not None:
                _check_attach(action.load_model)
                return server, field
        case "pull_model":
            text, field = action.pull_model.source, "action.pull_model.source"
        case _:
            return None
    source = asked_source(text, field)
    if isinstance(source, UrlSource) and source.shown != str(source):
        # The query may contain a credential, and operations are shown, logged and audited unchanged.
        raise invalid_field(
            field, "must not have a query in the URL, because operations are shown; use weft pull on that machine"
        )
    return source, field


def _check_attach(load: operation_pb2.LoadModel) -> None:
    """Raises INVALID_ARGUMENT for options that a load that attaches a server cannot have."""
    options, field = load.options, "action.load_model"
    if load.evict_model:
        raise invalid_field(f"{field}.evict_model", "must be empty: an attached server takes no memory of the mesh")
    parameters = options.parameters
    unknown = sorted(parameters.keys() - {API_KEY_ENV, REMOTE})
    if unknown:
        raise invalid_field(f"{field}.options.parameters.{unknown[0]}", f"is not {API_KEY_ENV} or {REMOTE}")
    if API_KEY_ENV in parameters and parameters[API_KEY_ENV].WhichOneof("kind") != "word":
        raise invalid_field(f"{field}.options.parameters.{API_KEY_ENV}", "must be the name of a variable")
    if REMOTE in parameters and parameters[REMOTE].WhichOneof("kind") != "flag":
        raise invalid_field(f"{field}.options.parameters.{REMOTE}", "must be true or false")
    for given, _ in options.ListFields():
        if given.name != "parameters":
            raise invalid_field(
                f"{field}.options.{given.name}", "cannot be set: weft does not load the models of external servers"
            )

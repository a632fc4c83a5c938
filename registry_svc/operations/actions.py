"""What an operation may be asked to do: every limit."""

import math
from dataclasses import dataclass

from google.protobuf import duration_pb2

from registry_svc.checks import require_at_most, require_count, require_range, require_text
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_TENANT_CHARS, require_name, require_token

MAX_ACTION_BYTES = 16 * 1024
MAX_PARAMETERS = 64
MAX_PARAMETER_CHARS = 64
MAX_WORD_CHARS = 256
MAX_REPLICAS = 1_024
MAX_TAG_CHARS = 64
# Ten years: more than that is a mistake in the unit.
MAX_KEEP_ALIVE_SECONDS = 10 * 365 * 86_400
_MAX_NANOS = 999_999_999

Scope = runner_service_pb2.FlushCacheRequest
_SCOPES = frozenset({Scope.SCOPE_ALL, Scope.SCOPE_MODEL, Scope.SCOPE_TENANT, Scope.SCOPE_TAG})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAction:
    """An action within all limits."""

    action: operation_pb2.OperationAction
    """Only ever read."""
    data: bytes
    """Its deterministic serialization: what is signed, kept and compared."""


def checked_action(action: operation_pb2.OperationAction) -> CheckedAction:
    """A valid action, on whatever names; raises INVALID_ARGUMENT naming the field."""
    if action.ByteSize() > MAX_ACTION_BYTES:
        raise invalid_field("action", f"must be at most {MAX_ACTION_BYTES} bytes")
    _require_known_fields(action)
    match action.WhichOneof("kind"):
        case "load_model":
            _check_load(action.load_model, "action.load_model")
        case "unload_model":
            require_name(action.unload_model.model, "action.unload_model.model")
        case "flush_cache":
            _check_flush(action.flush_cache, "action.flush_cache")
        case _:
            raise invalid_field("action", "must be load_model, unload_model or flush_cache")
    return CheckedAction(action=action, data=action.SerializeToString(deterministic=True))


def words_of(action: operation_pb2.OperationAction) -> str:
    """What an action is, for the log."""
    match action.WhichOneof("kind"):
        case "load_model":
            return f"load {action.load_model.model}"
        case "unload_model":
            return f"unload {action.unload_model.model}"
        case _:
            return "flush cache"


def _require_known_fields(action: operation_pb2.OperationAction) -> None:
    """What is signed must be all that is done, so a field that this release does not know is refused."""
    known = operation_pb2.OperationAction()
    known.CopyFrom(action)
    known.DiscardUnknownFields()
    if known.ByteSize() != action.ByteSize():
        raise invalid_field("action", "has a field that this release does not know")


def _check_load(load: operation_pb2.LoadModel, field: str) -> None:
    require_name(load.model, f"{field}.model")
    require_range(load.replicas, f"{field}.replicas", 0, MAX_REPLICAS)
    if load.evict_model:
        require_name(load.evict_model, f"{field}.evict_model")
        if load.evict_model == load.model:
            raise invalid_field(f"{field}.evict_model", "must not be what is to be loaded")
    _check_options(load.options, f"{field}.options")


def _check_options(options: load_pb2.LoadOptions, field: str) -> None:
    require_at_most(list(options.parameters), f"{field}.parameters", MAX_PARAMETERS)
    for name, value in options.parameters.items():
        if not name:
            raise invalid_field(f"{field}.parameters", "must have names")
        require_text(name, f"{field}.parameters", MAX_PARAMETER_CHARS)
        _check_value(value, f"{field}.parameters.{name}")
    if options.quantization:
        require_name(options.quantization, f"{field}.quantization")
    require_count(options.memory_budget_bytes, f"{field}.memory_budget_bytes")
    if options.HasField("keep_alive"):
        _check_keep_alive(options.keep_alive, f"{field}.keep_alive")


def _check_value(value: load_pb2.LoadValue, field: str) -> None:
    match value.WhichOneof("kind"):
        case None:
            raise invalid_field(field, "must be a whole number, a number, a word, or yes or no")
        case "number":
            if not math.isfinite(value.number):
                raise invalid_field(field, "must be a finite number")
        case "word":
            require_text(value.word, field, MAX_WORD_CHARS)


def _check_keep_alive(duration: duration_pb2.Duration, field: str) -> None:
    mixed = duration.seconds * duration.nanos < 0
    if mixed or abs(duration.seconds) > MAX_KEEP_ALIVE_SECONDS or abs(duration.nanos) > _MAX_NANOS:
        raise invalid_field(field, f"must be a duration of at most {MAX_KEEP_ALIVE_SECONDS} s, or a negative one")


def _check_flush(flush: operation_pb2.FlushCache, field: str) -> None:
    if flush.scope not in _SCOPES:
        raise invalid_field(f"{field}.scope", "must be all, model, tenant or tag")
    if flush.model:
        require_name(flush.model, f"{field}.model")
    elif flush.scope == Scope.SCOPE_MODEL:
        raise invalid_field(f"{field}.model", "must be set where scope is model")
    if flush.tenant:
        require_token(flush.tenant, f"{field}.tenant", MAX_TENANT_CHARS)
    elif flush.scope == Scope.SCOPE_TENANT:
        raise invalid_field(f"{field}.tenant", "must be set where scope is tenant")
    if flush.tag:
        require_text(flush.tag, f"{field}.tag", MAX_TAG_CHARS)
    elif flush.scope == Scope.SCOPE_TAG:
        raise invalid_field(f"{field}.tag", "must be set where scope is tag")
    _refuse_idle_fields(flush, field)
    if flush.runner:
        require_name(flush.runner, f"{field}.runner")


def _refuse_idle_fields(flush: operation_pb2.FlushCache, field: str) -> None:
    """A field that the scope passes over would let a caller believe that less is forgotten than is."""
    if flush.tenant and flush.scope not in {Scope.SCOPE_TENANT, Scope.SCOPE_TAG}:
        raise invalid_field(f"{field}.tenant", "must be empty unless scope is tenant or tag")
    if flush.tag and flush.scope != Scope.SCOPE_TAG:
        raise invalid_field(f"{field}.tag", "must be empty unless scope is tag")

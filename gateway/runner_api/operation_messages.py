"""Translation between bodies of the runner API and operations of the mesh. Pure."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from gateway.runner_api.capabilities import MEBIBYTE, megabytes
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS
from weft.kernel.reasons import Reason

MAX_MODEL_ID_CHARS = 256
MAX_TOKEN_CHARS = 16 * 1024
MAX_TAG_CHARS = 64
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._-]+$"

ModelId = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_ID_CHARS)]


def _token(value: object) -> object:
    """Either form of an operation token: one string, or the envelope as it is."""
    if not isinstance(value, str | dict):
        raise ValueError("must be a string or an object")  # noqa: TRY004 - pydantic turns only this into an error
    if isinstance(value, str) and len(value) > MAX_TOKEN_CHARS:
        raise ValueError(f"must be at most {MAX_TOKEN_CHARS} characters")
    return value


OperationToken = Annotated[Any, AfterValidator(_token)]
RequestId = Annotated[str, Field(pattern=REQUEST_ID_PATTERN, min_length=1, max_length=MAX_REQUEST_ID_CHARS)]


class _Body(BaseModel):
    model_config = ConfigDict(
        defer_build=True,
        strict=True,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=False,
    )

    verified_op_token: OperationToken | None = None
    """What governance asks for; see docs/governance.md."""
    request_id: RequestId | None = None
    """The same on every repeat of one call; the header Idempotency-Key does the same."""


class LoadBody(_Body):
    """POST /v1/models/load."""

    model_id: ModelId
    """A model of this runner, by its name in the mesh."""
    quantization: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """One of the model's declared variants."""
    max_context_length: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Context of one slot, in tokens."""
    gpu_memory_budget_mb: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        default=None, alias="gpuMemoryBudgetMB"
    )
    """The most accelerator memory it may take, in MiB."""
    evict_model: ModelId | None = None
    """A model of this runner that is unloaded first."""


class UnloadBody(_Body):
    """POST /v1/models/unload."""

    model_id: ModelId
    """A model of this runner, by its name in the mesh."""


class FlushBody(_Body):
    """POST /v1/cache/flush."""

    scope: Literal["all", "model", "tenant", "tag"]
    """What is forgotten."""
    model_id: ModelId | None = None
    """Only of this model; required for scope model."""
    tenant_id: Annotated[str, Field(min_length=1, max_length=MAX_TENANT_CHARS)] | None = None
    """Required for scope tenant."""
    tag: Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)] | None = None
    """Required for scope tag."""


NAME_PREFIX = "operations/"
CONTEXT_PARAMETER = "context_tokens"

_SCOPES = {
    "all": runner_service_pb2.FlushCacheRequest.SCOPE_ALL,
    "model": runner_service_pb2.FlushCacheRequest.SCOPE_MODEL,
    "tenant": runner_service_pb2.FlushCacheRequest.SCOPE_TENANT,
    "tag": runner_service_pb2.FlushCacheRequest.SCOPE_TAG,
}
_UNDER_WAY = {"load_model": "loading", "unload_model": "unloading", "flush_cache": "flushing"}
_State = operation_pb2.Operation
_NUMBERS = frozenset(reason.value for reason in Reason)


def load_action(body: LoadBody) -> operation_pb2.OperationAction:
    """Returns the action of a load."""
    action = operation_pb2.OperationAction()
    load = action.load_model
    load.model = body.model_id
    load.evict_model = body.evict_model or ""
    load.options.quantization = body.quantization or ""
    load.options.memory_budget_bytes = (body.gpu_memory_budget_mb or 0) * MEBIBYTE
    if body.max_context_length is not None:
        load.options.parameters[CONTEXT_PARAMETER].integer = body.max_context_length
    return action


def unload_action(body: UnloadBody) -> operation_pb2.OperationAction:
    """Returns the action of an unload."""
    return operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model=body.model_id))


def flush_action(body: FlushBody, runner: str) -> operation_pb2.OperationAction:
    """Returns the action of a flush of this runner's caches. Raises INVALID_ARGUMENT naming a missing field."""
    needed = {
        "model": ("modelId", body.model_id),
        "tenant": ("tenantId", body.tenant_id),
        "tag": ("tag", body.tag),
    }.get(body.scope)
    if needed is not None and needed[1] is None:
        raise invalid_field(needed[0], f"is required for scope {body.scope}")
    if body.tag is not None and body.scope != "tag":
        raise invalid_field("tag", "goes with scope tag")
    if body.tenant_id is not None and body.scope not in ("tenant", "tag"):
        raise invalid_field("tenantId", "goes with scope tenant or tag")
    flush = operation_pb2.FlushCache(
        scope=_SCOPES[body.scope],
        model=body.model_id or "",
        tenant=body.tenant_id or "",
        tag=body.tag or "",
        runner=runner,
    )
    return operation_pb2.OperationAction(flush_cache=flush)


def concerns(operation: operation_pb2.Operation, runner: str, models: frozenset[str]) -> bool:
    """Whether an operation is about this runner or one of its models."""
    match operation.action.WhichOneof("kind"):
        case "load_model":
            return operation.action.load_model.model in models
        case "unload_model":
            return operation.action.unload_model.model in models
        case "flush_cache":
            return operation.action.flush_cache.runner == runner
        case _:
            return False


def task_id(operation: operation_pb2.Operation) -> str:
    """Returns the operation's id in the API."""
    return operation.name.removeprefix(NAME_PREFIX)


def begun_body(operation: operation_pb2.Operation) -> dict[str, object]:
    """Returns the body of an accepted operation: its id and progress."""
    return {
        "taskId": task_id(operation),
        "status": _status(operation),
        "progress": _progress(operation),
        "eta": round(operation.eta.ToNanoseconds() / 1e9) if operation.HasField("eta") else None,
    }


def task_body(operation: operation_pb2.Operation) -> dict[str, object]:
    """Returns the body of an operation's status."""
    kind = operation.action.WhichOneof("kind") or ""
    if operation.state in (_State.STATE_FAILED, _State.STATE_CANCELLED):
        return {
            "taskId": task_id(operation),
            "status": "failed",
            "modelId": getattr(operation.action, kind).model if kind else "",
            "error": failure_of(operation),
            "code": failure_reason(operation).name.lower(),
        }
    if operation.state != _State.STATE_SUCCEEDED:
        return {**begun_body(operation), "stage": operation.stage or None}
    done: dict[str, object] = {"taskId": task_id(operation), "status": "completed"}
    if kind == "load_model":
        return done | _loaded(operation)
    return done | (unloaded_body(operation) if kind == "unload_model" else flushed_body(operation))


def unloaded_body(operation: operation_pb2.Operation) -> dict[str, object]:
    """Returns the body of a completed unload."""
    result = operation.result
    return {
        "modelId": operation.action.unload_model.model,
        "gpuMemoryFreedMB": megabytes(result.memory_freed_bytes),
        "kvCacheFlushed": result.cache_flushed,
    }


def flushed_body(operation: operation_pb2.Operation) -> dict[str, object]:
    """Returns the body of a completed flush. The freed memory is reusable by other prefixes, not by the device."""
    result = operation.result
    reusable = result.reusable_bytes if result.HasField("reusable_bytes") else None
    return {"flushed": True, "entriesRemoved": result.entry_count, "memoryFreedMB": megabytes(reusable)}


def failure_reason(operation: operation_pb2.Operation) -> Reason:
    """Returns the reason of a failed operation."""
    if operation.state == _State.STATE_CANCELLED:
        return Reason.CANCELLED
    return Reason(operation.reason) if int(operation.reason) in _NUMBERS else Reason.INTERNAL


def failure_of(operation: operation_pb2.Operation) -> str:
    """Returns the message of a failed operation."""
    if operation.state == _State.STATE_CANCELLED:
        return operation.detail or "it was cancelled"
    return operation.detail or failure_reason(operation).name.lower()


def _loaded(operation: operation_pb2.Operation) -> dict[str, object]:
    result = operation.result
    is_known = result.memory_measured or result.memory_bytes > 0
    return {
        "modelId": operation.action.load_model.model,
        "gpuMemoryUsedMB": megabytes(result.memory_bytes) if is_known else None,
        "loadTimeMs": result.load_time.ToMilliseconds() if result.HasField("load_time") else None,
    }


def _status(operation: operation_pb2.Operation) -> str:
    if operation.state == _State.STATE_SUCCEEDED:
        return "completed"
    if operation.state in (_State.STATE_FAILED, _State.STATE_CANCELLED):
        return "failed"
    return _UNDER_WAY.get(operation.action.WhichOneof("kind") or "", "running")


def _progress(operation: operation_pb2.Operation) -> float | None:
    if operation.state == _State.STATE_SUCCEEDED:
        return 1.0
    if operation.HasField("progress"):
        return round(operation.progress, 4)
    # The progress of a pending operation is 0; that of a running one may be unknown.
    return 0.0 if operation.state == _State.STATE_PENDING else None

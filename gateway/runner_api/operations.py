"""POST /v1/models/load, /v1/models/unload and /v1/cache/flush, and the status of these operations.

Bodies are translated to operations of the registry and back.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import encode_json
from gateway.answers.unary import json_response
from gateway.errors import DetailedError, EdgeError
from gateway.http.disconnect import WhileConnected
from gateway.intake.headers import stated_traceparent, timeout_seconds
from gateway.intake.json_guard import Model
from gateway.intake.query import begin_change, begin_read
from gateway.operations import (
    ENDED,
    MAX_AUTHORIZATION_CHARS,
    OPERATION_PREFIX,
    ended_operation,
    idempotency_key,
    read_body,
    requester,
)
from gateway.request_facts import facts_of, headers_of
from gateway.runner_api.capabilities import megabytes
from gateway.runner_api.state import RunnerApi, RunnerApiDeps
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.documents import operation_actions
from weft.documents.field_names import operation_field
from weft.documents.operation_actions import LoadSettings
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.model_source import HubSource, asked_source, is_source, reaches_anywhere
from weft.kernel.names import (
    MAX_NAME_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
    is_token,
    new_id,
    require_request_id,
)
from weft.kernel.principal import ANY_SOURCE
from weft.kernel.reasons import Reason
from weft.kernel.unknown_names import MODEL, unknown_name

MAX_MODEL_ID_CHARS = 256
MAX_TAG_CHARS = 64
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._-]+$"

ModelId = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_ID_CHARS)]


def _token(value: object) -> object:
    """An operation token in either form: one string, or the envelope as an object."""
    if not isinstance(value, str | dict):
        raise ValueError("must be a string or an object")  # noqa: TRY004 - pydantic turns only this into an error
    if isinstance(value, str) and len(value) > MAX_AUTHORIZATION_CHARS:
        raise ValueError(f"must be at most {MAX_AUTHORIZATION_CHARS} characters")
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
    """The authorization that governance requires; see docs/governance.md."""
    request_id: RequestId | None = None
    """The same on every retry of one call; the header Idempotency-Key does the same."""


class LoadBody(_Body):
    """POST /v1/models/load."""

    model_id: ModelId
    """A model of this runner, by its name in the mesh, its source or its path; or a source that it is to serve, such as
    an id of the Hugging Face hub."""
    quantization: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """One of the model's declared variants; of an id of the hub, one of its repository."""
    max_context_length: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Context of one slot, in tokens."""
    gpu_memory_budget_mb: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        default=None, alias="gpuMemoryBudgetMB"
    )
    """Maximum accelerator memory of the model, in MiB."""
    evict_model: ModelId | None = None
    """A model of this runner that is unloaded first."""


class UnloadBody(_Body):
    """POST /v1/models/unload."""

    model_id: ModelId
    """A model of this runner, by its name in the mesh, its source or its path."""


class FlushBody(_Body):
    """POST /v1/cache/flush."""

    scope: Literal["all", "model", "tenant", "tag"]
    """The prefixes to delete."""
    model_id: ModelId | None = None
    """Limits the flush to this model; required for scope model."""
    tenant_id: Annotated[str, Field(min_length=1, max_length=MAX_TENANT_CHARS)] | None = None
    """Required for scope tenant."""
    tag: Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)] | None = None
    """Required for scope tag."""


_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "name": "modelId",
        "model": "modelId",
        "tenant": "tenantId",
        "memoryBudgetMb": "gpuMemoryBudgetMB",
        "authorization": "verifiedOpToken",
        "source": "modelId",
    }
)
_UNDER_WAY = {
    "load_model": "loading",
    "unload_model": "unloading",
    "flush_cache": "flushing",
    "pull_model": "pulling",
    "remove_model": "removing",
}
_State = operation_pb2.Operation
_NUMBERS = frozenset(reason.value for reason in Reason)


def callers_field(field: str) -> str:
    """Returns the name of a registry field in the bodies of this API."""
    name = operation_field(field)
    return _FIELDS.get(name, name)


def load_action(body: LoadBody) -> operation_pb2.OperationAction:
    """Returns the action of a load."""
    return operation_actions.load_action(body.model_id, _settings(body), evict_model=body.evict_model or "")


def source_action(body: LoadBody, runner: str) -> operation_pb2.OperationAction:
    """Returns the action that has a runner serve and load what `modelId` names, which is a source.

    Raises INVALID_ARGUMENT naming the field.
    """
    source = asked_source(body.model_id, "modelId")
    text, settings = body.model_id, _settings(body)
    if body.quantization is not None:
        if not isinstance(source, HubSource) or source.wanted:
            raise invalid_field("quantization", "is taken with a plain id of the hub; the source has its own")
        text = str(asked_source(str(replace(source, wanted=body.quantization)), "quantization"))
        settings = settings.model_copy(update={"quantization": None})
    return operation_actions.load_action("", settings, evict_model=body.evict_model or "", source=text, runner=runner)


def _settings(body: LoadBody) -> LoadSettings:
    return LoadSettings.model_construct(
        context_tokens=body.max_context_length,
        quantization=body.quantization,
        memory_budget_mb=body.gpu_memory_budget_mb,
    )


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
        raise invalid_field("tag", "is only allowed with scope tag")
    if body.tenant_id is not None and body.scope not in ("tenant", "tag"):
        raise invalid_field("tenantId", "is only allowed with scope tenant or tag")
    return operation_actions.flush_action(
        body.scope, model=body.model_id or "", tenant=body.tenant_id or "", tag=body.tag or "", runner=runner
    )


def concerns(operation: operation_pb2.Operation, runner: str, models: frozenset[str]) -> bool:
    """Whether an operation concerns this runner or one of its models."""
    match operation.action.WhichOneof("kind"):
        case "load_model":
            load = operation.action.load_model
            # Until its runner is chosen, a load by source belongs to none.
            return runner in (operation.runner, load.runner) if load.source else load.model in models
        case "unload_model":
            return operation.action.unload_model.model in models
        case "flush_cache":
            return operation.action.flush_cache.runner == runner
        case _:
            return False


def task_id(operation: operation_pb2.Operation) -> str:
    """Returns the operation's id in the API."""
    return operation.name.removeprefix(OPERATION_PREFIX)


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
            "modelId": _model_of(operation),
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


def _model_of(operation: operation_pb2.Operation) -> str:
    """Returns the name of the model that an operation is about; of a source that is not served yet, the source."""
    kind = operation.action.WhichOneof("kind")
    if kind is None:
        return ""
    work = getattr(operation.action, kind)
    return str(operation.result.added.name or getattr(work, "source", "") or getattr(work, "model", ""))


def _loaded(operation: operation_pb2.Operation) -> dict[str, object]:
    result = operation.result
    is_known = result.memory_measured or result.memory_bytes > 0
    loaded: dict[str, object] = {
        "modelId": _model_of(operation),
        "gpuMemoryUsedMB": megabytes(result.memory_bytes) if is_known else None,
        "loadTimeMs": result.load_time.ToMilliseconds() if result.HasField("load_time") else None,
    }
    if result.HasField("added"):
        loaded["reasons"] = list(result.added.reasons)
    return loaded


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


SURFACE = "runner"
_SHOWN_CHARS = 128
_SUCCEEDED = operation_pb2.Operation.STATE_SUCCEEDED

Body = LoadBody | UnloadBody | FlushBody
Endpoint = Callable[[Request], Awaitable[Response]]
DoneBody = Callable[[operation_pb2.Operation], dict[str, object]]


async def load_model(deps: RunnerApi, request: Request) -> Response:
    """Begins to load a model, or to reload it with other options; 202 with the id of the operation."""
    body = await _body_of(request, deps, LoadBody)
    if body.evict_model is not None:
        found = _find_name(deps, body.evict_model)
        if found is None:
            raise invalid_field("evictModel", "must be a model of this runner")
        body = body.model_copy(update={"evict_model": found})
    operation = await _create(request, deps, body, _asked_action(request, deps, body))
    return json_response(begun_body(operation), 202)


def _asked_action(request: Request, deps: RunnerApiDeps, body: LoadBody) -> operation_pb2.OperationAction:
    """Returns the action of a load of a model of this runner, or of a source that it is to serve."""
    facts = deps.runner.facts()
    is_known = _find_name(deps, body.model_id) is not None
    if not is_known and facts.adds_models and is_source(body.model_id):
        if reaches_anywhere(asked_source(body.model_id, "modelId")):
            facts_of(request.scope).principal.require(ANY_SOURCE)
        return source_action(body, facts.name)
    return load_action(body.model_copy(update={"model_id": _name_of(deps, body.model_id)}))


async def unload_model(deps: RunnerApi, request: Request) -> Response:
    """Unloads a model; 200 when that is done, 202 with the id of the operation when it takes too long."""
    body = await _body_of(request, deps, UnloadBody)
    action = operation_actions.unload_action(_name_of(deps, body.model_id))
    return await _run(request, deps, body, action, unloaded_body)


async def flush_cache(deps: RunnerApi, request: Request) -> Response:
    """Deletes cached prefixes; 200 when that is done, 202 when it takes too long."""
    body = await _body_of(request, deps, FlushBody)
    action = flush_action(body, deps.runner.facts().name)
    if body.model_id is not None:
        named = body.model_copy(update={"model_id": _name_of(deps, body.model_id)})
        action = flush_action(named, deps.runner.facts().name)
    return await _run(request, deps, body, action, flushed_body)


async def get_task(deps: RunnerApi, request: Request) -> Response:
    """Returns the progress or the result of a load, unload or flush."""
    begin_read(request, SURFACE)
    return json_response(task_body(await _known(deps, request)))


async def cancel_task(deps: RunnerApi, request: Request) -> Response:
    """Cancels a load: what was loaded of it is unloaded. An operation that has ended stays as it is."""
    begin_change(request, SURFACE)
    known = await _known(deps, request)
    cancelled = await deps.operations.cancel(known.name, _requester(request, deps))
    return json_response(task_body(cancelled), 200 if cancelled.state in ENDED else 202)


async def _body_of(request: Request, deps: RunnerApiDeps, model: type[Model]) -> Model:
    return await read_body(request, deps.config.edge, model, SURFACE)


async def _create(
    request: Request, deps: RunnerApiDeps, body: Body, action: operation_pb2.OperationAction
) -> operation_pb2.Operation:
    wanted = operation_service_pb2.CreateOperationRequest(
        request_id=_request_id(request, body),
        action=action,
        requested_by=_requester(request, deps),
        authorization=_authorization(body),
    )
    try:
        return await deps.operations.create(wanted, stated_traceparent(request.scope))
    except WeftError as error:
        if error.reason is Reason.OPERATION_REFUSED:
            # Only the audit log has the reason.
            raise DetailedError(Reason.OPERATION_REFUSED, "refused", code="refused") from error
        raise


async def _run(
    request: Request,
    deps: RunnerApiDeps,
    body: Body,
    action: operation_pb2.OperationAction,
    done: DoneBody,
) -> Response:
    """Create an operation; answer its result, or 202 when it is still running at the request's deadline."""
    longest = timeout_seconds(headers_of(request.scope), deps.config.edge)
    operation = await _create(request, deps, body, action)
    # The operation continues when the caller disconnects.
    with WhileConnected(request.scope, request.receive):
        operation = await ended_operation(deps.operations, operation, longest)
    if operation.state == _SUCCEEDED:
        return json_response(done(operation))
    if operation.state in ENDED:
        raise _failure(operation)
    return json_response(begun_body(operation), 202)


async def _known(deps: RunnerApiDeps, request: Request) -> operation_pb2.Operation:
    task: str = request.path_params["task"]
    missing = WeftError(Reason.NOT_FOUND, "this runner has no task with this id")
    if not is_token(task, MAX_REQUEST_ID_CHARS):
        raise missing
    try:
        operation = await deps.operations.get(OPERATION_PREFIX + task)
    except WeftError as error:
        # No operation has a malformed id.
        if error.reason in (Reason.NOT_FOUND, Reason.INVALID_ARGUMENT):
            raise missing from error
        raise
    if not concerns(operation, deps.runner.facts().name, _models(deps)):
        raise missing
    return operation


def _models(deps: RunnerApiDeps) -> frozenset[str]:
    return frozenset(model.name for model in deps.runner.facts().models)


def _find_name(deps: RunnerApiDeps, model_id: str) -> str | None:
    """Returns the name in the mesh of a model that is called by it, by its source or by its path; None: it is not here.

    Of several with one source the first is meant: they are replicas.
    """
    if model_id in _models(deps):
        return model_id
    return next((model.name for model in deps.runner.facts().models if model_id in model.called), None)


def _name_of(deps: RunnerApiDeps, model_id: str) -> str:
    """As `_find_name`. Raises MODEL_NOT_FOUND."""
    found = _find_name(deps, model_id)
    if found is None:
        raise unknown_name(MODEL, model_id, _models(deps), field="modelId")
    return found


def _request_id(request: Request, body: Body) -> str:
    given = idempotency_key(request)
    if given is None:
        return body.request_id or new_id("req")
    key = require_request_id(given, "Idempotency-Key")
    if body.request_id is not None and body.request_id != key:
        raise invalid_field("requestId", "must be the same as the header Idempotency-Key, where both are given")
    return key


def _authorization(body: Body) -> str:
    token: str | dict[str, Any] | None = body.verified_op_token
    if token is None or isinstance(token, str):
        return token or ""
    text = encode_json(token).decode()
    if len(text) > MAX_AUTHORIZATION_CHARS:
        raise invalid_field("verifiedOpToken", f"must be at most {MAX_AUTHORIZATION_CHARS} characters")
    return text


def _requester(request: Request, deps: RunnerApiDeps) -> str:
    """Returns the caller's name for the audit log; without a key that of this API."""
    return requester(request, f"HTTP API of runner {deps.runner.facts().name}")


def _failure(operation: operation_pb2.Operation) -> WeftError:
    reason, words = failure_reason(operation), failure_of(operation)
    if reason is Reason.CANCELLED:
        return EdgeError(409, reason, words)
    return DetailedError(reason, words, details={"taskId": task_id(operation)})

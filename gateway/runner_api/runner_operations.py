"""POST /v1/models/load, /v1/models/unload and /v1/cache/flush, and their status, as operations of the registry."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.errors import DetailedError, EdgeError
from gateway.http.disconnect import WhileConnected
from gateway.intake.headers import timeout_seconds
from gateway.intake.json_guard import Model
from gateway.intake.query import begin_change, begin_read
from gateway.operation_client import (
    ENDED,
    MAX_AUTHORIZATION_CHARS,
    OPERATION_PREFIX,
    create_operation,
    ended_operation,
    idempotency_key,
    read_body,
    reason_of,
    requester,
)
from gateway.request_facts import headers_of
from gateway.runner_api.capabilities import megabytes
from gateway.runner_api.deps import RunnerApi, RunnerApiDeps
from gateway.runner_api.facts import RunnerFacts
from weft.api.operations.v1 import operation_pb2
from weft.documents import operation_actions
from weft.documents.field_names import operation_field
from weft.documents.load_values import require_loadable
from weft.documents.operation_actions import LoadSettings
from weft.kernel.errors.error_tree import WeftError, invalid_field, renaming_fields
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import HubSource, asked_source, is_source
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.names import (
    MAX_NAME_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
    is_token,
    new_id,
    require_request_id,
)
from weft.kernel.values.unknown_names import MODEL, unknown_name

SURFACE = "runner"
MAX_MODEL_ID_CHARS = 256
MAX_TAG_CHARS = 64
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._-]+$"

ModelId = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_ID_CHARS)]


def _token(value: object) -> object:
    """Validates an operation token: one string, or the envelope as an object."""
    if not isinstance(value, str | dict):
        raise ValueError("must be a string or an object")  # noqa: TRY004 - pydantic turns only this into an error
    if isinstance(value, str) and len(value) > MAX_AUTHORIZATION_CHARS:
        raise ValueError(f"must be at most {MAX_AUTHORIZATION_CHARS} characters")
    return value


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

    verified_op_token: Annotated[Any, AfterValidator(_token)] | None = None
    """The authorization that governance requires; see docs/security.md."""
    request_id: (
        Annotated[str, Field(pattern=REQUEST_ID_PATTERN, min_length=1, max_length=MAX_REQUEST_ID_CHARS)] | None
    ) = None
    """Idempotency key: the same on every retry of a call, like the header Idempotency-Key."""


class LoadBody(_Body):
    """POST /v1/models/load."""

    model_id: ModelId
    """A model of this runner, by name, source or path; or a new source to serve, such as a model id of the Hugging
    Face hub."""
    quantization: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """One of the model's declared variants; for a model id of the Hugging Face hub, one of its repository."""
    max_context_length: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Context of one slot, in tokens."""
    gpu_memory_budget_mb: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        default=None, alias="gpuMemoryBudgetMB"
    )
    """Maximum accelerator memory of the model, in MiB."""
    evict_model: ModelId | None = None
    """A model of this runner to unload first."""


class UnloadBody(_Body):
    """POST /v1/models/unload."""

    model_id: ModelId
    """A model of this runner, by name, source or path."""


class FlushBody(_Body):
    """POST /v1/cache/flush."""

    scope: Literal["all", "model", "tenant", "tag"]
    """Which prefixes are deleted."""
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
        "parameters.context_tokens": "maxContextLength",
        "authorization": "verifiedOpToken",
        "source": "modelId",
    }
)


def callers_field(field: str) -> str:
    """Returns the name of a registry field in this API."""
    name = operation_field(field)
    return _FIELDS.get(name, name)


def load_action(body: LoadBody, facts: RunnerFacts) -> operation_pb2.OperationAction:
    """Returns the action that loads a model of this runner, or a source for it to serve.

    Raises MODEL_NOT_FOUND, and INVALID_ARGUMENT naming the field.
    """
    evicted, quantization = "", body.quantization
    if body.evict_model is not None and not (evicted := facts.find(body.evict_model) or ""):
        raise invalid_field("evictModel", "must be a model of this runner")
    name, source = facts.find(body.model_id) or "", ""
    if not name and facts.adds_models and is_source(body.model_id):
        source, quantization = _source(body.model_id, quantization), None
    settings = LoadSettings.model_construct(
        context_tokens=body.max_context_length,
        quantization=quantization,
        memory_budget_mb=body.gpu_memory_budget_mb,
    )
    if source:
        return operation_actions.load_action("", settings, evict_model=evicted, source=source, runner=facts.name)
    return operation_actions.load_action(known_name(body.model_id, facts), settings, evict_model=evicted)


def _source(model_id: str, quantization: str | None) -> str:
    """Returns a source as text, with the requested variant of its repository."""
    source = asked_source(model_id, "modelId")
    if quantization is None:
        return model_id
    if not isinstance(source, HubSource) or source.wanted:
        raise invalid_field("quantization", "is taken with a plain id of the hub; the source has its own")
    return str(asked_source(str(replace(source, wanted=quantization)), "quantization"))


def flush_action(body: FlushBody, facts: RunnerFacts) -> operation_pb2.OperationAction:
    """Returns the action that flushes this runner's caches. Raises MODEL_NOT_FOUND, INVALID_ARGUMENT naming a field."""
    needed = {"model": ("modelId", body.model_id), "tenant": ("tenantId", body.tenant_id), "tag": ("tag", body.tag)}
    field, value = needed.get(body.scope, ("", ""))
    if value is None:
        raise invalid_field(field, f"is required for scope {body.scope}")
    if body.tag is not None and body.scope != "tag":
        raise invalid_field("tag", "is only allowed with scope tag")
    if body.tenant_id is not None and body.scope not in ("tenant", "tag"):
        raise invalid_field("tenantId", "is only allowed with scope tenant or tag")
    model = "" if body.model_id is None else known_name(body.model_id, facts)
    return operation_actions.flush_action(
        body.scope, model=model, tenant=body.tenant_id or "", tag=body.tag or "", runner=facts.name
    )


def known_name(model_id: str, facts: RunnerFacts) -> str:
    """Returns the mesh name of a model of this runner. Raises MODEL_NOT_FOUND."""
    found = facts.find(model_id)
    if found is None:
        raise unknown_name(MODEL, model_id, frozenset(model.name for model in facts.models), field="modelId")
    return found


def concerns(operation: operation_pb2.Operation, facts: RunnerFacts) -> bool:
    """Whether an operation concerns this runner or one of its models."""
    action = operation.action
    match action.WhichOneof("kind"):
        case "load_model" if action.load_model.source:
            # A load by source belongs to no runner until one is chosen.
            return facts.name in (operation.runner, action.load_model.runner)
        case "load_model" | "unload_model" as kind:
            return any(model.name == getattr(action, kind).model for model in facts.models)
        case "flush_cache":
            return action.flush_cache.runner == facts.name
        case _:
            return False


_State = operation_pb2.Operation
_UNDER_WAY = {"load_model": "loading", "unload_model": "unloading", "flush_cache": "flushing"}


def begun_body(operation: operation_pb2.Operation) -> dict[str, object]:
    """Returns the body of an accepted operation: its id and progress."""
    progress = round(operation.progress, 4) if operation.HasField("progress") else None
    if operation.state == _State.STATE_SUCCEEDED:
        status, progress = "completed", 1.0
    elif operation.state in ENDED:
        status = "failed"
    else:
        status = _UNDER_WAY[operation.action.WhichOneof("kind") or "load_model"]
        # The progress of a pending operation is 0; that of a running one may be unknown.
        if progress is None and operation.state == _State.STATE_PENDING:
            progress = 0.0
    eta = round(operation.eta.ToNanoseconds() / 1e9) if operation.HasField("eta") else None
    return {"taskId": _task_id(operation), "status": status, "progress": progress, "eta": eta}


def task_body(operation: operation_pb2.Operation) -> dict[str, object]:
    """Returns the body of an operation's status."""
    if operation.state not in ENDED:
        return {**begun_body(operation), "stage": operation.stage or None}
    if operation.state == _State.STATE_SUCCEEDED:
        return {"taskId": _task_id(operation), "status": "completed"} | result_body(operation)
    failure = failure_of(operation)
    return {
        "taskId": _task_id(operation),
        "status": "failed",
        "modelId": _model_of(operation),
        "error": failure.message,
        "code": failure.reason.name.lower(),
    }


def result_body(operation: operation_pb2.Operation) -> dict[str, object]:
    """Returns the body of a completed operation."""
    result = operation.result
    match operation.action.WhichOneof("kind"):
        case "unload_model":
            return {
                "modelId": _model_of(operation),
                "gpuMemoryFreedMB": megabytes(result.memory_freed_bytes),
                "kvCacheFlushed": result.cache_flushed,
            }
        case "load_model":
            is_known = result.memory_measured or result.memory_bytes > 0
            return {
                "modelId": _model_of(operation),
                "gpuMemoryUsedMB": megabytes(result.memory_bytes) if is_known else None,
                "loadTimeMs": result.load_time.ToMilliseconds() if result.HasField("load_time") else None,
                **({"reasons": list(result.added.reasons)} if result.HasField("added") else {}),
            }
        case _:
            # The freed memory is reused for other prefixes, and not returned to the device.
            freed = result.reusable_bytes if result.HasField("reusable_bytes") else None
            return {"flushed": True, "entriesRemoved": result.entry_count, "memoryFreedMB": megabytes(freed)}


def failure_of(operation: operation_pb2.Operation) -> WeftError:
    """Returns the error of an operation that failed or was cancelled."""
    reason = reason_of(operation)
    if reason is Reason.CANCELLED:
        return EdgeError(409, reason, operation.detail or "it was cancelled")
    return DetailedError(reason, operation.detail or reason.name.lower(), details={"taskId": _task_id(operation)})


def _task_id(operation: operation_pb2.Operation) -> str:
    return operation.name.removeprefix(OPERATION_PREFIX)


def _model_of(operation: operation_pb2.Operation) -> str:
    """Returns the name of an operation's model; the source if it is not served yet."""
    work = getattr(operation.action, operation.action.WhichOneof("kind") or "load_model")
    return str(operation.result.added.name or getattr(work, "source", "") or work.model)


async def load_model(deps: RunnerApi, request: Request) -> Response:
    """Starts to load a model, or to reload it with other options. Answers 202 with the id of the operation."""
    body = await _body_of(request, deps, LoadBody)
    action = load_action(body, deps.runner.facts())
    members = [one for one in deps.runner.facts().models if one.name == action.load_model.model]
    own = {one.name: one.state.model_file.quantization for one in members}
    options = action.load_model.options
    with renaming_fields(callers_field):
        require_loadable(options, [one.description for one in members], own)
    return json_response(begun_body(await _create(request, deps, body, action)), 202)


async def unload_model(deps: RunnerApi, request: Request) -> Response:
    """Unloads a model. Answers 200 when done, or 202 with the id of the operation if that takes too long."""
    body = await _body_of(request, deps, UnloadBody)
    return await _run(
        request, deps, body, operation_actions.unload_action(known_name(body.model_id, deps.runner.facts()))
    )


async def flush_cache(deps: RunnerApi, request: Request) -> Response:
    """Deletes cached prefixes. Answers 200 when done, or 202 with the id of the operation if that takes too long."""
    body = await _body_of(request, deps, FlushBody)
    return await _run(request, deps, body, flush_action(body, deps.runner.facts()))


async def get_task(deps: RunnerApi, request: Request) -> Response:
    """Returns the progress or the result of an operation."""
    begin_read(request, SURFACE)
    return json_response(task_body(await _known(deps, request)))


async def cancel_task(deps: RunnerApi, request: Request) -> Response:
    """Requests the cancellation of an operation. Models that it has loaded are unloaded."""
    begin_change(request, SURFACE)
    known = await _known(deps, request)
    cancelled = await deps.operations.cancel(known.name, requester(request, _keyless(deps)))
    return json_response(task_body(cancelled), 200 if cancelled.state in ENDED else 202)


async def _body_of(request: Request, deps: RunnerApiDeps, model: type[Model]) -> Model:
    return await read_body(request, deps.config.edge, model, SURFACE)


async def _create(
    request: Request, deps: RunnerApiDeps, body: _Body, action: operation_pb2.OperationAction
) -> operation_pb2.Operation:
    try:
        return await create_operation(
            request,
            deps.operations,
            action,
            request_id=_request_id(request, body),
            authorization=_authorization(body),
            keyless=_keyless(deps),
        )
    except WeftError as error:
        if error.reason is Reason.OPERATION_REFUSED:
            # The reason is only in the audit log.
            raise DetailedError(Reason.OPERATION_REFUSED, "refused", code="refused") from error
        raise


async def _run(request: Request, deps: RunnerApiDeps, body: _Body, action: operation_pb2.OperationAction) -> Response:
    """Creates an operation; returns its result, or 202 if it is still running at the request's deadline."""
    longest = timeout_seconds(headers_of(request.scope), deps.config.edge)
    operation = await _create(request, deps, body, action)
    # The operation continues when the caller disconnects.
    with WhileConnected(request.scope, request.receive):
        operation = await ended_operation(deps.operations, operation, longest)
    if operation.state == _State.STATE_SUCCEEDED:
        return json_response(result_body(operation))
    if operation.state in ENDED:
        raise failure_of(operation)
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
    if not concerns(operation, deps.runner.facts()):
        raise missing
    return operation


def _request_id(request: Request, body: _Body) -> str:
    given = idempotency_key(request)
    if given is None:
        return body.request_id or new_id("req")
    key = require_request_id(given, "Idempotency-Key")
    if body.request_id is not None and body.request_id != key:
        raise invalid_field("requestId", "must be the same as the header Idempotency-Key, where both are given")
    return key


def _authorization(body: _Body) -> str:
    token: str | dict[str, Any] | None = body.verified_op_token
    if token is None or isinstance(token, str):
        return token or ""
    text = encode_json(token).decode()
    if len(text) > MAX_AUTHORIZATION_CHARS:
        raise invalid_field("verifiedOpToken", f"must be at most {MAX_AUTHORIZATION_CHARS} characters")
    return text


def _keyless(deps: RunnerApiDeps) -> str:
    """Returns the audit log name of callers without a key."""
    return f"HTTP API of runner {deps.runner.facts().name}"

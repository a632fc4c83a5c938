"""POST /v1/models/load, /v1/models/unload and /v1/cache/flush, and the status of these operations."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from gateway.answers.sse import encode_json
from gateway.answers.unary import json_response
from gateway.errors import ClientGoneError, DetailedError, EdgeError
from gateway.http.disconnect import interrupt_on_disconnect
from gateway.intake.body import read_json_body
from gateway.intake.headers import headers_of, require_local_caller, timeout_seconds
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from gateway.runner_api import operation_messages as messages
from gateway.runner_api.deps import RunnerApiDeps
from gateway.runner_api.operation_messages import MAX_TOKEN_CHARS, FlushBody, LoadBody, UnloadBody
from gateway.runner_api.operations_client import ENDED
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.interrupt import Interruptible
from weft.kernel.names import MAX_REQUEST_ID_CHARS, is_token, new_id, require_request_id
from weft.kernel.principal import LOCAL
from weft.kernel.reasons import Reason

SURFACE = "runner"
_SHOWN_CHARS = 128
_SUCCEEDED = operation_pb2.Operation.STATE_SUCCEEDED

Model = TypeVar("Model", bound=BaseModel)
Body = LoadBody | UnloadBody | FlushBody
Endpoint = Callable[[Request], Awaitable[Response]]
DoneBody = Callable[[operation_pb2.Operation], dict[str, object]]


async def load_model(deps: RunnerApiDeps, request: Request) -> Response:
    """Begin to load a model, or load it again with other options; 202 with the id to ask for it by."""
    body = await _body_of(request, deps, LoadBody)
    _require_model(deps, body.model_id)
    if body.evict_model is not None and body.evict_model not in _models(deps):
        raise invalid_field("evictModel", "must be a model of this runner")
    operation = await _create(request, deps, body, messages.load_action(body))
    return json_response(messages.begun_body(operation), 202)


async def unload_model(deps: RunnerApiDeps, request: Request) -> Response:
    """Unload a model; 200 when that is done, 202 with the id to ask for it by when it takes too long."""
    body = await _body_of(request, deps, UnloadBody)
    _require_model(deps, body.model_id)
    return await _run(request, deps, body, messages.unload_action(body), messages.unloaded_body)


async def flush_cache(deps: RunnerApiDeps, request: Request) -> Response:
    """Forget cached prefixes; 200 when that is done, 202 when it takes too long."""
    body = await _body_of(request, deps, FlushBody)
    action = messages.flush_action(body, deps.runner.facts().name)
    if body.model_id is not None:
        _require_model(deps, body.model_id)
    return await _run(request, deps, body, action, messages.flushed_body)


async def get_task(deps: RunnerApiDeps, request: Request) -> Response:
    """How far a load, unload or flush is, or what came of it."""
    facts_of(request.scope).surface = SURFACE
    Query(request.scope)
    return json_response(messages.task_body(await _known(deps, request)))


async def cancel_task(deps: RunnerApiDeps, request: Request) -> Response:
    """Cancel a load: what was loaded of it is unloaded. One that is over stays as it is."""
    facts_of(request.scope).surface = SURFACE
    require_local_caller(request.scope)
    Query(request.scope)
    known = await _known(deps, request)
    cancelled = await deps.operations.cancel(known.name, _requester(request, deps))
    return json_response(messages.task_body(cancelled), 200 if cancelled.state in ENDED else 202)


async def _body_of(request: Request, deps: RunnerApiDeps, model: type[Model]) -> Model:
    facts_of(request.scope).surface = SURFACE
    require_local_caller(request.scope)
    Query(request.scope)
    edge = deps.config.edge
    raw = await read_json_body(request.scope, request.receive, edge)
    return parse(model, raw, max_depth=edge.limits.max_json_depth)


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
        return await deps.operations.create(wanted)
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
    operation = await _unless_gone(request.receive, deps.operations.wait(operation, longest))
    if operation.state == _SUCCEEDED:
        return json_response(done(operation))
    if operation.state in ENDED:
        raise _failure(operation)
    return json_response(messages.begun_body(operation), 202)


async def _unless_gone(receive: Receive, waiting: Awaitable[operation_pb2.Operation]) -> operation_pb2.Operation:
    """Awaits the operation until the caller disconnects; the operation continues in any case."""
    with Interruptible() as block:
        listener = asyncio.create_task(interrupt_on_disconnect(receive, block))
        try:
            return await waiting
        finally:
            listener.cancel()
    raise ClientGoneError  # pragma: no cover - the block returns or raises


async def _known(deps: RunnerApiDeps, request: Request) -> operation_pb2.Operation:
    task: str = request.path_params["task"]
    missing = WeftError(Reason.NOT_FOUND, "this runner knows no task of this id")
    if not is_token(task, MAX_REQUEST_ID_CHARS):
        raise missing
    try:
        operation = await deps.operations.get(messages.NAME_PREFIX + task)
    except WeftError as error:
        # A malformed id is one that no operation has.
        if error.reason in (Reason.NOT_FOUND, Reason.INVALID_ARGUMENT):
            raise missing from error
        raise
    if not messages.concerns(operation, deps.runner.facts().name, _models(deps)):
        raise missing
    return operation


def _models(deps: RunnerApiDeps) -> frozenset[str]:
    return frozenset(model.name for model in deps.runner.facts().models)


def _require_model(deps: RunnerApiDeps, name: str) -> None:
    if name not in _models(deps):
        raise WeftError(
            Reason.MODEL_NOT_FOUND, f"this runner has no model {name[:_SHOWN_CHARS]}", metadata={"field": "modelId"}
        )


def _request_id(request: Request, body: Body) -> str:
    given = headers_of(request.scope).get(b"idempotency-key")
    if given is None:
        return body.request_id or new_id("req")
    key = require_request_id(given.decode("latin-1"), "Idempotency-Key")
    if body.request_id is not None and body.request_id != key:
        raise invalid_field("requestId", "must be the same as the header Idempotency-Key, where both are given")
    return key


def _authorization(body: Body) -> str:
    token: str | dict[str, Any] | None = body.verified_op_token
    if token is None or isinstance(token, str):
        return token or ""
    text = encode_json(token).decode()
    if len(text) > MAX_TOKEN_CHARS:
        raise invalid_field("verifiedOpToken", f"must be at most {MAX_TOKEN_CHARS} characters")
    return text


def _requester(request: Request, deps: RunnerApiDeps) -> str:
    """Returns the caller's name for the audit log: its key, or this API where callers need none."""
    principal = facts_of(request.scope).principal
    return f"HTTP API of runner {deps.runner.facts().name}" if principal is LOCAL else principal.name


def _failure(operation: operation_pb2.Operation) -> WeftError:
    reason, words = messages.failure_reason(operation), messages.failure_of(operation)
    if reason is Reason.CANCELLED:
        return EdgeError(409, reason, words)
    return DetailedError(reason, words, details={"taskId": messages.task_id(operation)})

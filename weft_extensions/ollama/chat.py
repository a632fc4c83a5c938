"""POST /api/chat and /api/generate, which load or unload the model if they have no messages or prompt."""

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.answers.unary import JsonAnswer, UnaryAnswer
from gateway.deps import Gateway, GatewayDeps
from gateway.errors import OLLAMA_JSON
from gateway.intake.body import body_of
from gateway.intake.headers import require_local_caller
from gateway.operation_client import ENDED, OperationsClient, create_operation, ended_operation, reason_of
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.api.operations.v1 import operation_pb2
from weft.dispatch.agents import require_model_name
from weft.dispatch.fleet import FleetView, context_in
from weft.documents.operation_actions import LoadSettings, load_action, unload_action
from weft.kernel.access.principal import OPERATE
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.units import keep_alive_seconds
from weft_extensions.ollama.answers import JSON_LINES, OllamaAnswer, OllamaStream, Shape, text_json, timestamp
from weft_extensions.ollama.names import SURFACE, mesh_name
from weft_extensions.ollama.payload import is_raw, prompt_to_chat, to_chat, to_completion
from weft_extensions.ollama.schema import GeneratingRequest, OllamaChatRequest, OllamaGenerateRequest

Operations = Annotated[OperationsClient | None, collaborator("operations")]
"""Loads and unloads models; None: a request for it is refused."""
KEYLESS = "http:ollama"
"""Audit log name of callers without a key."""
_NAMES_OF_MODEL = frozenset({"name", "source"})
_SUCCEEDED = operation_pb2.Operation.STATE_SUCCEEDED


async def chat(
    deps: Gateway,
    operations: Operations,
    request: Request,
    params: Annotated[OllamaChatRequest, body_of(OllamaChatRequest)],
) -> Response:
    """Continues a conversation. Streams JSON lines unless `stream` is false. Without messages, it loads the model."""
    if not params.messages:
        return _changed_load(deps, operations, request, params, Shape.MESSAGE)
    name = mesh_name(deps.fleet.view, params.model)
    context = deps.context(request.scope, surface=SURFACE, params=params, model=name, operation=Operation.CHAT)
    media = deps.request_media(params)
    wanted = to_chat(params, deps.config.limits, media, context_tokens(deps.fleet.view, context.model))
    work = Work(deps, request.scope, context, wanted.payload, wanted.warnings, media)
    return _answered(work, params, Shape.MESSAGE)


async def generate(
    deps: Gateway,
    operations: Operations,
    request: Request,
    params: Annotated[OllamaGenerateRequest, body_of(OllamaGenerateRequest)],
) -> Response:
    """Answers a prompt, or with `raw` continues it without a template. Without a prompt, it loads the model."""
    if not (params.prompt or params.images or params.suffix):
        return _changed_load(deps, operations, request, params, Shape.RESPONSE)
    name = mesh_name(deps.fleet.view, params.model)
    operation = Operation.COMPLETION if is_raw(params) else Operation.CHAT
    context = deps.context(request.scope, surface=SURFACE, params=params, model=name, operation=operation)
    media = deps.request_media(params)
    tokens = context_tokens(deps.fleet.view, context.model)
    if is_raw(params):
        payload, warnings = to_completion(params, deps.config.limits, tokens)
        return _answered(Work(deps, request.scope, context, payload, warnings), params, Shape.RESPONSE)
    wanted = prompt_to_chat(params, deps.config.limits, media, tokens)
    work = Work(deps, request.scope, context, wanted.payload, wanted.warnings, media)
    return _answered(work, params, Shape.RESPONSE)


def context_tokens(view: FleetView, name: str) -> int:
    """Returns the smallest known context of the models behind a name; 0: unknown."""
    return context_in(view, *view.pool_members(name))


def _answered(work: Work, params: GeneratingRequest, shape: Shape) -> Response:
    identity = new_identity(work.deps.clock, "ollama", params.model)
    if params.is_streamed:
        return streamed(work, OllamaStream(identity, shape, logprobs=bool(params.logprobs)))
    return unary(work, OllamaAnswer(identity, shape))


def _changed_load(
    deps: GatewayDeps, operations: OperationsClient | None, request: Request, params: GeneratingRequest, shape: Shape
) -> Response:
    """Loads the model, or unloads it if `keep_alive` is 0, as an operation; answers when that has ended."""
    deps.note(request.scope, surface=SURFACE, model=params.model)
    asked = deps.asked(request.scope, mesh_name(deps.fleet.view, params.model))
    name = require_model_name(asked.model, "model")
    kept = None if params.keep_alive is None else keep_alive_seconds(params.keep_alive, "keep_alive")
    if operations is None:
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION, "this gateway does not support operations: send messages or a prompt"
        )
    require_local_caller(request.scope)
    facts_of(request.scope).principal.require_name(OPERATE, name)
    action = unload_action(name) if kept == 0 else load_action(name, LoadSettings(keep_alive=params.keep_alive))
    answer = {
        "model": params.model,
        "created_at": timestamp(int(deps.clock.utc_now().timestamp())),
        **text_json(shape, ""),
        "done": True,
        "done_reason": "unload" if kept == 0 else "load",
    }
    seconds = deps.config.request_timeout_seconds
    body, media_type = encode_json(answer), OLLAMA_JSON
    if params.is_streamed:
        body, media_type = body + b"\n", JSON_LINES

    async def produce() -> JsonAnswer:
        begun = await begin_operation(request, operations, action)
        require_success(await ended_operation(operations, begun, seconds, needs_registry=True))
        return JsonAnswer(body, [], media_type)

    return UnaryAnswer(produce, cut_off_seconds=seconds + deps.config.deadline_slack_seconds)


async def begin_operation(
    request: Request,
    operations: OperationsClient,
    action: operation_pb2.OperationAction,
    *,
    configured_source: bool = False,
) -> operation_pb2.Operation:
    """Creates an operation. Raises the registry's refusal, with the field name of Ollama's API."""
    try:
        return await create_operation(request, operations, action, keyless=KEYLESS, configured_source=configured_source)
    except WeftError as error:
        if error.metadata.get("field") in _NAMES_OF_MODEL:
            error.metadata["field"] = "model"
        raise


def require_success(operation: operation_pb2.Operation) -> None:
    """Raises the reason of a failed operation, DEADLINE_EXCEEDED for one that is still running."""
    if operation.state not in ENDED:
        raise WeftError(Reason.DEADLINE_EXCEEDED, f"it continues as {operation.name}; see /v1/admin/{operation.name}")
    if operation.state != _SUCCEEDED:
        raise WeftError(reason_of(operation), operation.detail or "the operation was cancelled")

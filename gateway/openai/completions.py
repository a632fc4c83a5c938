"""POST /v1/completions."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_fields import new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.config import RequestLimits
from gateway.deps import InferenceDeps
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.intake.request_model import TextsOrTokens
from gateway.openai.completion_answer import CompletionAnswer, CompletionStream
from gateway.openai.extension_fields import fill_extra, unknown_extensions
from gateway.openai.prompts import fill_prompts
from gateway.openai.sampling import (
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    fill_sampling,
    require_choices,
    require_stream_options_fit,
    wants_events,
    wants_usage,
)
from weft.api.common.v1 import completion_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.request import Operation


class CompletionRequest(GenerationRequest):
    """A text completion: raw text in, continuation out."""

    prompt: TextsOrTokens
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """Only as many as `n`: nothing is generated and thrown away."""


async def text_completions(deps: InferenceDeps, request: Request) -> Response:
    """Continue raw text, without a chat template."""
    scope = request.scope
    raw = await read_json_body(scope, request.receive, deps.config)
    params = parse(CompletionRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(
        scope, surface="completions", params=params, model=params.model, operation=Operation.COMPLETION
    )
    payload = to_payload(params, deps.config.limits)
    warnings = unknown_extensions(params.model_extra or {})
    identity = new_identity(deps.clock, "cmpl", params.model)
    count, logprobs = choice_count(payload), params.logprobs is not None
    if params.stream:
        encoder = CompletionStream(
            identity,
            choice_count=count,
            logprobs=logprobs,
            include_usage=wants_usage(params),
            include_events=wants_events(params),
        )
        return streamed(Work(deps, scope, context, payload, warnings), encoder)
    answer = CompletionAnswer(identity, choice_count=count, logprobs=logprobs)
    return unary(Work(deps, scope, context, payload, warnings), answer)


def to_payload(request: CompletionRequest, limits: RequestLimits) -> completion_pb2.CompletionPayload:
    """Returns the completion payload. Raises INVALID_ARGUMENT naming the wrong field."""
    require_stream_options_fit(request)
    payload = completion_pb2.CompletionPayload()
    fill_prompts(payload.prompts, request.prompt, "prompt", max_prompts=limits.max_prompts, allow_empty=True)
    fill_sampling(payload.sampling, request, request.max_tokens, limits)
    count = require_choices(request, limits)
    if count != 1:
        payload.choice_count = count
    if request.best_of is not None and request.best_of != count:
        raise invalid_field("best_of", "must equal 'n': every answer that is generated is returned")
    if request.logprobs is not None:
        payload.logprobs = request.logprobs
    payload.echo = bool(request.echo)
    if request.suffix is not None:
        payload.suffix = request.suffix
    fill_extra(payload.extra_parameters, request.model_extra or {})
    return payload


def choice_count(payload: completion_pb2.CompletionPayload) -> int:
    """Returns the number of choices, over all prompts."""
    return len(payload.prompts) * (payload.choice_count or 1)

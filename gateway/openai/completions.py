"""POST /v1/completions."""

from fastapi import FastAPI, Request, Response

from gateway.answers.chunks import new_identity
from gateway.answers.generation import Work, streamed, whole
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai import completion_payload
from gateway.openai.completion_answer import CompletionAnswer
from gateway.openai.completion_schema import CompletionRequest
from gateway.openai.completion_stream import CompletionStream
from gateway.openai.extension_fields import unknown_extensions
from gateway.openai.sampling import wants_events, wants_usage
from gateway.openapi import json_body
from gateway.parts import InferenceParts
from weft.kernel.request import Operation


def add_completions(app: FastAPI, parts: InferenceParts) -> None:
    """Add the route."""
    limits = parts.config.limits

    async def text_completions(request: Request) -> Response:
        """Continue raw text, without a chat template."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(CompletionRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(
            scope, surface="completions", asked=asked, model=asked.model, operation=Operation.COMPLETION
        )
        payload = completion_payload.to_payload(asked, limits)
        warnings = unknown_extensions(asked.model_extra or {})
        identity = new_identity(parts.clock, "cmpl", asked.model)
        count, logprobs = completion_payload.choice_count(payload), asked.logprobs is not None
        if asked.stream:
            encoder = CompletionStream(
                identity,
                choice_count=count,
                logprobs=logprobs,
                include_usage=wants_usage(asked),
                include_events=wants_events(asked),
            )
            return streamed(Work(parts, scope, context, payload, warnings), encoder)
        answer = CompletionAnswer(identity, choice_count=count, logprobs=logprobs)
        return whole(Work(parts, scope, context, payload, warnings), answer)

    app.add_api_route(
        "/v1/completions",
        text_completions,
        methods=["POST"],
        tags=["openai"],
        openapi_extra=json_body(CompletionRequest),
    )

"""POST /v1/chat/completions."""

from fastapi import FastAPI, Request, Response

from gateway.answers.chunks import new_identity
from gateway.answers.generation import Work, streamed, whole
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai import chat_payload
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.chat_stream import ChatStream
from gateway.openai.chat_tools import speaks_of_functions
from gateway.openai.sampling import wants_events, wants_usage
from gateway.openapi import json_body
from gateway.parts import InferenceParts
from weft.kernel.request import Operation


def add_chat(app: FastAPI, parts: InferenceParts) -> None:
    """Add the route."""
    limits = parts.config.limits

    async def chat_completions(request: Request) -> Response:
        """Continue a conversation, as one answer or as a stream of server-sent events."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(ChatRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(scope, surface="chat", asked=asked, model=asked.model, operation=Operation.CHAT)
        media = parts.request_media(asked)
        payload = chat_payload.to_payload(asked, limits, media)
        work = Work(parts, scope, context, payload, chat_payload.warnings_of(asked), media)
        identity = new_identity(parts.clock, "chatcmpl", asked.model)
        count, functions = payload.choice_count or 1, speaks_of_functions(asked)
        if asked.stream:
            encoder = ChatStream(
                identity,
                choice_count=count,
                logprobs=payload.logprobs,
                include_usage=wants_usage(asked),
                include_events=wants_events(asked),
                functions=functions,
            )
            return streamed(work, encoder)
        answer = ChatAnswer(identity, choice_count=count, logprobs=payload.logprobs, functions=functions)
        return whole(work, answer)

    app.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        tags=["openai"],
        openapi_extra=json_body(ChatRequest),
    )

"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from fastapi import FastAPI, Request, Response

from gateway.answers.chunks import new_identity
from gateway.answers.generation import Work, cut_off_seconds, streamed, whole
from gateway.answers.sse import encode_json, receipt_facts
from gateway.answers.unary import JsonAnswer, UnaryAnswer
from gateway.anthropic import payload
from gateway.anthropic.answer import MessagesAnswer
from gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.anthropic.stream import MessagesStream
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.media import supply
from gateway.openapi import json_body
from gateway.parts import InferenceParts
from gateway.request_facts import facts_of
from weft.api.common.v1 import tokenize_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.request import Operation

SURFACE = "messages"


def add_messages(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes. Any query string and any beta flag is accepted."""
    limits = parts.config.limits

    async def create_message(request: Request) -> Response:
        """Continue a conversation, as one message or as a stream of server-sent events."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(MessagesRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(scope, surface=SURFACE, asked=asked, model=asked.model, operation=Operation.CHAT)
        media = parts.request_media(asked)
        wanted = payload.to_payload(asked, limits, media)
        work = Work(parts, scope, context, wanted.payload, wanted.warnings, media)
        identity = new_identity(parts.clock, "msg", asked.model)
        if not asked.stream:
            return whole(work, MessagesAnswer(identity))
        return streamed(work, MessagesStream(identity, estimated_prompt_tokens(wanted.payload)))

    async def count_tokens(request: Request) -> Response:
        """How many tokens the model itself makes of a request; never an estimate."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(CountTokensRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(scope, surface=SURFACE, asked=asked, model=asked.model, operation=Operation.TOKENIZE)
        media = parts.request_media(asked)
        wanted = payload.to_countable(asked, limits, media)

        async def produce() -> JsonAnswer:
            await supply(wanted.payload, media, parts.media)
            facts_of(scope).was_dispatched = True
            call = parts.dispatcher.tokenize(context, tokenize_pb2.TokenizePayload(chat=wanted.payload))
            result = await call.result()
            told = [] if call.receipt is None else receipt_facts(call.receipt)
            return JsonAnswer(encode_json({"input_tokens": result.count}), told)

        return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(parts, context))

    for path, endpoint, schema in (
        ("/v1/messages", create_message, MessagesRequest),
        ("/v1/messages/count_tokens", count_tokens, CountTokensRequest),
    ):
        extra = json_body(schema, error="AnthropicError")
        app.add_api_route(path, endpoint, methods=["POST"], tags=["anthropic"], openapi_extra=extra)

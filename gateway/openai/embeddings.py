"""POST /v1/embeddings."""

from fastapi import FastAPI, Request, Response

from gateway.answers.generation import cut_off_seconds
from gateway.answers.sse import receipt_facts
from gateway.answers.unary import JsonAnswer, UnaryAnswer
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai import embedding_payload
from gateway.openai.embedding_schema import EmbeddingRequest
from gateway.openapi import json_body
from gateway.parts import InferenceParts
from gateway.request_facts import facts_of
from weft.api.common.v1 import receipt_pb2
from weft.kernel.request import Operation


def add_embeddings(app: FastAPI, parts: InferenceParts) -> None:
    """Add the route."""
    limits = parts.config.limits

    async def create_embeddings(request: Request) -> Response:
        """Turn texts into vectors."""
        scope = request.scope
        facts = facts_of(scope)
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(EmbeddingRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(
            scope, surface="embeddings", asked=asked, model=asked.model, operation=Operation.EMBEDDING
        )
        payload = embedding_payload.to_payload(asked, limits)

        async def produce() -> JsonAnswer:
            facts.was_dispatched = True
            call = parts.dispatcher.embed(context, payload)
            vectors = await call.result()
            receipt = call.receipt or receipt_pb2.Receipt()
            body = embedding_payload.to_body(
                vectors,
                expected=len(payload.inputs),
                model=receipt.model or asked.model,
                usage=receipt.usage,
                as_base64=asked.encoding_format == "base64",
                dimensions=asked.dimensions,
            )
            parts.metrics.tokens_used(facts, receipt.usage)
            return JsonAnswer(body, receipt_facts(receipt))

        return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(parts, context))

    app.add_api_route(
        "/v1/embeddings",
        create_embeddings,
        methods=["POST"],
        tags=["openai"],
        openapi_extra=json_body(EmbeddingRequest),
    )

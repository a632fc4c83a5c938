"""POST /v1/rerank and /rerank."""

from dataclasses import replace

from fastapi import FastAPI, Request, Response

from gateway.answers.chunks import new_identity
from gateway.answers.unary_call import answered
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai import rerank_payload
from gateway.openai.model_call_schemas import RerankRequest
from gateway.openapi import json_body
from gateway.parts import InferenceParts
from weft.api.common.v1 import receipt_pb2, rerank_pb2
from weft.kernel.request import Operation


def add_rerank(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes."""
    limits = parts.config.limits

    async def rerank_documents(request: Request) -> Response:
        """Say how well documents answer a query, the best first."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(RerankRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(scope, surface="rerank", asked=asked, model=asked.model, operation=Operation.RERANK)
        payload = rerank_payload.to_payload(asked)
        identity = new_identity(parts.clock, "rerank", asked.model)

        def to_body(scores: list[rerank_pb2.RerankScore], receipt: receipt_pb2.Receipt) -> bytes:
            answerer = replace(identity, model=receipt.model or asked.model)
            return rerank_payload.to_body(scores, asked, answerer, receipt.usage)

        return answered(parts, scope, context, lambda: parts.dispatcher.rerank(context, payload), to_body)

    for path in ("/v1/rerank", "/rerank"):
        app.add_api_route(
            path, rerank_documents, methods=["POST"], tags=["openai"], openapi_extra=json_body(RerankRequest)
        )

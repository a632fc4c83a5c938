"""POST /tokenize and /v1/tokenize."""

from fastapi import FastAPI, Request, Response

from gateway.answers.unary_call import answered
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai import token_payload
from gateway.openai.model_call_schemas import TokenizeRequest
from gateway.openapi import json_body
from gateway.parts import InferenceParts
from weft.api.common.v1 import receipt_pb2, tokenize_pb2
from weft.kernel.request import Operation


def add_tokenize(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes."""
    limits = parts.config.limits

    async def tokenize(request: Request) -> Response:
        """Count the tokens of a text or of a conversation, as the model that would answer reads them."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(TokenizeRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(scope, surface="tokenize", asked=asked, model=asked.model, operation=Operation.TOKENIZE)
        payload = token_payload.to_payload(asked, limits)

        def to_body(result: tokenize_pb2.TokenizeResult, receipt: receipt_pb2.Receipt) -> bytes:
            return token_payload.to_body(result, asked, receipt.model or asked.model)

        return answered(parts, scope, context, lambda: parts.dispatcher.tokenize(context, payload), to_body)

    for path in ("/tokenize", "/v1/tokenize"):
        app.add_api_route(path, tokenize, methods=["POST"], tags=["openai"], openapi_extra=json_body(TokenizeRequest))

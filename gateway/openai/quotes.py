"""POST /v1/quotes: when each place of the mesh would answer a chat request, without sending it."""

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Inference
from gateway.intake.body import body_of
from gateway.openai.chat import to_payload
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.extension_fields import unknown_fields
from gateway.routing import collaborator
from weft.api.router.v1.placement_service_pb2 import QuoteResponse
from weft.dispatch.quoter import Quoter
from weft.documents.codec import document_of
from weft.kernel.requests.request_values import Operation

Quotes = Annotated[Quoter, collaborator(Quoter)]


async def create_quotes(
    deps: Inference, quotes: Quotes, request: Request, params: Annotated[ChatRequest, body_of(ChatRequest)]
) -> Response:
    """Returns when each place would answer a chat request that arrives now, the soonest first.

    Nothing is sent to a model, and no place is reserved; `X-Max-Wait-Seconds` of the request itself makes it binding.
    """
    scope = request.scope
    context = deps.context(scope, surface="quotes", params=params, model=params.model, operation=Operation.CHAT)
    payload = to_payload(params, deps.config.limits, deps.request_media(params))
    document = document_of(QuoteResponse(quotes=await quotes.quote(context, payload)))
    return json_response(document, warnings=unknown_fields(params))

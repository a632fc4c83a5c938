"""POST /v1/rerank and /rerank."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import AnswerIdentity, new_identity
from gateway.answers.unary import unary_answer
from gateway.deps import Inference
from gateway.intake.body import body_of
from gateway.intake.request_model import MAX_INT32, HandledRequest, ModelName, StopAtFirstError, StrictModel
from gateway.openai.extension_fields import unknown_fields
from weft.api.common.v1 import receipt_pb2, rerank_pb2, usage_pb2
from weft.dispatch.operation_table import RERANK
from weft.dispatch.parameter_checks import MAX_DOCUMENTS
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json


class RerankDocument(StrictModel):
    """A document as an object, as some clients send it."""

    text: str = Field(min_length=1)


def _text_or_object(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~object" if isinstance(value, dict) else None


_TEXT_OR_OBJECT = Discriminator(
    _text_or_object, custom_error_type="wrong_shape", custom_error_message="must be a string or an object"
)


class RerankRequest(HandledRequest):
    """A request to rank documents by relevance to a query."""

    model: ModelName
    query: str = Field(min_length=1)
    documents: Annotated[
        list[
            Annotated[
                Annotated[str, Tag("~text"), Field(min_length=1)] | Annotated[RerankDocument, Tag("~object")],
                _TEXT_OR_OBJECT,
            ]
        ],
        Field(min_length=1, max_length=MAX_DOCUMENTS),
        StopAtFirstError(),
    ]
    top_n: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Number of documents in the answer, best first. Absent: all."""
    return_documents: bool | None = None
    """Whether the answer repeats each document. Absent: no."""


async def rerank_documents(
    deps: Inference, request: Request, params: Annotated[RerankRequest, body_of(RerankRequest)]
) -> Response:
    """Ranks documents by relevance to a query, best first."""
    scope = request.scope
    context = deps.context(scope, surface="rerank", params=params, model=params.model, operation=Operation.RERANK)
    payload = to_payload(params)
    identity = new_identity(deps.clock, "rerank", params.model)

    def to_body(scores: list[rerank_pb2.RerankScore], receipt: receipt_pb2.Receipt) -> bytes:
        answerer = replace(identity, model=receipt.model or params.model)
        return rerank_body(scores, params, answerer, receipt.usage)

    return unary_answer(deps, scope, RERANK, context, payload, to_body, warnings=unknown_fields(params))


def to_payload(request: RerankRequest) -> rerank_pb2.RerankPayload:
    """Returns the rerank payload."""
    payload = rerank_pb2.RerankPayload(query=request.query, documents=texts_of(request))
    if request.top_n is not None:
        payload.top_n = request.top_n
    return payload


def texts_of(request: RerankRequest) -> list[str]:
    """Returns the documents' texts, in order."""
    return [document if isinstance(document, str) else document.text for document in request.documents]


def rerank_body(
    scores: Sequence[rerank_pb2.RerankScore], request: RerankRequest, identity: AnswerIdentity, usage: usage_pb2.Usage
) -> bytes:
    """Returns the answer as JSON. Raises BACKEND_PROTOCOL_ERROR unless each document has one finite score.

    With `top_n`, fewer documents may have one.
    """
    indexes, count = {score.index for score in scores}, len(request.documents)
    expected = min(request.top_n or count, count)
    if not expected <= len(indexes) == len(scores) or not all(0 <= index < count for index in indexes):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model did not return one score per document")
    if not all(math.isfinite(score.score) for score in scores):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model returned a score that is not a number")
    texts = texts_of(request) if request.return_documents else None
    return encode_json(
        {
            "id": identity.answer_id,
            "object": "list",
            "model": identity.model,
            "results": [_result(score, texts) for score in scores],
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
        }
    )


def _result(score: rerank_pb2.RerankScore, texts: Sequence[str] | None) -> dict[str, object]:
    result: dict[str, object] = {"index": score.index, "relevance_score": score.score}
    if texts is not None:
        result["document"] = {"text": texts[score.index]}
    return result

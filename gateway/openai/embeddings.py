"""POST /v1/embeddings."""

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import unary_answer
from gateway.deps import Inference
from gateway.gateway_config import RequestLimits
from gateway.intake.body import body_of
from gateway.intake.request_model import HandledRequest, TextsOrTokens
from gateway.openai.completions import fill_prompts
from gateway.openai.extension_fields import unknown_fields
from weft.api.common.v1 import embedding_pb2, receipt_pb2, usage_pb2
from weft.dispatch.operation_table import EMBEDDING
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json


class EmbeddingRequest(HandledRequest):
    """A request for embeddings."""

    model: str
    """A model or pool of the mesh, `route/NAME`, or `auto`."""
    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    """base64: little-endian float32. Absent: float."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None


async def create_embeddings(
    deps: Inference, request: Request, params: Annotated[EmbeddingRequest, body_of(EmbeddingRequest)]
) -> Response:
    """Returns embeddings of texts."""
    scope = request.scope
    context = deps.context(
        scope, surface="embeddings", params=params, model=params.model, operation=Operation.EMBEDDING
    )
    payload = to_payload(params, deps.config.limits)

    def body_of(vectors: list[embedding_pb2.Embedding], receipt: receipt_pb2.Receipt) -> bytes:
        return to_body(
            vectors,
            expected=len(payload.inputs),
            model=receipt.model or params.model,
            usage=receipt.usage,
            as_base64=params.encoding_format == "base64",
            dimensions=params.dimensions,
        )

    return unary_answer(deps, scope, EMBEDDING, context, payload, body_of, warnings=unknown_fields(params))


def to_payload(request: EmbeddingRequest, limits: RequestLimits) -> embedding_pb2.EmbeddingPayload:
    """Returns the embedding payload. Raises INVALID_ARGUMENT naming the wrong field."""
    payload = embedding_pb2.EmbeddingPayload()
    fill_prompts(payload.inputs, request.input, "input", max_prompts=limits.max_embedding_inputs, allow_empty=False)
    if request.dimensions is not None:
        payload.dimensions = request.dimensions
    return payload


def to_body(
    embeddings: Sequence[embedding_pb2.Embedding],
    *,
    expected: int,
    model: str,
    usage: usage_pb2.Usage,
    as_base64: bool,
    dimensions: int | None = None,
) -> bytes:
    """Returns the answer as JSON. `dimensions`: the requested number; None: any.

    Raises BACKEND_PROTOCOL_ERROR unless there is one finite vector per input, INVALID_ARGUMENT if their length is not
    the requested one, since engines without the parameter ignore it.
    """
    ordered = _in_order(embeddings, expected, dimensions)
    render = _as_base64 if as_base64 else _as_floats
    return encode_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": embedding.index, "embedding": render(embedding)}
                for embedding in ordered
            ],
            "model": model,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
        }
    )


def ordered_vectors(
    embeddings: Sequence[embedding_pb2.Embedding], *, expected: int, dimensions: int | None = None
) -> list[list[float]]:
    """Returns the vector of each input. Raises as `to_body`."""
    return [_as_floats(embedding) for embedding in _in_order(embeddings, expected, dimensions)]


def _in_order(
    embeddings: Sequence[embedding_pb2.Embedding], expected: int, dimensions: int | None
) -> list[embedding_pb2.Embedding]:
    ordered = sorted(embeddings, key=lambda embedding: embedding.index)
    if [embedding.index for embedding in ordered] != list(range(expected)):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model did not return one vector per input")
    if dimensions is not None:
        _require_dimensions(ordered, dimensions)
    return ordered


def _require_dimensions(embeddings: Sequence[embedding_pb2.Embedding], wanted: int) -> None:
    for embedding in embeddings:
        if (found := len(embedding.values)) != wanted:
            raise invalid_field("dimensions", f"this model's vectors have {found}; omit it")


def _as_floats(embedding: embedding_pb2.Embedding) -> list[float]:
    values = list(embedding.values)
    _require_finite(values)
    return values


def _as_base64(embedding: embedding_pb2.Embedding) -> str:
    values = array("f", embedding.values)
    _require_finite(values)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def _require_finite(values: Sequence[float]) -> None:
    # One sum suffices: infinity and NaN survive every addition, and finite float32 values cannot overflow a double.
    if not values or not math.isfinite(sum(values)):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model returned an empty vector or one that is not finite")

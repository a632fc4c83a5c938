"""POST /api/embed and /api/embeddings."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import unary_answer
from gateway.deps import Gateway, GatewayDeps
from gateway.errors import OLLAMA_JSON
from gateway.intake.body import body_of
from gateway.openai.completions import fill_prompts
from gateway.openai.embeddings import ordered_vectors
from gateway.openai.extension_fields import unsupported
from weft.api.common.v1 import embedding_pb2, receipt_pb2, warning_pb2
from weft.dispatch.operation_table import EMBEDDING
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json
from weft_extensions.ollama.answers import measures
from weft_extensions.ollama.names import SURFACE, mesh_name
from weft_extensions.ollama.payload import request_warnings
from weft_extensions.ollama.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaRequest

# Above the rounding error of a unit vector's length in float32.
_UNIT_TOLERANCE = 1e-5
_MEASURES = ("total_duration", "load_duration", "prompt_eval_count")


async def embed(
    deps: Gateway, request: Request, params: Annotated[OllamaEmbedRequest, body_of(OllamaEmbedRequest)]
) -> Response:
    """Returns embeddings of texts, scaled to length 1."""
    payload = embedding_pb2.EmbeddingPayload()
    most = deps.config.limits.max_embedding_inputs
    fill_prompts(payload.inputs, params.input, "input", max_prompts=most, allow_empty=False)
    if params.dimensions is not None:
        payload.dimensions = params.dimensions
    warnings = _warnings_of(params)
    if params.truncate:
        warnings.append(unsupported("truncate", "input that is too long is refused, never truncated"))

    def body_of(vectors: list[list[float]], receipt: receipt_pb2.Receipt) -> dict[str, object]:
        known = measures(receipt, receipt.usage)
        return {
            "model": receipt.model or params.model,
            "embeddings": [_unit(vector) for vector in vectors],
            **{name: known[name] for name in _MEASURES if name in known},
        }

    return _embedded(deps, request, params, payload, warnings, body_of)


async def embed_one(
    deps: Gateway, request: Request, params: Annotated[OllamaEmbeddingsRequest, body_of(OllamaEmbeddingsRequest)]
) -> Response:
    """Returns the embedding of one text, unscaled (older endpoint)."""
    payload = embedding_pb2.EmbeddingPayload()
    fill_prompts(payload.inputs, params.prompt, "prompt", max_prompts=1, allow_empty=False)

    def body_of(vectors: list[list[float]], _receipt: receipt_pb2.Receipt) -> dict[str, object]:
        return {"embedding": vectors[0]}

    return _embedded(deps, request, params, payload, _warnings_of(params), body_of)


def _embedded(
    deps: GatewayDeps,
    request: Request,
    params: OllamaRequest,
    payload: embedding_pb2.EmbeddingPayload,
    warnings: Sequence[warning_pb2.Warning],
    body_of: Callable[[list[list[float]], receipt_pb2.Receipt], dict[str, object]],
) -> Response:
    name = mesh_name(deps.fleet.view, params.model)
    context = deps.context(request.scope, surface=SURFACE, params=params, model=name, operation=Operation.EMBEDDING)
    dimensions = payload.dimensions if payload.HasField("dimensions") else None

    def to_body(vectors: list[embedding_pb2.Embedding], receipt: receipt_pb2.Receipt) -> bytes:
        return encode_json(
            body_of(ordered_vectors(vectors, expected=len(payload.inputs), dimensions=dimensions), receipt)
        )

    return unary_answer(deps, request.scope, EMBEDDING, context, payload, to_body, OLLAMA_JSON, warnings=warnings)


def _warnings_of(params: OllamaRequest) -> list[warning_pb2.Warning]:
    """Returns warnings about fields that do not apply to embeddings."""
    found = request_warnings(params)
    options = params.options
    if options is not None:
        given = options.model_fields_set - {"num_ctx"}
        found += [unsupported(f"options.{name}", "does not apply to embeddings") for name in sorted(given)[:16]]
    return found


def _unit(vector: list[float]) -> list[float]:
    """Scales a vector to length 1, as Ollama does; returns unit and zero vectors unchanged."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    if not length or abs(length - 1.0) < _UNIT_TOLERANCE:
        return vector
    return [value / length for value in vector]

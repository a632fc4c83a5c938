"""Scores from an HTTP server: `/v1/rerank` as llama.cpp and vLLM have it, after Jina's and Cohere's."""

import math

import msgspec

from runner_svc.backend.port import CallInfo, RerankResult
from runner_svc.openai_upstream.client import RERANK, OpenAiHttp
from runner_svc.openai_upstream.errors import read_json
from runner_svc.openai_upstream.request import Json, add_cache_use
from runner_svc.openai_upstream.stream import Count, Place
from weft.api.common.v1 import rerank_pb2, usage_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_RERANK_BODY_BYTES = 64 * 1024 * 1024
"""Some servers repeat the documents."""


class _Score(msgspec.Struct):
    index: Place
    relevance_score: float


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    total_tokens: Count = 0


class _Reply(msgspec.Struct):
    results: list[_Score]
    usage: _Usage = msgspec.field(default_factory=_Usage)


async def rerank(http: OpenAiHttp, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
    """See Reranks.rerank."""
    body: Json = {"query": payload.query, "documents": list(payload.documents)}
    if http.endpoint.model:
        body["model"] = http.endpoint.model
    if payload.HasField("top_n"):
        body["top_n"] = payload.top_n
    add_cache_use(body, call.cache, has_slots=False)
    raw = await http.post(RERANK, body, call, MAX_RERANK_BODY_BYTES)
    reply = read_json(raw, _Reply, "the backend's scores are")
    return RerankResult(
        scores=_best_first(reply.results, payload),
        # vLLM names the sum alone, and there is nothing else in it.
        usage=usage_pb2.Usage(prompt_tokens=reply.usage.prompt_tokens or reply.usage.total_tokens),
    )


def _best_first(found: list[_Score], payload: rerank_pb2.RerankPayload) -> list[rerank_pb2.RerankScore]:
    count = len(payload.documents)
    wanted = min(payload.top_n, count) if payload.HasField("top_n") else count
    places = {score.index for score in found}
    if len(places) != len(found) or not all(place < count for place in places) or len(found) < wanted:
        message = f"the backend sent scores of {len(places)} documents for {wanted} of {count}"
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)
    if not all(math.isfinite(score.relevance_score) for score in found):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the backend sent a score that is no number")
    found.sort(key=lambda score: (-score.relevance_score, score.index))
    return [rerank_pb2.RerankScore(index=score.index, score=score.relevance_score) for score in found[:wanted]]

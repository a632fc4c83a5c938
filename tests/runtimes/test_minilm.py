"""Embeddings and reranking of a real encoder, all-MiniLM-L6-v2, on llama.cpp's server through a whole mesh."""

import math
from collections.abc import Iterator, Sequence

import httpx2
import pytest
from mesh_process import running_mesh, write_config
from native_builds import built_minilm

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]

DIMENSIONS = 384
"""`hidden_size` of the model's config.json."""
CONTEXT_TOKENS = 512
"""`max_position_embeddings` of it."""
SLOTS = 2


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("minilm")
    served = {"path": str(built_minilm()), "context_tokens": SLOTS * CONTEXT_TOKENS, "slots": SLOTS}
    models = [
        {"name": "minilm", **served, "embeddings": True},
        {"name": "ranker", **served, "extra_arguments": ["--reranking"]},
    ]
    config = write_config(folder, {"name": "box", "models": models})
    with (
        running_mesh(folder / "home", "--config", str(config)) as mesh,
        httpx2.Client(base_url=mesh.url, timeout=60) as client,
    ):
        yield client


def _vectors(http: httpx2.Client, *texts: str) -> list[list[float]]:
    answer = http.post("/v1/embeddings", json={"model": "minilm", "input": list(texts)})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > len(texts)
    return [item["embedding"] for item in answer.json()["data"]]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


def test_vectors_of_similar_texts_are_closer_than_others(http: httpx2.Client) -> None:
    cat, kitten, stocks = _vectors(http, "The cat sleeps.", "A kitten is asleep.", "Stock prices fell on Monday.")
    assert len(cat) == len(kitten) == len(stocks) == DIMENSIONS
    assert _cosine(cat, kitten) > 0.5
    assert _cosine(cat, stocks) < 0.2


def test_vector_does_not_depend_on_other_inputs(http: httpx2.Client) -> None:
    (alone,) = _vectors(http, "The cat sleeps.")
    beside = _vectors(http, "Stock prices fell on Monday.", "The cat sleeps.")[1]
    assert _cosine(alone, beside) > 0.999


def test_text_longer_than_the_context_is_rejected_by_its_length(http: httpx2.Client) -> None:
    answer = http.post("/v1/embeddings", json={"model": "minilm", "input": ["cat " * (CONTEXT_TOKENS + 100)]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_documents_are_ranked_by_descending_score_each_once(http: httpx2.Client) -> None:
    """The order alone: this model is no cross-encoder, so its scores mean nothing."""
    documents = ["a kitten", "stock prices", "the sea"]
    body = {"model": "ranker", "query": "cats", "documents": documents}
    answer = http.post("/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    scores = [result["relevance_score"] for result in answer.json()["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in answer.json()["results"]) == [0, 1, 2]
    best = http.post("/v1/rerank", json={**body, "top_n": 1}).json()["results"]
    assert [result["index"] for result in best] == [answer.json()["results"][0]["index"]]


def test_model_without_rerank_is_not_sent_rerank_requests(http: httpx2.Client) -> None:
    answer = http.post("/v1/rerank", json={"model": "minilm", "query": "cats", "documents": ["a kitten"]})
    assert answer.status_code == 501, answer.text
    assert answer.json()["error"]["code"] == "unsupported_operation"

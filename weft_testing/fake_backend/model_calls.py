"""Answers to calls other than generations and media: embeddings, tokens, scores."""

import hashlib
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.requests import RequestError, bad_request, parse_chat, prompt_list, words
from weft_testing.fake_backend.slots import Token

EMBEDDING_SIZE = 32


def embeddings_body(body: Any, alias: str, slot_context_tokens: int) -> tuple[bytes, int]:
    """Returns the answer to a /v1/embeddings body, and its prompt tokens. Raises RequestError."""
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    inputs = prompt_list(body.get("input"), "input")
    if not all(inputs):
        raise bad_request("Input content cannot be empty")
    tokens = sum(map(len, inputs))
    if (longest := max(map(len, inputs))) > slot_context_tokens:
        raise too_long(longest, slot_context_tokens)
    answer = {
        "model": str(body.get("model") or alias),
        "object": "list",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "data": [
            {"object": "embedding", "index": index, "embedding": vector(tokens)} for index, tokens in enumerate(inputs)
        ],
    }
    return shapes.encode(answer), tokens


def too_long(prompt_tokens: int, slot_context_tokens: int) -> RequestError:
    """Returns the error for a prompt that does not fit a slot."""
    return RequestError(
        400,
        "exceed_context_size_error",
        f"request ({prompt_tokens} tokens) exceeds the available context size ({slot_context_tokens} tokens), "
        "try increasing it",
        {"n_prompt_tokens": prompt_tokens, "n_ctx": slot_context_tokens},
    )


def vector(tokens: Sequence[Token]) -> list[float]:
    """Returns the normalized sum of one pseudo-random vector per token, in single precision."""
    sums = [0.0] * EMBEDDING_SIZE
    for token in tokens:
        digest = hashlib.blake2b(str(token).strip().encode(), digest_size=EMBEDDING_SIZE).digest()
        sums = [total + byte - 127.5 for total, byte in zip(sums, digest, strict=True)]
    length = math.sqrt(sum(value * value for value in sums)) or 1.0
    singles = struct.Struct(f"<{EMBEDDING_SIZE}f")
    return list(singles.unpack(singles.pack(*(value / length for value in sums))))


MAX_DOCUMENTS = 1024
_SPECIAL = re.compile(r"(<\|\w+\|>)")


def template_body(body: Any, alias: str) -> bytes:
    """Returns the answer to /apply-template: the prompt with the tokens of `parse_chat`. Raises RequestError."""
    return shapes.encode({"prompt": "".join(map(str, parse_chat(body, alias).prompts[0]))})


def tokens_body(body: Any, settings: ServerSettings) -> bytes:
    """Returns the answer to /tokenize, in llama-server's format or vLLM's. Raises RequestError."""
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    if settings.speaks_vllm:
        return _vllm_tokens(body, settings)
    pieces = _pieces(str(body.get("content", "")))
    tokens: list[Any] = [shapes.token_id(piece) for piece in pieces]
    if body.get("with_pieces") is True:
        tokens = [{"id": number, "piece": piece} for number, piece in zip(tokens, pieces, strict=True)]
    return shapes.encode({"tokens": tokens})


def _vllm_tokens(body: Mapping[str, Any], settings: ServerSettings) -> bytes:
    if "messages" in body:
        pieces = [str(token) for token in parse_chat(body, settings.alias).prompts[0]]
    elif isinstance(body.get("prompt"), str):
        pieces = _pieces(body["prompt"])
    else:
        raise bad_request("either prompt or messages must be set")
    answer: dict[str, Any] = {
        "count": len(pieces),
        "max_model_len": settings.slot_context_tokens,
        "tokens": [shapes.token_id(piece) for piece in pieces],
        "token_strs": pieces if body.get("return_token_strs") is True else None,
    }
    return shapes.encode(answer)


def _pieces(text: str) -> list[str]:
    """Returns the tokens of a text that may contain special tokens."""
    return [word for part in _SPECIAL.split(text) for word in ([part] if _SPECIAL.fullmatch(part) else words(part))]


def rerank_body(body: Any, settings: ServerSettings) -> tuple[bytes, int]:
    """Returns the answer to /v1/rerank and its prompt tokens: a score is the share of query words in the document."""
    if not settings.reranking:
        message = "This server does not support reranking. Start it with `--reranking`"
        raise RequestError(501, "not_supported_error", message)
    if not isinstance(body, dict) or not isinstance(body.get("query"), str):
        raise bad_request('"query" must be provided')
    documents = body.get("documents")
    if not isinstance(documents, list) or not documents or not all(isinstance(one, str) for one in documents):
        raise bad_request('"documents" must be a non-empty string array')
    query = {word.strip().lower() for word in words(body["query"])}
    scores = [_score(query, document) for document in documents[:MAX_DOCUMENTS]]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.get("top_n") or len(scores)]
    tokens = sum(len(words(body["query"])) + len(words(document)) for document in documents)
    answer = {
        "model": str(body.get("model") or settings.alias),
        "object": "list",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": [{"index": index, "relevance_score": scores[index]} for index in best],
    }
    return shapes.encode(answer), tokens


def _score(query: set[str], document: str) -> float:
    found = {word.strip().lower() for word in words(document)}
    return round(10.0 * len(query & found) / max(1, len(query)) - 5.0, 3)

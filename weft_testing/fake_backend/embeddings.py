"""Deterministic vectors: the same text always has the same one, texts that share words have similar ones."""

import base64
import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.requests import RequestError, bad_request, prompt_list
from weft_testing.fake_backend.slots import Token

EMBEDDING_SIZE = 32


def embeddings_body(body: Any, alias: str, slot_context_tokens: int) -> tuple[bytes, int]:
    """The answer to a /v1/embeddings body, and its prompt tokens. Raises RequestError."""
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    encoding = body.get("encoding_format", "float")
    if encoding not in {"float", "base64"}:
        raise bad_request("The format to return the embeddings in. Can be either float or base64")
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
        "data": [_entry(index, vector(tokens), encoding) for index, tokens in enumerate(inputs)],
    }
    return shapes.encode(answer), tokens


def too_long(prompt_tokens: int, slot_context_tokens: int) -> RequestError:
    """The prompt does not fit a slot."""
    return RequestError(
        400,
        "exceed_context_size_error",
        f"request ({prompt_tokens} tokens) exceeds the available context size ({slot_context_tokens} tokens), "
        "try increasing it",
        {"n_prompt_tokens": prompt_tokens, "n_ctx": slot_context_tokens},
    )


def vector(tokens: Sequence[Token]) -> list[float]:
    """Sum of one pseudo-random vector per token, of length 1, in single precision."""
    sums = [0.0] * EMBEDDING_SIZE
    for token in tokens:
        digest = hashlib.blake2b(str(token).strip().encode(), digest_size=EMBEDDING_SIZE).digest()
        sums = [total + byte - 127.5 for total, byte in zip(sums, digest, strict=True)]
    length = math.sqrt(sum(value * value for value in sums)) or 1.0
    return list(struct.unpack(f"<{EMBEDDING_SIZE}f", _packed([value / length for value in sums])))


def _packed(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _entry(index: int, values: list[float], encoding: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"object": "embedding", "index": index, "embedding": values}
    if encoding == "base64":
        entry["embedding"] = base64.b64encode(_packed(values)).decode()
        entry["encoding_format"] = "base64"
    return entry

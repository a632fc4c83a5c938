"""What the fake answers beside text and vectors: tokens and scores; images and sound where it is told to offer them."""

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.requests import RequestError, bad_request, parse_chat, words

MAX_DOCUMENTS = 1024
MAX_IMAGES = 10
WAVE_HEAD = (
    b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00\x40\x1f\x00\x00\x80\x3e\x00\x00\x02\x00\x10\x00data"
)
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
"""One pixel."""
_SPECIAL = re.compile(r"(<\|\w+\|>)")


def template_body(body: Any, alias: str) -> bytes:
    """The answer to /apply-template: the prompt whose tokens `parse_chat` makes. Raises RequestError."""
    return shapes.encode({"prompt": "".join(map(str, parse_chat(body, alias).prompts[0]))})


def tokens_body(body: Any, settings: ServerSettings) -> bytes:
    """The answer to /tokenize, in llama-server's words, or in vLLM's. Raises RequestError."""
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
    """The tokens of a text in which words for special tokens may stand."""
    return [word for part in _SPECIAL.split(text) for word in ([part] if _SPECIAL.fullmatch(part) else words(part))]


def rerank_body(body: Any, settings: ServerSettings) -> tuple[bytes, int]:
    """The answer to /v1/rerank and its prompt tokens: the more words of the query a document has, the better."""
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


def require_offered(settings: ServerSettings, what: str) -> None:
    """Raises RequestError 501 unless the fake was started with `--offers` and that word."""
    if what not in settings.offers:
        raise RequestError(501, "not_supported_error", f"This server offers no {what}")


def images_body(fields: Mapping[str, Any]) -> bytes:
    """The answer to /v1/images/*: as many images as asked for, each of one pixel. Raises RequestError."""
    if not isinstance(fields.get("prompt"), str) or not fields["prompt"]:
        raise bad_request("'prompt' is required")
    count = int(fields.get("n") or 1)
    if not 1 <= count <= MAX_IMAGES:
        raise bad_request(f"'n' must be 1 to {MAX_IMAGES}")
    if fields.get("response_format", "b64_json") != "b64_json":
        raise bad_request("'response_format' must be b64_json")
    image = {"b64_json": base64.b64encode(PNG).decode(), "revised_prompt": f"a pixel of {fields['prompt']}"}
    usage = {"input_tokens": len(words(fields["prompt"])), "output_tokens": count, "total_tokens": 0}
    return shapes.encode({"created": 0, "data": [image] * count, "usage": usage})


def transcription_body(fields: Mapping[str, Any], recording: bytes, *, translates: bool) -> bytes:
    """The answer to /v1/audio/transcriptions and translations: how long the recording is, in words."""
    text = f"{len(recording)} bytes {'in English' if translates else 'of sound'}"
    if fields.get("response_format", "json") == "json":
        return shapes.encode({"text": text})
    language = str(fields.get("language") or "en")
    pieces = words(text)
    segments = [
        {"id": index, "start": float(index), "end": index + 1.0, "text": piece} for index, piece in enumerate(pieces)
    ]
    answer = {"task": "transcribe", "language": language, "duration": float(len(pieces)), "text": text}
    return shapes.encode({**answer, "segments": segments})


def spoken(fields: Mapping[str, Any]) -> Sequence[bytes]:
    """The pieces of a recording of `input`: a head, then one piece per word. Raises RequestError."""
    if not isinstance(fields.get("input"), str) or not isinstance(fields.get("voice"), str):
        raise bad_request("'input' and 'voice' are required")
    return [WAVE_HEAD, *(zlib.crc32(word.encode()).to_bytes(4, "little") for word in words(fields["input"]))]

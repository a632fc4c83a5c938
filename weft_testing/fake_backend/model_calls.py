"""Answers of calls other than generations: embeddings, tokens, scores; images and audio where enabled."""

import asyncio
import base64
import hashlib
import math
import re
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import BodyPartReader, web

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.behaviour import Control
from weft_testing.fake_backend.requests import RequestError, bad_request, parse_chat, prompt_list, words
from weft_testing.fake_backend.sinks import json_response
from weft_testing.fake_backend.slots import Token

EMBEDDING_SIZE = 32


def embeddings_body(body: Any, alias: str, slot_context_tokens: int) -> tuple[bytes, int]:
    """Returns the answer to a /v1/embeddings body, and its prompt tokens. Raises RequestError."""
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
    return list(struct.unpack(f"<{EMBEDDING_SIZE}f", _packed([value / length for value in sums])))


def _packed(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _entry(index: int, values: list[float], encoding: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"object": "embedding", "index": index, "embedding": values}
    if encoding == "base64":
        entry["embedding"] = base64.b64encode(_packed(values)).decode()
        entry["encoding_format"] = "base64"
    return entry


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
    """The answer to /v1/audio/transcriptions and translations: the length of the recording as text."""
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
    """Returns the chunks of a recording of `input`: a header, then one chunk per word. Raises RequestError."""
    if not isinstance(fields.get("input"), str) or not isinstance(fields.get("voice"), str):
        raise bad_request("'input' and 'voice' are required")
    return [WAVE_HEAD, *(zlib.crc32(word.encode()).to_bytes(4, "little") for word in words(fields["input"]))]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MediaRoutes:
    """Routes of images, transcriptions and speech, with deterministic answers."""

    def __init__(self, settings: ServerSettings, control: Control) -> None:
        self._settings = settings
        self._control = control

    def add(self, app: web.Application, guarded: Callable[[Handler], Handler]) -> None:
        """Adds the routes; `guarded` turns a RequestError into its answer."""
        app.router.add_post("/v1/images/generations", guarded(self._images))
        app.router.add_post("/v1/images/edits", guarded(self._edits))
        app.router.add_post("/v1/audio/transcriptions", guarded(self._transcription))
        app.router.add_post("/v1/audio/translations", guarded(self._translation))
        app.router.add_post("/v1/audio/speech", guarded(self._speech))

    async def _images(self, http: web.Request) -> web.StreamResponse:
        require_offered(self._settings, "image")
        return json_response(images_body(await _json(http)))

    async def _edits(self, http: web.Request) -> web.StreamResponse:
        require_offered(self._settings, "image")
        fields, files = await _form(http)
        if not files:
            raise bad_request("'image' is required")
        return json_response(images_body(fields))

    async def _transcription(self, http: web.Request) -> web.StreamResponse:
        return await self._words_of(http, translates=False)

    async def _translation(self, http: web.Request) -> web.StreamResponse:
        return await self._words_of(http, translates=True)

    async def _words_of(self, http: web.Request, *, translates: bool) -> web.StreamResponse:
        require_offered(self._settings, "transcription")
        fields, files = await _form(http)
        if "file" not in files:
            raise bad_request("'file' is required")
        return json_response(transcription_body(fields, files["file"], translates=translates))

    async def _speech(self, http: web.Request) -> web.StreamResponse:
        require_offered(self._settings, "speech")
        pieces = spoken(await _json(http))
        behaviour = self._control.for_next_request()
        response = web.StreamResponse(headers={"Content-Type": "audio/wav"})
        await response.prepare(http)
        for number, piece in enumerate(pieces):
            if number == behaviour.close_after_tokens:
                assert http.transport is not None, "the response has begun"
                http.transport.abort()
                return response
            await response.write(piece)
            await asyncio.sleep(0)
        await response.write_eof()
        return response


async def _json(http: web.Request) -> dict[str, object]:
    try:
        return msgspec.json.decode(await http.read(), type=dict[str, object])
    except msgspec.DecodeError:
        raise bad_request("the body must be a JSON object") from None


async def _form(http: web.Request) -> tuple[dict[str, str], dict[str, bytes]]:
    """Parses the fields and the files of a form."""
    if not http.content_type.startswith("multipart/"):
        raise bad_request("the body must be a form")
    fields: dict[str, str] = {}
    files: dict[str, bytes] = {}
    reader = await http.multipart()
    while (part := await reader.next()) is not None:
        if not isinstance(part, BodyPartReader):
            raise bad_request("a form in a form")
        data = bytes(await part.read(decode=True))
        if part.filename is None:
            fields[part.name or ""] = data.decode()
        else:
            files[part.name or ""] = data
    return fields, files

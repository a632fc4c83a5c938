"""Routes for images, transcriptions and speech, if enabled; deterministic, as whole answers or OpenAI's streams."""

import asyncio
import base64
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import BodyPartReader, web

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.behaviour import Control
from weft_testing.fake_backend.requests import RequestError, bad_request, words
from weft_testing.fake_backend.sinks import json_response
from weft_testing.fake_backend.state import Ledger

MAX_IMAGES = 10
WAVE_HEAD = (
    b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00\x40\x1f\x00\x00\x80\x3e\x00\x00\x02\x00\x10\x00data"
)
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
"""One pixel."""
MAX_PARTIAL_IMAGES = 3
GRANULARITIES = "timestamp_granularities"
STEPS = 4
"""Steps of each image, as its usage counts them."""
POLL_SECONDS = 0.02
Fields = Mapping[str, Any]


def require_offered(settings: ServerSettings, what: str) -> None:
    """Raises RequestError 501 unless the fake was started with `--offers` and that word."""
    if what not in settings.offers:
        raise RequestError(501, "not_supported_error", f"This server offers no {what}")


def images_body(fields: Fields) -> bytes:
    """Returns the answer to /v1/images/*: the requested number of images, each of one pixel. Raises RequestError."""
    count = _image_count(fields)
    image = {"b64_json": base64.b64encode(PNG).decode(), "revised_prompt": f"a pixel of {fields['prompt']}"}
    usage = {"input_tokens": len(words(fields["prompt"])), "output_tokens": count, "total_tokens": 0}
    return shapes.encode({"created": 0, "data": [image] * count, "usage": usage})


def image_events(fields: Fields, prefix: str) -> list[dict[str, Any]]:
    """Returns the events of an image stream: each image after its previews. Raises RequestError."""
    count, previews = _image_count(fields), int(fields.get("partial_images") or 0)
    if not 0 <= previews <= MAX_PARTIAL_IMAGES:
        raise bad_request(f"'partial_images' must be 0 to {MAX_PARTIAL_IMAGES}")
    common = {"b64_json": base64.b64encode(PNG).decode(), "created_at": 0, "size": "1x1", "output_format": "png"}
    seed = int(fields.get("seed") or 0)
    usage = {"input_tokens": len(words(fields["prompt"])), "output_tokens": 1, "total_tokens": 0, "image_steps": STEPS}
    events: list[dict[str, Any]] = []
    for index in range(count):
        for number in range(previews):
            partial = {"partial_image_index": number, "image_index": index}
            events.append({"type": f"{prefix}.partial_image", **common, **partial})
        complete = {"image_index": index, "seed": seed + index, "usage": usage if index == count - 1 else None}
        events.append({"type": f"{prefix}.completed", **common, **complete})
    return events


def _image_count(fields: Fields) -> int:
    if not isinstance(fields.get("prompt"), str) or not fields["prompt"]:
        raise bad_request("'prompt' is required")
    count = int(fields.get("n") or 1)
    if not 1 <= count <= MAX_IMAGES:
        raise bad_request(f"'n' must be 1 to {MAX_IMAGES}")
    if fields.get("response_format", "b64_json") != "b64_json":
        raise bad_request("'response_format' must be b64_json")
    return count


def transcription_body(fields: Fields, recording: bytes, *, translates: bool) -> bytes:
    """Returns the answer to /v1/audio/transcriptions and translations: the length of the recording as text."""
    text = _heard(recording, translates=translates)
    if fields.get("response_format", "json") == "json":
        return shapes.encode({"text": text})
    pieces = words(text)
    times = [{"start": float(index), "end": index + 1.0} for index in range(len(pieces))]
    answer: dict[str, Any] = {
        "task": "translate" if translates else "transcribe",
        "language": str(fields.get("language") or "en"),
        "duration": float(len(pieces)),
        "text": text,
        "segments": [
            {"id": index, **time, "text": piece} for index, (time, piece) in enumerate(zip(times, pieces, strict=True))
        ],
    }
    if "word" in fields.get(GRANULARITIES, ()):
        answer["words"] = [{**time, "word": piece.strip()} for time, piece in zip(times, pieces, strict=True)]
    return shapes.encode(answer)


def transcription_events(recording: bytes, *, translates: bool) -> list[dict[str, Any]]:
    """Returns the events of a transcription stream: one delta per word, then the whole text."""
    text = _heard(recording, translates=translates)
    pieces = words(text)
    usage = {"type": "duration", "seconds": len(pieces)}
    done = {"type": "transcript.text.done", "text": text, "usage": usage}
    return [*({"type": "transcript.text.delta", "delta": piece} for piece in pieces), done]


def _heard(recording: bytes, *, translates: bool) -> str:
    return f"{len(recording)} bytes {'in English' if translates else 'of sound'}"


def spoken(fields: Fields) -> Sequence[bytes]:
    """Returns the chunks of a recording of `input`: a header, then one chunk per word. Raises RequestError."""
    if not isinstance(fields.get("input"), str) or not isinstance(fields.get("voice"), str):
        raise bad_request("'input' and 'voice' are required")
    return [WAVE_HEAD, *(zlib.crc32(word.encode()).to_bytes(4, "little") for word in words(fields["input"]))]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MediaRoutes:
    """Routes of images, transcriptions and speech, with deterministic answers."""

    def __init__(self, settings: ServerSettings, control: Control, ledger: Ledger) -> None:
        self._settings = settings
        self._control = control
        self._ledger = ledger

    def add(self, app: web.Application, guarded: Callable[[Handler], Handler]) -> None:
        """Adds the routes; `guarded` converts a RequestError to its answer."""
        app.router.add_post("/v1/images/generations", guarded(self._images))
        app.router.add_post("/v1/images/edits", guarded(self._edits))
        app.router.add_post("/v1/audio/transcriptions", guarded(partial(self._words_of, translates=False)))
        app.router.add_post("/v1/audio/translations", guarded(partial(self._words_of, translates=True)))
        app.router.add_post("/v1/audio/speech", guarded(self._speech))

    async def _images(self, http: web.Request) -> web.StreamResponse:
        require_offered(self._settings, "image")
        fields = await _json(http)
        if fields.get("stream") is True:
            return await self._stream(http, image_events(fields, "image_generation"))
        return self._made(http, fields)

    async def _edits(self, http: web.Request) -> web.StreamResponse:
        require_offered(self._settings, "image")
        fields, files = await _form(http)
        if not files:
            raise bad_request("'image' is required")
        if fields.get("stream") == "true":
            return await self._stream(http, image_events(fields, "image_edit"))
        return self._made(http, fields)

    def _made(self, http: web.Request, fields: Mapping[str, Any]) -> web.StreamResponse:
        """Answers with images, and counts the request."""
        body = images_body(fields)
        headers = {name.lower(): value for name, value in http.headers.items()}
        with self._ledger.request(headers, fields, len(body)):
            return json_response(body)

    async def _words_of(self, http: web.Request, *, translates: bool) -> web.StreamResponse:
        require_offered(self._settings, "transcription")
        fields, files = await _form(http)
        if "file" not in files:
            raise bad_request("'file' is required")
        if fields.get("stream") == "true":
            return await self._stream(http, transcription_events(files["file"], translates=translates))
        return json_response(transcription_body(fields, files["file"], translates=translates))

    async def _stream(self, http: web.Request, events: Sequence[Mapping[str, Any]]) -> web.StreamResponse:
        """Sends server-sent events as `_send` does."""
        written = [f"event: {event['type']}\ndata: {shapes.encode(event).decode()}\n\n".encode() for event in events]
        return await self._send(http, written, "text/event-stream")

    async def _speech(self, http: web.Request) -> web.StreamResponse:
        require_offered(self._settings, "speech")
        return await self._send(http, spoken(await _json(http)), "audio/wav")

    async def _send(self, http: web.Request, pieces: Sequence[bytes], media_type: str) -> web.StreamResponse:
        """Sends pieces at `tokens_per_second`; the `*_after_tokens` switches count them."""
        behaviour = self._control.for_next_request()
        response = web.StreamResponse(headers={"Content-Type": media_type})
        await response.prepare(http)
        for number, piece in enumerate(pieces):
            if number == behaviour.close_after_tokens:
                assert http.transport is not None, "the response has begun"
                http.transport.abort()
                return response
            while number == behaviour.stall_after_tokens:
                if http.transport is None or http.transport.is_closing():
                    return response
                await asyncio.sleep(POLL_SECONDS)
            await response.write(piece)
            await asyncio.sleep(1 / behaviour.tokens_per_second if behaviour.tokens_per_second else 0.0)
        await response.write_eof()
        return response


async def _json(http: web.Request) -> dict[str, object]:
    try:
        return msgspec.json.decode(await http.read(), type=dict[str, object])
    except msgspec.DecodeError:
        raise bad_request("the body must be a JSON object") from None


async def _form(http: web.Request) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Parses a form's fields and files; a field whose name ends with `[]` becomes a list without that suffix."""
    if not http.content_type.startswith("multipart/"):
        raise bad_request("the body must be a form")
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    reader = await http.multipart()
    while (part := await reader.next()) is not None:
        if not isinstance(part, BodyPartReader):
            raise bad_request("a form in a form")
        data = bytes(await part.read(decode=True))
        name = part.name or ""
        if part.filename is None and name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(data.decode())
        elif part.filename is None:
            fields[name] = data.decode()
        else:
            files[name] = data
    return fields, files

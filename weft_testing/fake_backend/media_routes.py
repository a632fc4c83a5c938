"""The fake's routes for images and sound. They answer 501 unless it is started with `--offers`."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import BodyPartReader, web

from weft_testing.fake_backend import model_calls
from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.behaviour import Control
from weft_testing.fake_backend.requests import bad_request
from weft_testing.fake_backend.sinks import json_response

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MediaRoutes:
    """Images, transcriptions and speech, each as deterministic as the rest of the fake."""

    def __init__(self, settings: ServerSettings, control: Control) -> None:
        self._settings = settings
        self._control = control

    def add(self, app: web.Application, guarded: Callable[[Handler], Handler]) -> None:
        """Add the routes; `guarded` turns a RequestError into its answer."""
        app.router.add_post("/v1/images/generations", guarded(self._images))
        app.router.add_post("/v1/images/edits", guarded(self._edits))
        app.router.add_post("/v1/audio/transcriptions", guarded(self._transcription))
        app.router.add_post("/v1/audio/translations", guarded(self._translation))
        app.router.add_post("/v1/audio/speech", guarded(self._speech))

    async def _images(self, http: web.Request) -> web.StreamResponse:
        model_calls.require_offered(self._settings, "image")
        return json_response(model_calls.images_body(await _json(http)))

    async def _edits(self, http: web.Request) -> web.StreamResponse:
        model_calls.require_offered(self._settings, "image")
        fields, files = await _form(http)
        if not files:
            raise bad_request("'image' is required")
        return json_response(model_calls.images_body(fields))

    async def _transcription(self, http: web.Request) -> web.StreamResponse:
        return await self._words_of(http, translates=False)

    async def _translation(self, http: web.Request) -> web.StreamResponse:
        return await self._words_of(http, translates=True)

    async def _words_of(self, http: web.Request, *, translates: bool) -> web.StreamResponse:
        model_calls.require_offered(self._settings, "transcription")
        fields, files = await _form(http)
        if "file" not in files:
            raise bad_request("'file' is required")
        return json_response(model_calls.transcription_body(fields, files["file"], translates=translates))

    async def _speech(self, http: web.Request) -> web.StreamResponse:
        model_calls.require_offered(self._settings, "speech")
        pieces = model_calls.spoken(await _json(http))
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
    """The fields and the files of a form."""
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

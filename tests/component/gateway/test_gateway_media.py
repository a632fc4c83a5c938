"""Images by address through the whole gateway: the bytes for engines, and the answer while one is fetched."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from gateway_script import RunningGateway, ScriptedDispatcher, delta, serving
from media_script import HOST, hostile_host, response, sending
from openai import APIError, APIStatusError
from openai.types.chat import ChatCompletionMessageParam
from structlog.testing import capture_logs

from gateway.gateway_config import GatewayConfig
from gateway.media import MediaAddress, MediaConfig
from gateway.media.fetcher import MediaFetcher
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft_testing.media_files import png

URL = f"https://{HOST}/cat.png"
OTHER = f"https://{HOST}/dog.png"
PICTURE = png(4, 4)
FIELD = "messages[0].content[1].image_url.url"
MEDIA = MediaConfig(allowed_hosts=(HOST,), max_files=2)
CONFIG = GatewayConfig(port=0, media=MEDIA)


@dataclass
class ScriptedMedia:
    """Returns files once it is released; records the requests."""

    failure: Exception | None = None
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    was_left: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[MediaAddress] = field(default_factory=list)

    async def fetch(self, addresses: Sequence[MediaAddress]) -> Mapping[str, chat_pb2.MediaPart]:
        self.asked += addresses
        self.was_asked.set()
        try:
            await self.may_answer.wait()
        finally:
            self.was_left.set()
        if self.failure is not None:
            raise self.failure
        return {address.url: chat_pb2.MediaPart(data=PICTURE, media_type="image/png") for address in addresses}


def picture(*urls: str) -> list[ChatCompletionMessageParam]:
    text = {"type": "text", "text": "What is this?"}
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return [{"role": "user", "content": [text, *images]}]  # type: ignore[list-item,misc]  # built, not written out


def body(*urls: str, **fields: object) -> bytes:
    return json.dumps({"model": "chat", "messages": picture(*urls), **fields}).encode()


def images_of(gateway: RunningGateway) -> list[chat_pb2.MediaPart]:
    payload = gateway.dispatcher.payloads[0]
    assert isinstance(payload, chat_pb2.ChatPayload)
    return [part.image for part in payload.messages[0].content if part.HasField("image")]


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_receives_image_bytes_instead_of_the_url(stream: bool) -> None:
    async with hostile_host(sending(response(PICTURE))) as host:
        media = MediaFetcher(MEDIA, network=host.network)
        async with serving(config=CONFIG, media=media) as gateway:
            answer = await gateway.sdk.chat.completions.create(
                model="chat", messages=picture(URL, OTHER, URL), stream=stream
            )
            if stream:
                assert [chunk async for chunk in answer]  # type: ignore[union-attr]  # asked for above
            images = images_of(gateway)
    assert [(image.data, image.media_type, image.detail) for image in images] == [(PICTURE, "image/png", "low")] * 3
    assert len(host.requests) == 2, "each address once"
    assert URL.encode() not in gateway.dispatcher.payloads[0].SerializeToString()


@pytest.mark.parametrize(
    ("fields", "urls", "param"),
    [
        ({"allow_remote": False}, [URL], FIELD),
        ({}, ["https://elsewhere.example.com/a.png"], FIELD),
        ({}, [URL, OTHER, f"{URL}?3"], "messages[0].content[3].image_url.url"),
    ],
)
async def test_forbidden_urls_are_rejected_before_any_fetch(
    fields: dict[str, object], urls: list[str], param: str
) -> None:
    media = ScriptedMedia()
    async with serving(config=CONFIG, media=media) as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", body(*urls, **fields))
    assert answer.status == 400
    assert answer.error["param"] == param
    assert media.asked == []


@pytest.mark.parametrize("stream", [False, True])
async def test_unavailable_image_returns_400_and_error_names_the_field(stream: bool) -> None:
    media = ScriptedMedia(invalid_field(FIELD, "could not be fetched: its host answered 404"))
    media.may_answer.set()
    async with serving(config=CONFIG, media=media) as gateway:
        with pytest.raises(APIStatusError) as refused:
            await gateway.sdk.chat.completions.create(model="chat", messages=picture(URL), stream=stream)
    assert (refused.value.status_code, refused.value.param) == (400, FIELD)
    assert gateway.dispatcher.payloads == []


async def test_stream_sends_status_line_and_comments_while_an_image_is_fetched() -> None:
    media = ScriptedMedia()
    config = GatewayConfig(port=0, media=MEDIA, headers_within_seconds=0.01, sse_keepalive_seconds=0.01)
    async with (
        serving(config=config, media=media) as gateway,
        gateway.connection() as (reader, writer),
    ):
        writer.write(gateway.post("/v1/chat/completions", body(URL, stream=True)))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert b": keepalive" in await reader.readuntil(b"keepalive")
        assert gateway.dispatcher.payloads == [], "nobody is asked to wait for a picture"
        media.may_answer.set()
        assert b"[DONE]" in await reader.readuntil(b"[DONE]")


async def test_image_failure_after_the_status_line_is_an_error_event_and_one_log_line() -> None:
    media = ScriptedMedia(invalid_field(FIELD, "could not be fetched"))
    config = GatewayConfig(port=0, media=MEDIA, headers_within_seconds=0.01)
    with capture_logs() as logs:
        async with serving(config=config, media=media) as gateway:
            stream = await gateway.sdk.chat.completions.create(model="chat", messages=picture(URL), stream=True)
            media.may_answer.set()
            with pytest.raises(APIError, match="could not be fetched"):
                assert not [chunk async for chunk in stream]
    (line,) = [line for line in logs if line["event"] == "refused"]
    assert line["reason"] == "invalid_argument"
    assert HOST not in str(line), "addresses may be secrets"


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_aborts_the_fetch_and_dispatches_nothing(stream: bool) -> None:
    media = ScriptedMedia()
    async with serving(ScriptedDispatcher([[delta("x")]]), config=CONFIG, media=media) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post("/v1/chat/completions", body(URL, stream=stream)))
            await media.was_asked.wait()
        await media.was_left.wait()
    assert gateway.dispatcher.payloads == []


async def test_large_inline_image_is_rejected() -> None:
    async with serving(config=GatewayConfig(port=0, media=MediaConfig(max_bytes=1024))) as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", body("data:image/png;base64," + "A" * 2000))
    assert answer.refusal == (413, "request_too_large", FIELD)

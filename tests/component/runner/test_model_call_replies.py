"""Valid and invalid answers of servers about tokens, scores, images, sound and embeddings."""

import asyncio
import base64
import json
import math
import re
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.failures import fails
from kit.fake_backend import run_fake_backend
from kit.upstream import upstream

from runner_svc.backend.port import CallInfo
from runner_svc.openai_upstream import media
from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.openai_upstream.tokens import tokenize
from weft.api.common.v1 import (
    audio_pb2,
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    event_pb2,
    image_pb2,
    rerank_pb2,
    tokenize_pb2,
)
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import to_json_object

CALL = CallInfo(request_id="r1", traceparent="")
QUERY = rerank_pb2.RerankPayload(query="grey cat", documents=["a dog", "a grey cat", "a cat"])
TEXT = tokenize_pb2.TokenizePayload(text="one two", with_pieces=True)


def _chat(*parts: chat_pb2.ContentPart) -> chat_pb2.ChatPayload:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=parts or [chat_pb2.ContentPart(text="Say hello")])
    return chat_pb2.ChatPayload(messages=[message])


@asynccontextmanager
async def _answering(
    reply: Any, media_type: str = "application/json", seen: list[bytes] | None = None
) -> AsyncGenerator[OpenAiHttp]:
    """`seen`: gets the body of each request."""
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {media_type}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if seen is not None:
            length = re.search(rb"content-length: (\d+)", request, re.IGNORECASE)
            seen.append(await reader.readexactly(int(length[1]) if length else 0))
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    try:
        async with upstream(f"http://127.0.0.1:{port}", is_llama_server=True) as http:
            yield http
    finally:
        server.close()


async def test_a_whole_answer_in_place_of_a_stream_is_read() -> None:
    """It was refused, as its content type is not text/event-stream."""
    message = {"role": "assistant", "content": "Hello\n"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": usage}
    async with _answering(json.dumps(reply, indent=1).encode(), "application/json; charset=utf-8") as http:
        events = [event async for frame in http.generate(_chat(), CALL) for event in frame]
    assert "".join(event.delta.text for event in events) == "Hello\n"
    assert [event.delta.finish_reason for event in events].count(event_pb2.FINISH_REASON_LENGTH) == 1
    assert events[-1].finished.receipt.usage.completion_tokens == 2
    async with _answering({"status": "ok"}) as http:
        with pytest.raises(WeftError) as raised:
            _ = [frame async for frame in http.generate(_chat(), CALL)]
    assert "not text/event-stream" in raised.value.message


@pytest.mark.parametrize(
    ("flags", "is_llama_server"),
    [((), True), ((), False), (("--speaks-vllm",), False)],
    ids=["llama.cpp, started by weft", "llama.cpp, attached", "vLLM, attached"],
)
async def test_every_server_kind_counts_texts_and_chats(flags: tuple[str, ...], is_llama_server: bool) -> None:
    async with (
        run_fake_backend(*flags) as fake,
        upstream(fake.base_url, model="fake", is_llama_server=is_llama_server) as http,
    ):
        text = await tokenize(http, TEXT, CALL)
        chat = await tokenize(http, tokenize_pb2.TokenizePayload(chat=_chat(), with_pieces=True), CALL)
    assert (text.count, list(text.pieces)) == (2, [b"one", b" two"])
    assert (chat.count, b"".join(chat.pieces)) == (4, b"<|user|>Say hello<|assistant|>")
    assert bool(text.max_context_tokens) is bool(flags)


async def test_partial_characters_are_returned_as_bytes() -> None:
    reply = {"tokens": [{"id": 1, "piece": [240, 159]}, {"id": 2, "piece": "a"}]}
    async with _answering(reply) as http:
        result = await tokenize(http, TEXT, CALL)
    assert (list(result.ids), list(result.pieces)) == ([1, 2], [b"\xf0\x9f", b"a"])


async def test_chat_with_an_image_is_rejected_by_the_uncountable_part() -> None:
    image = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"x", media_type="image/png"))
    payload = tokenize_pb2.TokenizePayload(chat=_chat(chat_pb2.ContentPart(text="Look"), image))
    async with _answering({}) as http:
        with pytest.raises(FieldError) as refused:
            await tokenize(http, payload, CALL)
    assert (refused.value.field, refused.value.reason) == ("messages[0].content[1]", Reason.INVALID_ARGUMENT)


@pytest.mark.parametrize(
    "reply",
    [{}, {"tokens": "none"}, {"tokens": [-1]}, {"tokens": [1], "count": 2}, {"tokens": [{"id": 1, "piece": [999]}]}],
)
async def test_invalid_tokens_are_a_protocol_error(reply: dict[str, Any]) -> None:
    async with _answering(reply) as http:
        with fails(Reason.BACKEND_PROTOCOL_ERROR):
            await tokenize(http, TEXT, CALL)


async def test_scores_are_sorted_best_first_and_limited_to_the_requested_count() -> None:
    async with run_fake_backend("--reranking") as fake, upstream(fake.base_url) as http:
        everything = await http.rerank(QUERY, CALL)
        best = await http.rerank(rerank_pb2.RerankPayload(query="grey cat", documents=QUERY.documents, top_n=1), CALL)
    assert [score.index for score in everything.scores] == [1, 2, 0]
    assert [score.index for score in best.scores] == [1]
    assert everything.usage.prompt_tokens == 13


async def test_vllm_rerank_usage_is_its_total() -> None:
    results = [{"index": index, "relevance_score": 0.5, "document": {"text": "x"}} for index in range(3)]
    async with _answering({"results": results, "usage": {"total_tokens": 7}}) as http:
        assert (await http.rerank(QUERY, CALL)).usage.prompt_tokens == 7


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


PIXEL = "iVBORw0KGgo="
PREVIEWED = image_pb2.ImagePayload(prompt="a", partial_images=2)
SOUND = audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=b"sound", media_type="audio/wav"))


async def test_image_request_has_no_extra_field_with_an_address_or_a_file() -> None:
    """Such a server could fetch the address, or read the file, for a caller who may only ask for images."""
    extra = {"ref_images": ["http://169.254.169.254/"], "file": "/etc/passwd", "lora": "x", "cfg_scale": 7}
    payload = image_pb2.ImagePayload(prompt="a", extra_parameters=to_json_object(extra, "extra"))
    seen: list[bytes] = []
    async with _answering({"data": [{"b64_json": PIXEL}]}, seen=seen) as http:
        events = [event async for frame in media.generate_images(http, payload, CALL) for event in frame]
    sent = json.loads(seen[0])
    assert not sent.keys() & {"ref_images", "file", "lora"}
    assert sent["cfg_scale"] == 7
    assert {event.warning.field for event in events if event.HasField("warning")} == {"ref_images", "file", "lora"}


async def test_image_stream_has_previews_seeds_and_total_usage() -> None:
    usage = {"input_tokens": 3, "image_steps": 4}
    stream = b": keepalive\n\n"
    for index in range(2):
        stream += _event(type="image_generation.partial_image", b64_json=PIXEL, partial_image_index=0)
        stream += _event(type="image_generation.completed", b64_json=PIXEL, seed=index, usage=usage)
    async with _answering(stream + b"data: [DONE]\n\n", "text/event-stream") as http:
        events = [event async for frame in media.generate_images(http, PREVIEWED, CALL) for event in frame]
    assert [(event.partial_image.index, event.image.index) for event in events[:-1]] == [(0, 0), (0, 0), (1, 0), (0, 1)]
    assert [event.image.seed for event in events if event.HasField("image")] == [0, 1]
    used = events[-1].finished.receipt.usage
    assert (used.prompt_tokens, used.image_steps) == (6, 8)


async def test_server_without_image_streaming_returns_all_images_together() -> None:
    async with _answering({"data": [{"b64_json": PIXEL}]}) as http:
        events = [event async for frame in media.generate_images(http, PREVIEWED, CALL) for event in frame]
    assert [event.WhichOneof("event") for event in events] == ["image", "finished"]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"", Reason.BACKEND_PROTOCOL_ERROR),
        (_event(type="image_generation.partial_image", b64_json=PIXEL), Reason.BACKEND_PROTOCOL_ERROR),
        (b"data: {\n\n", Reason.BACKEND_PROTOCOL_ERROR),
        (_event(type="image_generation.completed", b64_json="no base64!"), Reason.BACKEND_PROTOCOL_ERROR),
        (_event(error={"message": "the queue is full", "type": "server_error"}), Reason.BACKEND_ERROR),
    ],
    ids=["empty", "no image", "no JSON", "no base64", "an error"],
)
async def test_invalid_image_stream_is_an_error(stream: bytes, reason: Reason) -> None:
    async with _answering(stream, "text/event-stream") as http:
        with fails(reason):
            async for _ in media.generate_images(http, PREVIEWED, CALL):
                pass


@pytest.mark.parametrize(
    "stream",
    [
        _event(type="transcript.text.delta", delta="One ")
        + _event(type="transcript.text.delta", delta="fish.")
        + _event(type="transcript.text.done", text="One fish.", usage={"type": "duration", "seconds": 2}),
        _event(type="transcript.text.done", text="One fish.", usage={"type": "duration", "seconds": 2}),
    ],
    ids=["pieces", "the whole text alone"],
)
async def test_streamed_transcription_keeps_the_engine_chunks(stream: bytes) -> None:
    async with _answering(stream, "text/event-stream") as http:
        events = [event async for frame in media.transcribe(http, SOUND, CALL) for event in frame]
    assert "".join(event.transcript.text for event in events) == "One fish."
    assert events[-1].finished.receipt.usage.audio_milliseconds == 2000


async def test_vllm_transcription_streams_as_chat_chunks() -> None:
    stream = b"".join(_event(object="transcription.chunk", choices=[{"delta": {"content": text}}]) for text in "ab")
    async with _answering(stream + b"data: [DONE]\n\n", "text/event-stream") as http:
        events = [event async for frame in media.transcribe(http, SOUND, CALL) for event in frame]
    assert [event.transcript.text for event in events[:-1]] == ["a", "b"]


async def test_words_are_added_to_the_segment_in_which_they_start() -> None:
    segments = [{"start": 0.0, "end": 1.0, "text": " One two."}, {"start": 1.0, "end": 2.0, "text": " Three."}]
    words = [
        {"word": text, "start": start, "end": start + 0.5} for text, start in (("One", 0), ("two", 0.5), ("Three", 1))
    ]
    payload = audio_pb2.TranscriptionPayload(audio=SOUND.audio, with_words=True)
    async with _answering({"text": "One two. Three.", "segments": segments, "words": words}) as http:
        events = [event async for frame in media.transcribe(http, payload, CALL) for event in frame]
    assert [[word.text for word in event.transcript.segment.words] for event in events[:-1]] == [
        ["One", "two"],
        ["Three"],
    ]


def test_multi_value_field_is_encoded_as_one_part_per_value() -> None:
    body = media.form({media.GRANULARITIES: ["word", "segment"]}, []).data
    assert body.count(b'name="timestamp_granularities[]"') == 2


async def test_media_type_with_a_line_break_adds_no_form_header() -> None:
    audio = chat_pb2.MediaPart(data=b"sound", media_type="audio/wav\r\nX-Evil: 1")
    form = media.form({"model": "m"}, [("file", audio)])
    assert b"\r\nX-Evil" not in form.data
    assert form.data.count(b"\r\n\r\n") == 2


INPUT = completion_pb2.PromptInput(text="a")
INPUTS = embedding_pb2.EmbeddingPayload(inputs=[completion_pb2.PromptInput(text=text) for text in ("a", "b")])


def _vectors(*places: int) -> dict[str, Any]:
    data = [{"index": place, "embedding": [float(place)]} for place in places]
    return {"data": data, "usage": {"prompt_tokens": 2}}


async def test_vectors_are_in_input_order() -> None:
    async with _answering(_vectors(1, 0)) as http:
        result = await http.embed(INPUTS, CALL)
    assert [list(vector.values) for vector in result.embeddings] == [[0.0], [1.0]]


VECTORS = [{"embedding": [0.0]}, {"embedding": [1.0]}]


@pytest.mark.parametrize("usage", [{}, {"usage": None}, {"usage": {"prompt_tokens": -5}}, {"usage": [2]}])
@pytest.mark.parametrize("places", [({}, {}), ({"index": 0}, {"index": 0}), ({"index": None}, {"index": "b"})])
async def test_vectors_without_usage_or_index_are_accepted(
    places: tuple[dict[str, Any], ...], usage: dict[str, Any]
) -> None:
    data = [place | vector for place, vector in zip(places, VECTORS, strict=True)]
    async with _answering({"data": data, **usage}) as http:
        result = await http.embed(INPUTS, CALL)
    assert [list(vector.values) for vector in result.embeddings] == [[0.0], [1.0]]
    assert result.usage.prompt_tokens == 0


@pytest.mark.parametrize("usage", [{"prompt_tokens": 2.0}, {"prompt_tokens": None, "total_tokens": 2}])
async def test_usage_as_floats_or_only_a_total_is_accepted(usage: dict[str, Any]) -> None:
    async with _answering({"data": VECTORS, "usage": usage}) as http:
        assert (await http.embed(INPUTS, CALL)).usage.prompt_tokens == 2


async def test_vectors_in_base64_are_read() -> None:
    """Some servers write them unasked; they were refused."""
    text = base64.b64encode(struct.pack("<2f", 0.5, -2.0)).decode()
    async with _answering({"data": [{"embedding": text}]}) as http:
        result = await http.embed(embedding_pb2.EmbeddingPayload(inputs=[INPUT]), CALL)
    assert list(result.embeddings[0].values) == [0.5, -2.0]
    for wrong in ("", "AAA=", "no base64", base64.b64encode(struct.pack("<2f", 1.0, math.nan)).decode()):
        async with _answering({"data": [{"embedding": wrong}]}) as http:
            with pytest.raises(WeftError, match="a vector that is empty or holds"):
                await http.embed(embedding_pb2.EmbeddingPayload(inputs=[INPUT]), CALL)


async def test_an_error_in_an_answer_of_status_200_is_the_error() -> None:
    """It was shown as embeddings that are malformed."""
    async with _answering({"error": {"message": "the input is empty", "code": 400}}) as http:
        with pytest.raises(WeftError) as raised:
            await http.embed(INPUTS, CALL)
    assert "the input is empty" in raised.value.message

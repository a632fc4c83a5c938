"""Reranking, tokens, images and audio: formats of answers, and their failures."""

import asyncio
from typing import Any

import httpx2
import pytest
from gateway_script import RunningGateway, ScriptedDispatcher, serving
from openai import APIStatusError

from weft.api.common.v1 import audio_pb2, event_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.operation_table import SpeechPiece
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

DIED = WeftError(Reason.SERVER_DIED, "it died")
RECORDING = ("a.mp3", b"sound", "application/octet-stream")
NO_TIMES = [[event_pb2.InferenceEvent(transcript=audio_pb2.TranscriptPart(text="One. Two."))]]


async def _post(gateway: RunningGateway, path: str, body: dict[str, Any]) -> Any:
    return await gateway.sdk.post(path, cast_to=object, body=body)


async def test_token_piece_with_partial_utf8_is_returned_as_bytes() -> None:
    tokens = tokenize_pb2.TokenizeResult(count=2, ids=[7, 8], pieces=[b"a", b"\xf0\x9f"], max_context_tokens=512)
    async with serving(ScriptedDispatcher(whole=tokens)) as gateway:
        body = {"model": "tiny", "content": "x", "with_pieces": True, "return_token_strs": True}
        answer = await _post(gateway, "/tokenize", body)
        (context,) = gateway.dispatcher.contexts
    assert answer == {
        "model": "tiny",
        "count": 2,
        "max_model_len": 512,
        "tokens": [{"id": 7, "piece": "a"}, {"id": 8, "piece": [240, 159]}],
        "token_strs": ["a", "\N{REPLACEMENT CHARACTER}"],
    }
    assert context.operation is Operation.TOKENIZE


async def test_special_tokens_default_follows_the_emulated_server() -> None:
    async with serving(ScriptedDispatcher(whole=tokenize_pb2.TokenizeResult(count=1, ids=[7]))) as gateway:
        for body, adds in (
            ({"content": "x"}, False),
            ({"prompt": "x"}, True),
            ({"content": "x", "add_special": True}, True),
            ({"prompt": "x", "add_special_tokens": False}, False),
        ):
            await _post(gateway, "/tokenize", {"model": "tiny", **body})
            payload = gateway.dispatcher.payloads[-1]
            assert isinstance(payload, tokenize_pb2.TokenizePayload)
            assert (payload.text, payload.add_special) == ("x", adds)


@pytest.mark.parametrize(
    "scores",
    [
        [rerank_pb2.RerankScore(index=1, score=0.5)],
        [rerank_pb2.RerankScore(index=0, score=0.5), rerank_pb2.RerankScore(index=0, score=0.4)],
        [rerank_pb2.RerankScore(index=0, score=float("nan"))],
        [],
    ],
    ids=["of no document", "twice of one", "no number", "too few"],
)
async def test_invalid_rerank_scores_are_a_protocol_error(scores: list[rerank_pb2.RerankScore]) -> None:
    async with serving(ScriptedDispatcher(whole=scores)) as gateway:
        with pytest.raises(APIStatusError) as failed:
            await _post(gateway, "/rerank", {"model": "tiny", "query": "a", "documents": ["b"]})
    assert (failed.value.status_code, failed.value.code) == (502, "backend_protocol_error")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": "srt"}, "response_format"),
        ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, "timestamp_granularities"),
    ],
)
async def test_unsupported_transcription_option_is_reported(asked: dict[str, Any], field: str) -> None:
    async with serving(ScriptedDispatcher(steps=list(NO_TIMES))) as gateway:
        with pytest.raises(APIStatusError) as refused:
            await gateway.sdk.audio.transcriptions.create(model="tiny", file=RECORDING, **asked)
    assert (refused.value.status_code, refused.value.param) == (501, field)


async def test_interrupted_speech_never_ends_cleanly() -> None:
    spoken: list[Any] = [SpeechPiece(b"some", "audio/mpeg"), DIED]
    async with serving(ScriptedDispatcher(spoken=spoken)) as gateway:
        speaking = gateway.sdk.audio.speech.with_streaming_response
        with pytest.raises(httpx2.TransportError):
            async with speaking.create(model="tiny", input="Hello", voice="alloy") as answer:
                await answer.read()


async def test_speech_streams_as_generated_and_a_disconnect_stops_it() -> None:
    never = asyncio.Event()
    spoken: list[Any] = [SpeechPiece(b"some", "audio/mpeg"), never]
    async with serving(ScriptedDispatcher(spoken=spoken)) as gateway:
        speaking = gateway.sdk.audio.speech.with_streaming_response
        async with speaking.create(model="tiny", input="Hello", voice="alloy") as answer:
            assert answer.headers["content-type"] == "audio/mpeg"
            assert await anext(aiter(answer.iter_bytes())) == b"some"
        async with asyncio.timeout(20):
            await gateway.dispatcher.was_closed.wait()

"""Transcriptions over HTTP: times of words, what was heard, and the stream of events, by OpenAI's own client."""

import asyncio
import json
from typing import Any

import pytest
from gateway_script import RunningGateway, ScriptedDispatcher, serving
from openai import APIError, APIStatusError

from weft.api.common.v1 import audio_pb2, event_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

RECORDING = ("a.mp3", b"sound", "application/octet-stream")
DIED = WeftError(Reason.SERVER_DIED, "it died")
FOX = audio_pb2.TranscriptionSegment(
    start_seconds=0.5,
    end_seconds=1.5,
    text=" A fox.",
    words=[
        audio_pb2.TranscriptionWord(start_seconds=0.5, end_seconds=0.75, text="A", probability=0.5),
        audio_pb2.TranscriptionWord(start_seconds=0.75, end_seconds=1.5, text="fox."),
    ],
    mean_logprob=-0.25,
    no_speech_probability=0.125,
    compression_ratio=1.25,
    temperature=0.0,
)
DOG = audio_pb2.TranscriptionSegment(start_seconds=2.0, end_seconds=3.0, text=" A dog.")


def _part(**fields: Any) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(transcript=audio_pb2.TranscriptPart(**fields))


def _progress(done: float, total: float) -> event_pb2.InferenceEvent:
    work = event_pb2.WorkProgress(unit=event_pb2.WORK_UNIT_AUDIO_SECONDS, done=done, total=total)
    return event_pb2.InferenceEvent(work_progress=work)


def _end() -> event_pb2.InferenceEvent:
    finished = event_pb2.Finished()
    finished.receipt.usage.audio_milliseconds = 3500
    return event_pb2.InferenceEvent(finished=finished)


STEPS: list[Any] = [
    [_progress(0.0, 3.5)],
    [_part(text=" A fox.", segment=FOX, language="en", duration_seconds=3.5)],
    [_progress(3.0, 3.5), _part(text=" A dog.", segment=DOG)],
    [_end()],
]


async def _create(gateway: RunningGateway, **fields: Any) -> Any:
    return await gateway.sdk.audio.transcriptions.create(model="tiny", file=RECORDING, **fields)


async def _streamed(gateway: RunningGateway, **fields: Any) -> list[dict[str, Any]]:
    return [event.model_dump() async for event in await _create(gateway, stream=True, **fields)]


async def test_only_requested_timestamps_are_sent() -> None:
    async with serving(ScriptedDispatcher(steps=list(STEPS))) as gateway:
        words = await _create(gateway, response_format="verbose_json", timestamp_granularities=["word"])
        segments = await _create(gateway, response_format="verbose_json")
    assert (words.segments, len(words.words)) == (None, 2)
    assert (len(segments.segments), segments.words) == (2, None)


async def test_timestamp_granularity_in_a_field_without_brackets_is_used() -> None:
    async with serving(ScriptedDispatcher(steps=list(STEPS))) as gateway:
        plain = {"timestamp_granularities": "word"}
        words = await _create(gateway, response_format="verbose_json", extra_body=plain)
    assert (words.segments, len(words.words)) == (None, 2)


async def test_stream_with_timestamps_has_an_event_per_segment() -> None:
    async with serving(ScriptedDispatcher(steps=list(STEPS))) as gateway:
        fields = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
        events = await _streamed(gateway, **fields)
    fox, dog = (event for event in events if event["type"] == "transcript.text.segment")
    assert (fox["id"], fox["start"], fox["end"], fox["text"]) == ("seg_0", 0.5, 1.5, " A fox.")
    assert fox["words"] == [
        {"word": "A", "start": 0.5, "end": 0.75},
        {"word": "fox.", "start": 0.75, "end": 1.5},
    ]
    assert dog["id"] == "seg_1"
    assert "words" not in dog


async def test_progress_is_a_stream_comment_and_done_is_the_last_event() -> None:
    async with serving(ScriptedDispatcher(steps=list(STEPS))) as gateway:
        streaming = gateway.sdk.audio.transcriptions.with_streaming_response
        async with streaming.create(model="tiny", file=RECORDING, stream=True) as answer:
            content_type, text = answer.headers["content-type"], await answer.text()
    assert content_type.startswith("text/event-stream")
    lines = text.split("\n\n")
    assert ": heard 0/4 s" in lines
    assert ": heard 3/4 s" in lines
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["type"] == "transcript.text.done"


async def test_stream_that_fails_after_its_first_words_ends_with_the_error() -> None:
    steps: list[Any] = [*STEPS[:2], DIED]
    async with serving(ScriptedDispatcher(steps=steps)) as gateway:
        events = aiter(await _create(gateway, stream=True))
        assert (await anext(events)).type == "transcript.text.delta"
        with pytest.raises(APIError, match="it died"):
            await anext(events)


async def test_client_disconnect_stops_the_work() -> None:
    never = asyncio.Event()
    async with serving(ScriptedDispatcher(steps=[*STEPS[:2], never])) as gateway:
        stream = await _create(gateway, stream=True)
        await anext(aiter(stream))
        await stream.close()
        async with asyncio.timeout(20):
            await gateway.dispatcher.was_closed.wait()


async def test_voice_detection_accepts_both_field_names() -> None:
    async with serving(ScriptedDispatcher(steps=list(STEPS))) as gateway:
        for given in ({}, {"vad": True}, {"voice_detection": False}, {"vad": True, "voice_detection": True}):
            await _create(gateway, extra_body=given)
        payloads = gateway.dispatcher.payloads
    found = [payload.voice_detection if payload.HasField("voice_detection") else None for payload in payloads]
    assert found == [None, True, False, True]


async def test_contradictory_fields_are_rejected_by_name() -> None:
    async with serving(ScriptedDispatcher(steps=list(STEPS))) as gateway:
        for asked, field in (
            ({"stream": True, "response_format": "srt"}, "stream"),
            ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
            ({"timestamp_granularities": ["hour"], "response_format": "verbose_json"}, "timestamp_granularities"),
            ({"extra_body": {"vad": True, "voice_detection": False}}, "vad"),
        ):
            with pytest.raises(APIStatusError) as refused:
                await _create(gateway, **asked)
            assert (refused.value.status_code, refused.value.param) == (400, field)

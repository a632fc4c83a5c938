"""Speech over HTTP: bytes, events, and the list of voices; the openai client reads them."""

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, model, sample_receipt, serving
from kit.fleet import runner_view
from openai import APIStatusError
from typing_extensions import override

from weft.api.common.v1 import receipt_pb2, warning_pb2
from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.dispatch.fleet import FleetView, ModelView
from weft.dispatch.operation_table import SpeechPiece
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

DIED = WeftError(Reason.SERVER_DIED, "it died")
SPOKEN: list[Any] = [SpeechPiece(b"\xff\xfbone", "audio/mpeg"), SpeechPiece(b"two", "")]


class SpeakingDispatcher(ScriptedDispatcher):
    """Its receipts count a second and a half of sound, with a warning."""

    @override
    def receipt(self) -> receipt_pb2.Receipt:
        receipt = sample_receipt()
        receipt.usage.audio_milliseconds = 1500
        receipt.warnings.append(
            warning_pb2.Warning(
                code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field="voice", message="en-gb speaks instead"
            )
        )
        return receipt


def _speaker(name: str) -> ModelView:
    return replace(model(name), operations=frozenset({Operation.SPEECH}))


def _fleet() -> FixedFleet:
    """Two models that speak and one that chats, and a model that speaks and has not said with which voices."""
    voices = {"espeak": ["en-gb", "de"], "piper": ["en_US-joe-medium"], "silent": []}
    states = {
        name: runner_pb2.InstanceState(model=name, abilities=model_pb2.ModelAbilities(voices=listed))
        for name, listed in voices.items()
    }
    models = {each.name: each for each in (model("chatty"), *map(_speaker, voices))}
    return FixedFleet(FleetView(1, {"r1": runner_view("r1", instances=states)}, models))


async def test_speech_events_have_base64_chunks_and_end_with_usage() -> None:
    async with serving(SpeakingDispatcher(spoken=list(SPOKEN))) as gateway:
        answer = await gateway.sdk.audio.speech.with_raw_response.create(
            model="tiny", input="Hello", voice="alloy", stream_format="sse"
        )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = [block for block in answer.text.split("\n\n") if block.startswith("data: ")]
    *pieces, done = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert {piece["type"] for piece in pieces} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(piece["audio"]) for piece in pieces) == b"\xff\xfbonetwo"
    assert done["type"] == "speech.audio.done"
    assert done["usage"] == {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10, "seconds": 1.5}
    assert [(warning["field"], warning["message"]) for warning in done["warnings"]] == [
        ("voice", "en-gb speaks instead")
    ]


async def test_interrupted_events_end_with_an_error() -> None:
    async with serving(ScriptedDispatcher(spoken=[SPOKEN[0], DIED])) as gateway:
        answer = await gateway.sdk.audio.speech.with_raw_response.create(
            model="tiny", input="Hello", voice="alloy", stream_format="sse"
        )
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "server_died"
    assert "speech.audio.done" not in answer.text


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize(("spoken", "code"), [([DIED], "server_died"), ([], "backend_protocol_error")])
async def test_failure_before_the_first_chunk_is_a_status(stream_format: Any, spoken: list[Any], code: str) -> None:
    async with serving(ScriptedDispatcher(spoken=spoken)) as gateway:
        with pytest.raises(APIStatusError) as failed:
            await gateway.sdk.audio.speech.create(
                model="tiny", input="Hello", voice="alloy", stream_format=stream_format
            )
    assert (failed.value.status_code, failed.value.code) == (502, code)


async def _voices(path: str) -> Any:
    async with serving(ScriptedDispatcher(), fleet=_fleet()) as gateway:
        answer = await gateway.request("GET", path)
        return answer.status, answer.json


async def test_voices_of_one_model_are_listed_and_an_unknown_model_is_rejected() -> None:
    _, listed = await _voices("/v1/audio/voices?model=piper")
    assert [each["id"] for each in listed["voices"]] == ["en_US-joe-medium"]
    assert await _voices("/v1/audio/voices?model=silent") == (200, {"voices": []})
    status, refused = await _voices("/v1/audio/voices?model=nosuch")
    assert (status, refused["error"]["code"]) == (404, "model_not_found")

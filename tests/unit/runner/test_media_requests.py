"""Requests for images and recordings as an engine's server reads them, and its events as the runner does."""

import json
from typing import Any

import pytest

from runner_svc.engine_host.http_server import INVALID_FIELD, RefusedError, _body
from runner_svc.engine_host.media_routes import image_size, images_of, transcription_of
from runner_svc.openai_upstream.errors import own_error
from runner_svc.openai_upstream.media import GRANULARITIES, form
from runner_svc.openai_upstream.media_stream import ImageEvents, SpeechEvents, TranscriptEvents
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason

BOUNDARY_IN_DATA = b"\x00\r\n--not the boundary\r\n\r\n\xff"


def _event(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_form_is_read_as_the_client_writes_it() -> None:
    fields = {"prompt": "42\r\n--", "temperature": 0.5, GRANULARITIES: ["word", "segment"], "voice_detection": False}
    files = [("image[]", chat_pb2.MediaPart(data=data, media_type="image/png")) for data in (BOUNDARY_IN_DATA, b"")]
    sent = form(fields, files)
    assert _body(sent.data, sent.content_type) == {
        "prompt": "42\r\n--",
        "temperature": "0.5",
        GRANULARITIES: ["word", "segment"],
        "voice_detection": "false",
        "image[]": [BOUNDARY_IN_DATA, b""],
    }


def test_a_request_for_images_has_what_the_body_says_and_nothing_for_what_it_leaves_out() -> None:
    body = {"prompt": "a lighthouse", "size": "640x512", "n": 2, "num_inference_steps": 7, "guidance_scale": 0}
    request = images_of({**body, "seed": 42, "clip_skip": 2})
    assert (request.width, request.height, request.count, request.steps, request.guidance) == (640, 512, 2, 7, 0)
    assert (request.strength, request.seed, request.options, request.output_format) == (
        None,
        42,
        {"clip_skip": 2},
        "png",
    )
    assert len({images_of(body).seed for _ in range(3)}) == 3, "drawn at random"


def test_the_numbers_of_a_form_are_numbers() -> None:
    request = images_of({"prompt": "7", "n": "2", "strength": "0.5", "seed": "3", "eta": "0.25", "image": b"png"})
    assert (request.prompt, request.count, request.strength, request.seed) == ("7", 2, 0.5, 3)
    assert (request.options, request.images) == ({"eta": 0.25}, [b"png"])


@pytest.mark.parametrize("size", ["512", "0x512", "512x0", "99999x1", "512X512", "-1x5", "512x512x3"])
def test_a_size_that_is_none_is_refused_by_its_name(size: str) -> None:
    with pytest.raises(RefusedError, match="size: ") as refused:
        image_size(size)
    assert refused.value.kind == INVALID_FIELD


@pytest.mark.parametrize("size", ["", "auto"])
def test_the_model_may_choose_the_size(size: str) -> None:
    assert image_size(size) == (None, None)


def test_a_temperature_of_zero_is_not_a_temperature_that_is_left_out() -> None:
    assert transcription_of({"file": b"", "temperature": "0.0"}).temperature == 0
    assert transcription_of({"file": b""}).temperature is None


@pytest.mark.parametrize(("text", "detects"), [("true", True), ("false", False), (None, None)])
def test_the_detection_of_voices_is_as_configured_unless_the_request_says_so(
    text: str | None, detects: bool | None
) -> None:
    body = {"file": b""} if text is None else {"file": b"", "voice_detection": text}
    assert transcription_of(body).voice_detection is detects


def test_progress_is_told_in_the_unit_of_the_work() -> None:
    event = _event(type="work_progress", work_progress={"done": 1, "total": 4, "stage": "reading the prompt"})
    for reader, unit in ((ImageEvents(), 1), (TranscriptEvents(), 2)):
        (told,) = reader.read(event)
        progress = told.work_progress
        assert (progress.unit, progress.done, progress.total, progress.stage) == (unit, 1, 4, "reading the prompt")


def test_the_language_and_the_length_go_with_the_first_segment_and_with_no_other() -> None:
    words = [{"word": "Hello", "start": 0.1, "end": 0.4, "probability": 0.9}]
    reader, facts = TranscriptEvents(), {"type": "transcript.text.delta", "language": "en", "duration": 2.0}
    parts = []
    for start in (0.0, 1.0):
        segment = {"start": start, "end": start + 1, "text": " Hello", "words": words, "avg_logprob": -0.5}
        (event,) = reader.read(_event(delta=" Hello", segment=segment, **facts))
        parts.append(event.transcript)
    assert [(part.language, part.duration_seconds) for part in parts] == [("en", 2.0), ("", 0.0)]
    assert [word.text for word in parts[1].segment.words] == ["Hello"]
    assert (parts[1].segment.mean_logprob, parts[1].segment.HasField("temperature")) == (-0.5, False)


def test_a_recording_without_a_word_still_has_its_length_and_the_usage_counts_it() -> None:
    reader = TranscriptEvents()
    timings = {"predicted_n": 3, "predicted_ms": 1500}
    (event,) = reader.read(
        _event(type="transcript.text.done", language="", duration=4.0, usage={"seconds": 4.0}, timings=timings)
    )
    assert (event.transcript.text, event.transcript.duration_seconds) == ("", 4.0)
    assert (reader.usage.audio_milliseconds, reader.usage.completion_tokens, reader.work_seconds) == (4000, 3, 1.5)


def test_speech_that_breaks_off_or_is_no_base64_is_a_protocol_error() -> None:
    reader = SpeechEvents()
    assert reader.read(_event(type="speech.audio.delta", audio="AAE=", media_type="audio/wav")) == b"\x00\x01"
    with pytest.raises(WeftError) as broken:
        reader.require_end()
    with pytest.raises(WeftError) as wrong:
        reader.read(_event(type="speech.audio.delta", audio="no base64!"))
    assert broken.value.reason is wrong.value.reason is Reason.BACKEND_PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("message", "field"), [("file: is no recording", "file"), ("images[0]: has 9 pixels", "images[0]")]
)
def test_an_invalid_field_is_told_by_its_name(message: str, field: str) -> None:
    error = own_error(INVALID_FIELD, message)
    assert isinstance(error, FieldError)
    assert (error.field, error.message) == (field, message)


def test_errors_of_other_servers_are_not_taken_for_those_of_wefts_own() -> None:
    assert own_error("invalid_request_error", "file: is no recording") is None
    memory = own_error("out_of_memory", "use less")
    assert memory is not None
    assert (memory.reason, memory.message) == (Reason.OUT_OF_MEMORY, "use less")

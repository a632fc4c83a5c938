"""Requests for images and recordings to a library, and its answers as events."""

from typing import Any

import pytest

from runner_svc.engine_host.media_request import MediaReader, image_request, image_size, transcription_request
from runner_svc.engine_host.messages import Answer, Done, Picture, Recording, Segment, Word, Worked
from runner_svc.policy.parameters import EngineParameters, Number, ParameterProfile
from weft.api.common.v1 import audio_pb2, event_pb2, image_pb2
from weft.kernel.errors import FieldError
from weft.kernel.json_objects import to_json_object

PROFILE = ParameterProfile(engine=EngineParameters(engine="a library", allowed={"clip_skip": Number(0, 4, whole=True)}))


def _payload(**extra: Any) -> image_pb2.ImagePayload:
    payload = image_pb2.ImagePayload(prompt="a lighthouse", size="640x512", count=2, steps=7, guidance=0)
    payload.extra_parameters.CopyFrom(to_json_object(extra, "extra"))
    return payload


def test_a_request_for_images_has_what_the_payload_says_and_nothing_for_what_it_leaves_out() -> None:
    request, warnings = image_request(_payload(clip_skip=2), PROFILE, random_seed=42)
    assert (request.width, request.height, request.count, request.steps, request.guidance) == (640, 512, 2, 7, 0)
    assert (request.strength, request.seed, request.options, request.output_format) == (
        None,
        42,
        {"clip_skip": 2},
        "png",
    )
    assert not warnings


def test_a_parameter_that_the_library_does_not_have_is_left_out_with_a_warning() -> None:
    request, warnings = image_request(_payload(sharpness=3), PROFILE, random_seed=1)
    assert request.options == {}
    assert [event.warning.field for event in warnings] == ["sharpness"]


@pytest.mark.parametrize("size", ["512", "0x512", "512x0", "99999x1", "512X512", "-1x5", "512x512x3"])
def test_a_size_that_is_none_is_refused_by_its_name(size: str) -> None:
    with pytest.raises(FieldError) as refused:
        image_size(size)
    assert refused.value.field == "size"


@pytest.mark.parametrize("size", ["", "auto"])
def test_the_model_may_choose_the_size(size: str) -> None:
    assert image_size(size) == (None, None)


def test_a_temperature_of_zero_is_not_a_temperature_that_is_left_out() -> None:
    assert transcription_request(audio_pb2.TranscriptionPayload(temperature=0), "/f").temperature == 0
    assert transcription_request(audio_pb2.TranscriptionPayload(), "/f").temperature is None


def _events(unit: event_pb2.WorkUnit.ValueType, *answers: Answer) -> list[event_pb2.InferenceEvent]:
    return MediaReader(unit).read(list(answers))


def test_of_several_reports_of_progress_that_arrive_together_the_last_is_told() -> None:
    picture = Picture(id=1, index=0, data=b"png", media_type="image/png", seed=9)
    reports = [Worked(id=1, done=done, total=4) for done in (1, 2)]
    events = _events(event_pb2.WORK_UNIT_STEPS, reports[0], picture, reports[1])
    assert [event.WhichOneof("event") for event in events] == ["work_progress", "image"]
    assert (events[0].work_progress.done, events[1].image.seed) == (2, 9)


def test_a_preview_is_not_an_image() -> None:
    preview = Picture(id=1, index=0, data=b"png", media_type="image/png", partial_index=0)
    (event,) = _events(event_pb2.WORK_UNIT_STEPS, preview)
    assert (event.WhichOneof("event"), event.partial_image.partial_index) == ("partial_image", 0)


def test_the_language_and_the_length_go_with_the_first_segment_and_with_no_other() -> None:
    words = [Word(start=0.1, end=0.4, text="Hello", probability=0.9)]
    first, second = (Segment(id=1, start=at, end=at + 1, text=" Hello", words=words) for at in (0.0, 1.0))
    events = _events(
        event_pb2.WORK_UNIT_AUDIO_SECONDS, Recording(id=1, language="en", duration_seconds=2.0), first, second
    )
    parts = [event.transcript for event in events]
    assert [(part.language, part.duration_seconds) for part in parts] == [("en", 2.0), ("", 0.0)]
    assert [word.text for word in parts[1].segment.words] == ["Hello"]


def test_a_recording_without_a_word_still_has_its_length_and_the_receipt_counts_it() -> None:
    events = _events(
        event_pb2.WORK_UNIT_AUDIO_SECONDS,
        Recording(id=1, duration_seconds=4.0),
        Done(id=1, audio_seconds=4.0),
    )
    assert [event.WhichOneof("event") for event in events] == ["transcript", "usage", "finished"]
    assert events[0].transcript.duration_seconds == 4.0
    assert events[-1].finished.receipt.usage.audio_milliseconds == 4000

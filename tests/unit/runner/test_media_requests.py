"""Requests for images and recordings as an engine's server reads them, and its events as the runner does;
pieces of recordings, and whole answers."""

import json
from typing import Any

import pytest
from kit.presence import present

from runner_svc.openai_upstream.errors import own_error
from runner_svc.openai_upstream.media import GRANULARITIES, form
from runner_svc.openai_upstream.media_stream import ImageEvents, SpeechEvents, TranscriptEvents
from runner_svc.servicers import inference
from runner_svc.servicers.inference import WholeAnswerWriter
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.engines.engine_host.http_server import INVALID_FIELD, RefusedError, _body
from weft_extensions.engines.engine_host.media_routes import image_size, images_of, transcription_of
from weft_extensions.engines.faster_whisper.listening import voices_of
from weft_extensions.engines.faster_whisper.recording import SAMPLE_RATE

BOUNDARY_IN_DATA = b"\x00\r\n--not the boundary\r\n\r\n\xff"


def _event(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_form_is_read_as_written_by_the_client() -> None:
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


def test_image_request_has_the_body_fields_and_no_defaults() -> None:
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


def test_form_numbers_are_parsed_as_numbers() -> None:
    request = images_of({"prompt": "7", "n": "2", "strength": "0.5", "seed": "3", "eta": "0.25", "image": b"png"})
    assert (request.prompt, request.count, request.strength, request.seed) == ("7", 2, 0.5, 3)
    assert (request.options, request.images) == ({"eta": 0.25}, [b"png"])


@pytest.mark.parametrize("size", ["512", "0x512", "512x0", "99999x1", "512X512", "-1x5", "512x512x3"])
def test_invalid_size_error_names_it(size: str) -> None:
    with pytest.raises(RefusedError, match="size: ") as refused:
        image_size(size)
    assert refused.value.kind == INVALID_FIELD


@pytest.mark.parametrize("size", ["", "auto"])
def test_model_may_choose_the_size(size: str) -> None:
    assert image_size(size) == (None, None)


def test_zero_temperature_is_distinguished_from_an_unset_one() -> None:
    assert transcription_of({"file": b"", "temperature": "0.0"}).temperature == 0
    assert transcription_of({"file": b""}).temperature is None


@pytest.mark.parametrize(("text", "detects"), [("true", True), ("false", False), (None, None)])
def test_voice_detection_follows_the_configuration_unless_requested(text: str | None, detects: bool | None) -> None:
    body = {"file": b""} if text is None else {"file": b"", "voice_detection": text}
    assert transcription_of(body).voice_detection is detects


def test_progress_is_reported_in_the_unit_of_the_work() -> None:
    event = _event(type="work_progress", work_progress={"done": 1, "total": 4, "stage": "reading the prompt"})
    for reader, unit in ((ImageEvents(), 1), (TranscriptEvents(), 2)):
        (told,) = reader.read(event)
        progress = told.work_progress
        assert (progress.unit, progress.done, progress.total, progress.stage) == (unit, 1, 4, "reading the prompt")


def test_language_and_length_are_only_in_the_first_segment() -> None:
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


def test_silent_recording_still_has_its_length_in_the_usage() -> None:
    reader = TranscriptEvents()
    timings = {"predicted_n": 3, "predicted_ms": 1500}
    (event,) = reader.read(
        _event(type="transcript.text.done", language="", duration=4.0, usage={"seconds": 4.0}, timings=timings)
    )
    assert (event.transcript.text, event.transcript.duration_seconds) == ("", 4.0)
    assert (reader.usage.audio_milliseconds, reader.usage.completion_tokens, reader.work_seconds) == (4000, 3, 1.5)


def test_truncated_or_non_base64_speech_is_a_protocol_error() -> None:
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
def test_invalid_field_is_reported_by_name(message: str, field: str) -> None:
    error = own_error(INVALID_FIELD, message)
    assert isinstance(error, FieldError)
    assert (error.field, error.message) == (field, message)


def test_errors_of_other_servers_are_not_mistaken_for_weft_errors() -> None:
    assert own_error("invalid_request_error", "file: is no recording") is None
    memory = present(own_error("out_of_memory", "use less"))
    assert (memory.reason, memory.message) == (Reason.OUT_OF_MEMORY, "use less")


PIECE = 180


def _span(found: list[tuple[int, int]], *, is_last: bool) -> tuple[float, float, float, bool]:
    voices = [{"start": begin * SAMPLE_RATE, "end": end * SAMPLE_RATE} for begin, end in found]
    span = voices_of(voices, PIECE * SAMPLE_RATE, is_last=is_last)
    return span.begin / SAMPLE_RATE, span.end / SAMPLE_RATE, span.used / SAMPLE_RATE, span.is_closed


@pytest.mark.parametrize(
    ("found", "is_last", "span"),
    [
        ([], True, (0, 0, 180, True)),
        # A voice may begin in the last moment.
        ([], False, (0, 0, 179, True)),
        ([(10, 20), (30, 40)], False, (10, 40, 40, True)),
        ([(10, 20), (30, 40)], True, (10, 40, 180, True)),
        # The last voice goes on in the next piece, which begins with it.
        ([(10, 20), (30, 180)], False, (10, 20, 30, True)),
        ([(10, 20), (30, 180)], True, (10, 180, 180, True)),
        # One voice over the end of the piece: it is cut as without a detector.
        ([(10, 180)], False, (10, 180, 180, False)),
        ([(10, 180)], True, (10, 180, 180, True)),
    ],
)
def test_recording_chunk_is_cut_at_silence(
    found: list[tuple[int, int]], is_last: bool, span: tuple[float, float, float, bool]
) -> None:
    assert _span(found, is_last=is_last) == span


def _progress(done: int) -> Frame:
    return [event_pb2.InferenceEvent(work_progress=event_pb2.WorkProgress(done=done, total=4))]


def _image(index: int, size: int = 1) -> Frame:
    image = image_pb2.GeneratedImage(index=index, image=chat_pb2.MediaPart(data=b"x" * size))
    return [event_pb2.InferenceEvent(image=image)]


END: Frame = [event_pb2.InferenceEvent(finished=event_pb2.Finished())]


class Written:
    def __init__(self) -> None:
        self.frames: list[Frame] = []

    async def write(self, frame: Frame) -> None:
        self.frames.append(frame)


async def test_whole_answer_is_held_until_its_end_and_its_progress_is_not() -> None:
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=True)
    for frame in (_progress(1), _image(0), _progress(2)):
        await writer.put(frame)
    assert written.frames == [_progress(1), _progress(2)]
    await writer.put(_image(1))
    await writer.put(END)
    assert written.frames[2:] == [_image(0), _image(1), END]


async def test_streamed_answer_is_not_held() -> None:
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=False)
    await writer.put(_image(0))
    assert written.frames == [_image(0)]


async def test_held_content_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MAX_WHOLE_BYTES", 1000)
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=True)
    await writer.put(_image(0, 600))
    assert not written.frames
    await writer.put(_image(1, 600))
    assert written.frames == [_image(0, 600), _image(1, 600)]
    await writer.put(_image(2))
    await writer.put(END)
    assert written.frames[2:] == [_image(2), END]


async def test_end_that_arrives_with_the_last_content_is_sent() -> None:
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=True)
    await writer.put(_image(0))
    await writer.put([*_image(1), *END])
    assert written.frames == [_image(0), [*_image(1), *END]]

"""Images and transcriptions collected from their streams."""

from weft.api.common.v1 import audio_pb2, event_pb2
from weft.dispatch.frames import Frame, collected_transcription


def _part(text: str, **fields: object) -> Frame:
    return [event_pb2.InferenceEvent(transcript=audio_pb2.TranscriptPart(text=text, **fields))]  # type: ignore[arg-type]


def test_transcription_chunks_are_joined_with_the_header_of_the_first() -> None:
    segment = audio_pb2.TranscriptionSegment(start_seconds=1.0, end_seconds=2.5, text=" there")
    whole = collected_transcription(
        [_part(" Hello", language="en", duration_seconds=2.5), _part(" there", segment=segment)]
    )
    assert (whole.text, whole.language, whole.duration_seconds) == ("Hello there", "en", 2.5)
    assert list(whole.segments) == [segment]


def test_silent_recording_is_an_empty_transcription_with_its_length() -> None:
    whole = collected_transcription([_part("", duration_seconds=4.0)])
    assert (whole.text, whole.duration_seconds, len(whole.segments)) == ("", 4.0, 0)

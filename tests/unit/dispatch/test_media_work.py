"""The work of requests for media, from their payloads: bounded, and without decoding anything."""

import io
import struct
import wave

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.api.common.v1.audio_pb2 import SpeechPayload, TranscriptionPayload
from weft.api.common.v1.chat_pb2 import ChatPayload, MediaPart
from weft.api.common.v1.image_pb2 import ImagePayload
from weft.dispatch.media_work import (
    COMPRESSED_BYTES_PER_SECOND,
    DEFAULT_STEPS,
    MAX_WORK,
    MIN_BYTES_PER_SECOND,
    recording_seconds,
    work_of,
)
from weft.dispatch.payload_description import describe


def wav(seconds: float, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(bytes(2 * int(seconds * rate)))
    return file.getvalue()


def flac(seconds: float, size: int, rate: int = 44_100) -> bytes:
    """The marker and STREAMINFO of a file, and bytes in place of its frames."""
    packed = (rate << 44) | (1 << 41) | (15 << 36) | int(seconds * rate)
    head = b"fLaC" + b"\x80\x00\x00\x22" + bytes(10) + packed.to_bytes(8, "big") + bytes(16)
    return head + bytes(size - len(head))


def mp3(seconds: float, kbits: int = 64, *, tag: bytes = b"") -> bytes:
    """Frames of MPEG 1 layer III, after an ID3 tag."""
    index = (32, 40, 48, 56, 64, 80, 96, 112, 128).index(kbits) + 1
    frames = b"\xff\xfb" + bytes([index << 4]) + bytes(int(seconds * kbits * 125) - 3)
    if not tag:
        return frames
    size = len(tag)
    head = b"ID3\x04\x00\x00" + bytes((size >> shift) & 0x7F for shift in (21, 14, 7, 0))
    return head + tag + frames


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (wav(12.5), 12.5),
        (wav(3.0, rate=48_000), 3.0),
        (flac(90.0, 600_000), 90.0),
        (mp3(30.0), 30.0),
        (mp3(10.0, 128, tag=b"\xff\xfb\x10" + bytes(500)), 10.0),
    ],
    ids=["wav", "wav of 48 kHz", "flac", "mp3", "mp3 after a tag"],
)
def test_recording_length_is_read_from_its_header(data: bytes, seconds: float) -> None:
    assert recording_seconds(data) == pytest.approx(seconds, rel=0.01)


def test_recording_without_a_known_header_is_measured_by_size() -> None:
    assert recording_seconds(b"OggS" + bytes(159_996)) == pytest.approx(160_000 / COMPRESSED_BYTES_PER_SECOND)
    assert recording_seconds(b"") == 0.0


def test_claimed_recording_length_is_capped_by_codec_limits() -> None:
    assert recording_seconds(flac(7 * 86_400.0, 10_000, rate=8_000)) == 10_000 / MIN_BYTES_PER_SECOND


def test_header_with_zero_length_does_not_make_a_large_file_free() -> None:
    liar = bytearray(wav(1.0))
    liar[28:32] = struct.pack("<I", 2**32 - 1)
    assert recording_seconds(bytes(liar) + bytes(60_000_000)) > 9.0


@given(
    data=st.binary(max_size=3_000),
    head=st.sampled_from([b"", b"RIFF\0\0\0\0WAVEfmt ", b"fLaC", b"ID3\4\0\0", b"\xff\xfb"]),
)
def test_length_is_finite_for_any_bytes(data: bytes, head: bytes) -> None:
    found = recording_seconds(head + data)
    assert 0.0 <= found <= len(head + data) / MIN_BYTES_PER_SECOND


def test_image_work_is_steps_times_megapixels_per_image() -> None:
    assert work_of(ImagePayload(size="1000x500", steps=20, count=3)) == pytest.approx(20 * 3 * 0.5)


def test_image_without_options_has_default_steps_and_size() -> None:
    assert work_of(ImagePayload(prompt="a lighthouse")) == pytest.approx(DEFAULT_STEPS * 1.048576)
    assert work_of(ImagePayload(size="auto", steps=4)) == pytest.approx(4 * 1.048576)


def test_work_is_bounded_for_any_request() -> None:
    assert work_of(ImagePayload(size="99999x99999", steps=2**31 - 1, count=2**31 - 1)) == MAX_WORK
    assert work_of(ImagePayload(size="1x1", steps=-5, count=-5)) > 0.0


def test_speech_work_is_its_character_count() -> None:
    assert work_of(SpeechPayload(input="The lazy dog.")) == 13.0


def test_media_description_has_media_work_and_no_chat_work() -> None:
    payload = TranscriptionPayload(audio=MediaPart(data=wav(2.0), media_type="audio/wav"))
    assert describe(payload, salt="").work == pytest.approx(2.0, rel=0.02)
    assert describe(ChatPayload(), salt="").work == 0.0

"""Validation of media files before an engine gets them."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.gateway_config import MediaConfig
from gateway.media.content import (
    MAX_IMAGE_STEPS,
    checked_audio,
    checked_image,
    mp3_seconds,
    size_of,
    wav_seconds,
)
from weft.kernel.errors.error_tree import FieldError
from weft_testing.media_files import bmp, gif, jpeg, mp3, png, wav, webp, webp_lossless

CONFIG = MediaConfig()
FIELD = "messages[0].content[0].image_url.url"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
PLAYLIST = b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
FFCONCAT = b"ffconcat version 1.0\nfile /etc/passwd\n"

IMAGES = {
    "image/png": png(3, 2),
    "image/jpeg": jpeg(3, 2),
    "image/gif": gif(3, 2),
    "image/webp": webp(3, 2),
    "image/bmp": bmp(3, 2),
}


@pytest.mark.parametrize(("media_type", "data"), IMAGES.items())
def test_every_known_image_is_measured_and_kept_unchanged(media_type: str, data: bytes) -> None:
    size = size_of(data, media_type, 300)
    assert size is not None
    assert (size.width, size.height, size.frames) == (3, 2, 1)
    file = checked_image(data, FIELD, CONFIG)
    assert (file.data, file.media_type) == (data, media_type)


def test_webp_variants_are_measured_alike() -> None:
    lossy = b"RIFF\0\0\0\0WEBPVP8 \x0a\0\0\0\x10\x02\x00\x9d\x01\x2a\x03\x00\x02\x00"
    for data in (webp_lossless(3, 2), lossy):
        size = size_of(data, "image/webp", 300)
        assert size is not None
        assert (size.width, size.height) == (3, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (SVG, "image/svg[+]xml"),
        (b"<?xml version='1.0'?><svg/>", "an XML or SVG document"),
        (b"\n<!DOCTYPE html><p>not found", "an HTML page"),
        (b"%PDF-1.7", "a PDF document"),
        (b'{"error": "no such file"}', "JSON"),
        (b"II*\0", "image/tiff"),
        (b"\0\0\0\x18ftypheic", "image/heic"),
        (b"\0\0\0\x18ftypavif", "image/avif"),
        (wav(seconds=1), "audio/wav"),
        *((data, "of no known type") for data in (PLAYLIST, FFCONCAT, b"GIF", b"\x00" * 64, b"text")),
    ],
    ids=repr,
)
def test_file_that_is_no_image_is_refused_with_what_it_is(data: bytes, words: str) -> None:
    with pytest.raises(FieldError, match=f"must be a PNG, .*; its content is {words}$") as refused:
        checked_image(data, FIELD, CONFIG)
    assert refused.value.field == FIELD


@pytest.mark.parametrize(
    "data",
    [
        png(60_000, 60_000, pixels=False),
        jpeg(60_000, 60_000),
        gif(60_000, 60_000),
        webp(60_000, 60_000),
        webp_lossless(16_384, 16_384),
        bmp(60_000, 60_000),
        png(2**31 - 1, 1, pixels=False),
        png(8192, 8193, pixels=False),
        png(600, 600, frames=300, pixels=False),
    ],
    ids=str,
)
def test_too_many_pixels_are_refused_from_the_header(data: bytes) -> None:
    assert len(data) < 20_000
    with pytest.raises(FieldError, match=r"gateway\.media\.max_pixels"):
        checked_image(data, FIELD, CONFIG)


@pytest.mark.parametrize(
    "data",
    [
        gif(1, 1, frames=100_000),
        gif(1, 1, frames=301),
        webp(1, 1, frames=100_000),
        png(1, 1, frames=100_000),
        png(1, 1, frames=2**32 - 1),
    ],
    ids=["gif", "one-too-many", "webp", "apng", "apng-max"],
)
def test_too_many_frames_are_refused(data: bytes) -> None:
    with pytest.raises(FieldError, match=r"has more than \d+ frames"):
        checked_image(data, FIELD, CONFIG)


def test_largest_image_and_longest_animation_are_accepted() -> None:
    checked_image(png(8192, 8192, pixels=False), FIELD, CONFIG)
    checked_image(gif(1, 1, frames=300), FIELD, CONFIG)


def test_frame_beyond_the_canvas_counts_with_its_own_size() -> None:
    small_canvas = bytearray(gif(60_000, 60_000))
    small_canvas[6:10] = struct.pack("<HH", 1, 1)
    with pytest.raises(FieldError, match="max_pixels"):
        checked_image(bytes(small_canvas), FIELD, CONFIG)


def test_parsing_stops_after_too_many_tiny_blocks() -> None:
    blocks = gif(1, 1)[:-2] + b"\x01\x00" * (MAX_IMAGE_STEPS + 1)
    assert size_of(blocks, "image/gif", 300) is None


@pytest.mark.parametrize("data", [png(0, 5), png(5, 0), b"\x89PNG\r\n\x1a\n", gif(1, 1, frames=0), bmp(0, 0), b"BM"])
def test_image_without_dimensions_or_header_is_incomplete(data: bytes) -> None:
    with pytest.raises(FieldError, match="is not a complete"):
        checked_image(data, FIELD, CONFIG)


@given(st.data())
def test_truncated_or_corrupt_files_do_not_crash_the_readers(source: st.DataObject) -> None:
    whole = bytearray(source.draw(st.sampled_from([*IMAGES.values(), wav(seconds=0.1), mp3(frames=3)])))
    for _ in range(source.draw(st.integers(0, 8))):
        whole[source.draw(st.integers(0, len(whole) - 1))] = source.draw(st.integers(0, 255))
    data = bytes(whole[: source.draw(st.integers(0, len(whole)))])
    with suppress(FieldError):  # and nothing else
        checked_image(data, FIELD, CONFIG)
    with suppress(FieldError):
        checked_audio(data, FIELD, CONFIG)
    for seconds in (wav_seconds(data), mp3_seconds(data)):
        assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (wav(seconds=2), "audio/wav"),
        (wav(seconds=2, channels=2), "audio/wav"),
        (wav(seconds=2, said_seconds=0), "audio/wav"),
        (mp3(frames=10), "audio/mpeg"),
        (mp3(frames=10, tag=b"x" * 50), "audio/mpeg"),
        (b"fLaC" + bytes(60), "audio/flac"),
        (b"OggS" + bytes(60), "audio/ogg"),
        (b"\0\0\0\x18ftypM4A " + bytes(60), "audio/mp4"),
        (b"\x1aE\xdf\xa3" + bytes(60), "audio/webm"),
        (b"\xff\xf1\x50\x80" + bytes(60), "audio/aac"),
    ],
)
def test_recording_is_kept_unchanged_under_the_type_of_its_bytes(data: bytes, media_type: str) -> None:
    file = checked_audio(data, FIELD, CONFIG)
    assert (file.data, file.media_type) == (data, media_type)


@pytest.mark.parametrize("length", [0, 0x7FFF_F000, 2**31, 2**32 - 1], ids=["none", "SoX", "arecord", "ffmpeg"])
def test_recording_that_a_program_wrote_to_a_pipe_is_read_to_its_end(length: int) -> None:
    """Regression: those of SoX and arecord were refused as incomplete."""
    data = wav(seconds=2)
    index = data.index(b"data") + 4
    assert wav_seconds(data[:index] + length.to_bytes(4, "little") + data[index + 4 :]) == pytest.approx(2)


def test_recording_length_is_read_from_its_header() -> None:
    assert wav_seconds(wav(seconds=2)) == pytest.approx(2)
    assert mp3_seconds(mp3(frames=100)) == pytest.approx(2.6, abs=0.1)


@pytest.mark.parametrize(
    "data",
    [
        wav(seconds=0),
        wav(seconds=1, said_seconds=36_000),
        wav(seconds=1)[:30],
        wav(seconds=1).replace(b"fmt ", b"fmt_"),
        b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f",
        b"\xff\xfb\x10\x00" + bytes(200),
        b"\xff\xfb\xf0\x00" + bytes(200),
        b"RIFF\x00\x00\x00\x00WAVE",
    ],
    ids=lambda value: repr(value)[:40],
)
def test_incomplete_recording_is_refused(data: bytes) -> None:
    with pytest.raises(FieldError, match="is not a complete") as refused:
        checked_audio(data, FIELD, CONFIG)
    assert refused.value.field == FIELD


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (PLAYLIST, "of no known type"),
        (FFCONCAT, "of no known type"),
        (png(1, 1), "image/png"),
        (b"#!AMR\n", "audio/amr"),
    ],
)
def test_file_that_is_no_recording_is_refused_with_what_it_is(data: bytes, words: str) -> None:
    with pytest.raises(FieldError, match=f"must be a WAV, MP3, .*; its content is {words}$"):
        checked_audio(data, FIELD, CONFIG)


@pytest.mark.parametrize("data", [wav(seconds=61), mp3(frames=2400)])
def test_recording_beyond_the_length_limit_is_refused(data: bytes) -> None:
    with pytest.raises(FieldError, match=r"gateway\.media\.max_audio_seconds"):
        checked_audio(data, FIELD, MediaConfig(max_audio_seconds=60))

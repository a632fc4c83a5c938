"""Validation of media files before an engine gets them."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import MediaConfig
from gateway.media.content import (
    IMAGE_TYPES,
    MAX_IMAGE_STEPS,
    checked_audio,
    checked_image,
    fetched_image,
    mp3_seconds,
    size_of,
    wav_seconds,
)
from weft.kernel.errors import FieldError
from weft.kernel.media_types import image_type_of
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
    file = checked_image(data, media_type, FIELD, CONFIG)
    assert (file.data, file.media_type) == (data, media_type)


def test_webp_variants_are_measured_alike() -> None:
    lossy = b"RIFF\0\0\0\0WEBPVP8 \x0a\0\0\0\x10\x02\x00\x9d\x01\x2a\x03\x00\x02\x00"
    for data in (webp_lossless(3, 2), lossy):
        size = size_of(data, "image/webp", 300)
        assert size is not None
        assert (size.width, size.height) == (3, 2)


@pytest.mark.parametrize("said", sorted(IMAGE_TYPES))
@pytest.mark.parametrize(
    "data", [SVG, PLAYLIST, FFCONCAT, b"%PDF-1.7", b"GIF", b"\x00" * 64, b"text", b"<html>", b"PK\x03\x04"], ids=repr
)
def test_unrecognized_bytes_are_not_an_image_for_any_declared_type(data: bytes, said: str) -> None:
    with pytest.raises(FieldError, match="its content is an image of no known type") as refused:
        checked_image(data, said, FIELD, CONFIG)
    assert refused.value.field == FIELD


@pytest.mark.parametrize("said", ["image/svg+xml", "text/html", "image/tiff", "image/avif", "video/mp4", "", "png"])
def test_unknown_type_is_refused_even_for_an_image(said: str) -> None:
    with pytest.raises(FieldError, match="must be one of image/bmp"):
        checked_image(IMAGES["image/png"], said, FIELD, CONFIG)


def test_mismatched_type_and_content_are_refused() -> None:
    with pytest.raises(FieldError, match="is declared as image/png, but its content is image/jpeg"):
        checked_image(IMAGES["image/jpeg"], "image/png", FIELD, CONFIG)


def test_alternative_type_names_are_accepted_and_normalized() -> None:
    assert checked_image(IMAGES["image/jpeg"], "image/JPG", FIELD, CONFIG).media_type == "image/jpeg"


@pytest.mark.parametrize("content_type", ["image/png", "IMAGE/PNG; charset=binary", "application/octet-stream", ""])
def test_fetched_file_type_must_match_its_bytes_and_its_server(content_type: str) -> None:
    assert fetched_image(IMAGES["image/png"], content_type, FIELD, CONFIG).media_type == "image/png"


@pytest.mark.parametrize("content_type", ["text/html", "image/jpeg", "image/svg+xml"])
def test_fetched_file_with_a_different_server_type_is_refused(content_type: str) -> None:
    with pytest.raises(FieldError):
        fetched_image(IMAGES["image/png"], content_type, FIELD, CONFIG)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (png(60_000, 60_000, pixels=False), "image/png"),
        (jpeg(60_000, 60_000), "image/jpeg"),
        (gif(60_000, 60_000), "image/gif"),
        (webp(60_000, 60_000), "image/webp"),
        (webp_lossless(16_384, 16_384), "image/webp"),
        (bmp(60_000, 60_000), "image/bmp"),
        (png(2**31 - 1, 1, pixels=False), "image/png"),
        (png(8192, 8193, pixels=False), "image/png"),
        (png(600, 600, frames=300, pixels=False), "image/png"),
    ],
    ids=str,
)
def test_too_many_pixels_are_refused_from_the_header(data: bytes, media_type: str) -> None:
    assert len(data) < 20_000
    with pytest.raises(FieldError, match=r"gateway\.media\.max_pixels"):
        checked_image(data, media_type, FIELD, CONFIG)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (gif(1, 1, frames=100_000), "image/gif"),
        (gif(1, 1, frames=301), "image/gif"),
        (webp(1, 1, frames=100_000), "image/webp"),
        (png(1, 1, frames=100_000), "image/png"),
        (png(1, 1, frames=2**32 - 1), "image/png"),
    ],
    ids=["gif", "one-too-many", "webp", "apng", "apng-max"],
)
def test_too_many_frames_are_refused(data: bytes, media_type: str) -> None:
    with pytest.raises(FieldError, match=r"has more than \d+ frames"):
        checked_image(data, media_type, FIELD, CONFIG)


def test_largest_image_and_longest_animation_are_accepted() -> None:
    checked_image(png(8192, 8192, pixels=False), "image/png", FIELD, CONFIG)
    checked_image(gif(1, 1, frames=300), "image/gif", FIELD, CONFIG)


def test_frame_beyond_the_canvas_counts_with_its_own_size() -> None:
    small_canvas = bytearray(gif(60_000, 60_000))
    small_canvas[6:10] = struct.pack("<HH", 1, 1)
    with pytest.raises(FieldError, match="max_pixels"):
        checked_image(bytes(small_canvas), "image/gif", FIELD, CONFIG)


def test_parsing_stops_after_too_many_tiny_blocks() -> None:
    blocks = gif(1, 1)[:-2] + b"\x01\x00" * (MAX_IMAGE_STEPS + 1)
    assert size_of(blocks, "image/gif", 300) is None


@pytest.mark.parametrize("data", [png(0, 5), png(5, 0), b"\x89PNG\r\n\x1a\n", gif(1, 1, frames=0), bmp(0, 0), b"BM"])
def test_image_without_dimensions_or_header_is_incomplete(data: bytes) -> None:
    media_type = image_type_of(data)
    assert media_type is not None
    with pytest.raises(FieldError, match="is not a complete"):
        checked_image(data, media_type, FIELD, CONFIG)


@given(st.data())
def test_truncated_or_corrupt_files_do_not_crash_the_readers(source: st.DataObject) -> None:
    whole = bytearray(source.draw(st.sampled_from([*IMAGES.values(), wav(seconds=0.1), mp3(frames=3)])))
    for _ in range(source.draw(st.integers(0, 8))):
        whole[source.draw(st.integers(0, len(whole) - 1))] = source.draw(st.integers(0, 255))
    data = bytes(whole[: source.draw(st.integers(0, len(whole)))])
    for media_type in IMAGE_TYPES:
        with suppress(FieldError):  # and nothing else
            checked_image(data, media_type, FIELD, CONFIG)
    for seconds in (wav_seconds(data), mp3_seconds(data)):
        assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    ("data", "audio_format", "media_type"),
    [
        (wav(seconds=2), "wav", "audio/wav"),
        (wav(seconds=2, channels=2), "wav", "audio/wav"),
        (wav(seconds=2, said_seconds=0), "wav", "audio/wav"),
        (mp3(frames=10), "mp3", "audio/mpeg"),
        (mp3(frames=10, tag=b"x" * 50), "mp3", "audio/mpeg"),
    ],
)
def test_recording_is_kept_unchanged(data: bytes, audio_format: str, media_type: str) -> None:
    file = checked_audio(data, audio_format, FIELD, CONFIG)
    assert (file.data, file.media_type) == (data, media_type)


@pytest.mark.parametrize("length", [0, 0x7FFF_F000, 2**31, 2**32 - 1], ids=["none", "SoX", "arecord", "ffmpeg"])
def test_recording_that_a_program_wrote_to_a_pipe_is_read_to_its_end(length: int) -> None:
    """Regression: those of SoX and arecord were refused as incomplete."""
    data = wav(seconds=2)
    place = data.index(b"data") + 4
    assert wav_seconds(data[:place] + length.to_bytes(4, "little") + data[place + 4 :]) == pytest.approx(2)


def test_recording_length_is_read_from_its_header() -> None:
    assert wav_seconds(wav(seconds=2)) == pytest.approx(2)
    assert mp3_seconds(mp3(frames=100)) == pytest.approx(2.6, abs=0.1)


@pytest.mark.parametrize(
    ("data", "audio_format"),
    [
        (wav(seconds=0), "wav"),
        (wav(seconds=1, said_seconds=36_000), "wav"),
        (wav(seconds=1)[:30], "wav"),
        (wav(seconds=1).replace(b"fmt ", b"fmt_"), "wav"),
        (mp3(frames=3), "wav"),
        (wav(seconds=1), "mp3"),
        (PLAYLIST, "wav"),
        (PLAYLIST, "mp3"),
        (FFCONCAT, "mp3"),
        (b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f", "mp3"),
        (b"\xff\xfb\x10\x00" + bytes(200), "mp3"),
        (b"\xff\xfb\xf0\x00" + bytes(200), "mp3"),
        (b"\xff\xff\xff\xff", "mp3"),
        (b"OggS" + bytes(60), "mp3"),
        (b"RIFF\x00\x00\x00\x00WAVE", "wav"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_incomplete_recording_is_refused(data: bytes, audio_format: str) -> None:
    with pytest.raises(FieldError, match="is not a complete") as refused:
        checked_audio(data, audio_format, FIELD, CONFIG)
    assert refused.value.field == FIELD


@pytest.mark.parametrize(("data", "audio_format"), [(wav(seconds=61), "wav"), (mp3(frames=2400), "mp3")])
def test_recording_beyond_the_length_limit_is_refused(data: bytes, audio_format: str) -> None:
    with pytest.raises(FieldError, match=r"gateway\.media\.max_audio_seconds"):
        checked_audio(data, audio_format, FIELD, MediaConfig(max_audio_seconds=60))

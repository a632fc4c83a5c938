"""Streaming encoders of generated speech.

Samples are 16-bit little-endian mono. The length of a stream is unknown, so a WAV header contains the maximum lengths,
as on other speech servers.
"""

import struct
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

from weft_extensions.engines.engine_host.http_server import UNSUPPORTED, FieldRefusedError, RefusedError

SAMPLE_BYTES = 2
PCM_RATE = 24_000
"""Sample rate of `pcm`, which has no header; the same as OpenAI's."""
OPUS_RATE = 48_000
MEDIA_TYPES = MappingProxyType(
    {
        "mp3": "audio/mpeg",
        "opus": "audio/opus",
        "aac": "audio/aac",
        "flac": "audio/flac",
        "wav": "audio/wav",
        "pcm": "audio/pcm",
    }
)
USUAL_FORMAT = "mp3"
UNENCODED = ("wav",)
"""Formats that need no library."""
_CONTAINERS = MappingProxyType(
    {
        # Without tags and the length frame, which would be written at the end.
        "mp3": ("mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
        # Pages of 0.1 s, so that playback starts early.
        "opus": ("ogg", "libopus", {"page_duration": "100000"}),
        "aac": ("adts", "aac", {}),
        "flac": ("flac", "flac", {}),
    }
)
_UNKNOWN_BYTES = 0xFFFF_FFFF
_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")


def format_of(library: Any | None, name: str) -> str:
    """Returns the requested format, or the default format that can be encoded."""
    return name or (UNENCODED[0] if library is None else USUAL_FORMAT)


def encoded(library: Any | None, name: str, rate: int, samples: Iterable[bytes]) -> Iterator[bytes]:
    """Yields a recording as its samples arrive; their rate is `rate`. `library`: PyAV; None: it is not installed.

    Raises RefusedError for a format that cannot be encoded.
    """
    if name not in MEDIA_TYPES:
        raise FieldRefusedError("response_format", f"must be one of: {', '.join(MEDIA_TYPES)}")
    if name in UNENCODED:
        header = wav_header(rate)
        for data in samples:
            yield header + data
            header = b""
    elif library is None:
        raise RefusedError(
            f"response_format: encoding {name} needs the environment speech; use "
            f"{', '.join(UNENCODED)}, or run on the runner's machine: weft runtime install speech",
            UNSUPPORTED,
        )
    elif name == "pcm":
        for frame in _resampled(library, rate, PCM_RATE, "s16", samples):
            # A frame's buffer may be longer than its samples.
            yield bytes(frame.planes[0])[: frame.samples * SAMPLE_BYTES]
    else:
        yield from _encoded(library, name, rate, samples)


def wav_header(rate: int) -> bytes:
    """Returns a WAV header for an unknown length."""
    return _WAV_HEADER.pack(
        *(b"RIFF", _UNKNOWN_BYTES, b"WAVE", b"fmt ", 16, 1, 1),
        *(rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES, b"data", _UNKNOWN_BYTES),
    )


def _resampled(library: Any, rate: int, wanted_rate: int, form: str, samples: Iterable[bytes]) -> Iterator[Any]:
    """Yields samples as frames of another rate and format."""
    resampler = library.AudioResampler(format=form, layout="mono", rate=wanted_rate)
    for data in samples:
        frame = library.AudioFrame(format="s16", layout="mono", samples=len(data) // SAMPLE_BYTES, align=1)
        frame.planes[0].update(data)
        frame.sample_rate = rate
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


class _Written:
    """A write-only file without seeking."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


def _encoded(library: Any, name: str, rate: int, samples: Iterable[bytes]) -> Iterator[bytes]:
    """Encodes with FFmpeg's codecs."""
    container_name, codec, options = _CONTAINERS[name]
    wanted_rate, written = OPUS_RATE if name == "opus" else rate, _Written()
    container = library.open(written, "w", format=container_name, options={**options, "flush_packets": "1"})
    stream = container.add_stream(codec, rate=wanted_rate, layout="mono")
    form = stream.codec_context.codec.audio_formats[0].name
    stream.codec_context.format = form
    for frame in _resampled(library, rate, wanted_rate, form, samples):
        container.mux(stream.encode(frame))
        yield written.take()
    container.mux(stream.encode(None))
    container.close()
    yield written.take()

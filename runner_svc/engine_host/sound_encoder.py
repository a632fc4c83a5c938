"""Streaming encoders of generated speech.

Samples are 16-bit little-endian mono. The length of a stream is unknown, so a WAV header contains the maximum lengths,
as on other speech servers.
"""

import struct
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Protocol

from runner_svc.engine_host.http_server import UNSUPPORTED, FieldRefusedError, RefusedError

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


class SoundEncoder(Protocol):
    """Encodes one recording."""

    def feed(self, samples: bytes) -> bytes:
        """Returns the bytes that these samples complete, possibly none."""
        ...

    def finish(self) -> bytes:
        """Returns the last bytes."""
        ...


def format_of(library: Any | None, name: str) -> str:
    """Returns the requested format, or the default format that can be encoded."""
    return name or (UNENCODED[0] if library is None else USUAL_FORMAT)


def make_encoder(library: Any | None, name: str, rate: int) -> SoundEncoder:
    """Returns an encoder for samples of a rate. `library`: PyAV; None: it is not installed.

    Raises RefusedError for a format that cannot be encoded.
    """
    if name not in MEDIA_TYPES:
        raise FieldRefusedError("response_format", f"must be one of: {', '.join(MEDIA_TYPES)}")
    if name in UNENCODED:
        return _WavEncoder(rate)
    if library is None:
        raise RefusedError(
            f"response_format: encoding {name} needs the environment speech; use "
            f"{', '.join(UNENCODED)}, or run on the runner's machine: weft runtime install speech",
            UNSUPPORTED,
        )
    return _PcmEncoder(library, rate) if name == "pcm" else _LibraryEncoder(library, name, rate)


def wav_header(rate: int) -> bytes:
    """Returns a WAV header for an unknown length."""
    return _WAV_HEADER.pack(
        *(b"RIFF", _UNKNOWN_BYTES, b"WAVE", b"fmt ", 16, 1, 1),
        *(rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES, b"data", _UNKNOWN_BYTES),
    )


class _WavEncoder:
    """Prepends a header to the samples."""

    def __init__(self, rate: int) -> None:
        self._header = wav_header(rate)

    def feed(self, samples: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + samples

    def finish(self) -> bytes:
        return b""


class _Resampler:
    """Converts samples to another rate and format with the library."""

    def __init__(self, library: Any, rate: int, wanted_rate: int, form: str) -> None:
        self._library, self._rate = library, rate
        self._resampler = library.AudioResampler(format=form, layout="mono", rate=wanted_rate)

    def frames(self, samples: bytes) -> Iterator[Any]:
        frame = self._library.AudioFrame(format="s16", layout="mono", samples=len(samples) // SAMPLE_BYTES, align=1)
        frame.planes[0].update(samples)
        frame.sample_rate = self._rate
        yield from self._resampler.resample(frame)

    def rest(self) -> Iterator[Any]:
        yield from self._resampler.resample(None)


class _PcmEncoder:
    """Converts the samples to PCM_RATE."""

    def __init__(self, library: Any, rate: int) -> None:
        self._resampler = _Resampler(library, rate, PCM_RATE, "s16")

    def feed(self, samples: bytes) -> bytes:
        return b"".join(map(_samples_of, self._resampler.frames(samples)))

    def finish(self) -> bytes:
        return b"".join(map(_samples_of, self._resampler.rest()))


def _samples_of(frame: Any) -> bytes:
    # A frame's buffer may be longer than its samples.
    return bytes(frame.planes[0])[: frame.samples * SAMPLE_BYTES]


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


class _LibraryEncoder:
    """Encodes with FFmpeg's codecs."""

    def __init__(self, library: Any, name: str, rate: int) -> None:
        container, codec, options = _CONTAINERS[name]
        wanted_rate = OPUS_RATE if name == "opus" else rate
        self._written = _Written()
        self._container = library.open(self._written, "w", format=container, options={**options, "flush_packets": "1"})
        self._stream = self._container.add_stream(codec, rate=wanted_rate, layout="mono")
        form = self._stream.codec_context.codec.audio_formats[0].name
        self._stream.codec_context.format = form
        self._resampler = _Resampler(library, rate, wanted_rate, form)

    def feed(self, samples: bytes) -> bytes:
        for frame in self._resampler.frames(samples):
            self._container.mux(self._stream.encode(frame))
        return self._written.take()

    def finish(self) -> bytes:
        for frame in self._resampler.rest():
            self._container.mux(self._stream.encode(frame))
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._written.take()

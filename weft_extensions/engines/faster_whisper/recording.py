"""Decodes an untrusted recording to pieces of samples, within limits.

PyAV decodes it with FFmpeg, restricted to the formats below: others can reference further files and URLs, which an
untrusted recording must not. Only one piece of the samples is in memory at a time.
"""

import argparse
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

from weft_extensions.engines.engine_host.http_server import FieldRefusedError

SAMPLE_RATE = 16_000
"""Sample rate of Whisper models."""
SAMPLE_SCALE = 32_768.0
"""Samples are read as 16-bit integers, as in the library, so that models return the same words: floats with more digits
change close decisions."""
FORMATS = (
    *("aac", "aiff", "amr", "au", "caf", "flac", "matroska", "webm", "mov", "mp4", "m4a", "mp3", "ogg", "w64", "wav"),
)
"""Supported containers, with FFmpeg's names."""
CODECS = (
    *("aac", "aac_latm", "alac", "amrnb", "amrwb", "flac", "mp1", "mp1float", "mp2", "mp2float", "mp3", "mp3float"),
    *("opus", "libopus", "vorbis", "libvorbis", "libopencore_amrnb", "libopencore_amrwb", "pcm_alaw", "pcm_mulaw"),
    *("pcm_s8", "pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "adpcm_ms", "adpcm_ima_wav"),
)
MAX_BAD_PACKETS = 64
"""Broken packets up to this number are skipped, as in players; with more the file is rejected."""
_PER_SECOND = 1_000_000
"""Units per second of FFmpeg's durations."""


class RecordingReader:
    """An open recording. A context manager."""

    def __init__(self, av: Any, numpy: Any, data: bytes, limits: argparse.Namespace) -> None:
        """Raises RefusedError if the file is not a recording, or exceeds the limits according to its metadata.

        `limits`: the options of the program.
        """
        self._av, self._numpy, self._limits = av, numpy, limits
        self.stated_seconds = 0.0
        """Length in the file's metadata, which may be wrong; 0: unknown."""
        if len(data) > limits.max_audio_bytes:
            raise _refused(f"has {len(data)} bytes; at most {limits.max_audio_bytes} are accepted")
        self._opened = ExitStack()
        try:
            self._container = self._opened.enter_context(_container(av, data))
            self._stream, self.stated_seconds = self._checked_stream()
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def pieces(self, piece_samples: int, on_frame: Callable[[], None]) -> Iterator[Any]:
        """Yields mono samples as float arrays of this length; the last may be shorter.

        `on_frame` is called for every frame and may raise. Raises RefusedError.
        """
        kept: list[Any] = []
        count = total = 0
        for samples in self._resampled(on_frame):
            total += samples.shape[0]
            if total > self._limits.max_audio_seconds * SAMPLE_RATE:
                raise _refused(f"is longer than the limit of {self._limits.max_audio_seconds:g} s")
            kept.append(samples)
            count += samples.shape[0]
            while count >= piece_samples:
                joined = self._numpy.concatenate(kept)
                yield joined[:piece_samples]
                kept = [joined[piece_samples:]]
                count -= piece_samples
        if not total:
            raise _refused("contains no audio that can be decoded")
        if count:
            yield self._numpy.concatenate(kept)

    def _resampled(self, on_frame: Callable[[], None]) -> Iterator[Any]:
        """Yields samples in the format of Whisper models. Handles a change of the input format within the stream."""
        resampler: Any = None
        form: tuple[Any, ...] = ()
        for frame in self._frames():
            on_frame()
            found = (frame.format.name, frame.layout.name, frame.sample_rate)
            if found != form:
                self._check(frame.sample_rate, frame.layout.nb_channels)
                yield from self._flushed(resampler)
                resampler = self._av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
                form = found
            frame.pts = None
            yield from self._arrays(resampler.resample(frame))
        yield from self._flushed(resampler)

    def _flushed(self, resampler: Any) -> Iterator[Any]:
        if resampler is not None:
            yield from self._arrays(resampler.resample(None))

    def _arrays(self, frames: Any) -> Iterator[Any]:
        for frame in frames:
            yield frame.to_ndarray().reshape(-1).astype("float32") / SAMPLE_SCALE

    def _frames(self) -> Iterator[Any]:
        """Yields the decoded frames. A truncated file ends where it is cut off."""
        error_class = self._av.error.FFmpegError
        packets = iter(self._container.demux(self._stream))
        bad = 0
        while True:
            try:
                packet = next(packets)
                frames = packet.decode()
            except StopIteration:
                return
            except error_class as error:
                bad += 1
                if bad > MAX_BAD_PACKETS or _is_end(self._av, error):
                    raise _refused(f"cannot be decoded: {_words(error)}") from None
                continue
            yield from frames

    def _checked_stream(self) -> tuple[Any, float]:
        """Returns the audio stream, and its length in the metadata."""
        stream = _sound_of(self._container)
        codec = stream.codec_context
        if not (codec.sample_rate and codec.channels):
            raise _refused("contains no audio that can be decoded")
        self._check(codec.sample_rate, codec.channels)
        seconds = _stated_seconds(self._container, stream)
        if seconds > self._limits.max_audio_seconds:
            raise _refused(f"lasts {seconds:.0f} s; at most {self._limits.max_audio_seconds:g} s are transcribed")
        return stream, seconds

    def _check(self, sample_rate: int, channels: int) -> None:
        limits = self._limits
        if not limits.min_sample_rate_hz <= sample_rate <= limits.max_sample_rate_hz:
            allowed = f"{limits.min_sample_rate_hz} to {limits.max_sample_rate_hz}"
            raise _refused(f"has {sample_rate} samples per second; {allowed} are supported")
        if not 1 <= channels <= limits.max_channels:
            raise _refused(f"has {channels} channels; 1 to {limits.max_channels} are supported")


def _container(av: Any, data: bytes) -> Any:
    options = {
        "format_whitelist": ",".join(FORMATS),
        "codec_whitelist": ",".join(CODECS),
        "protocol_whitelist": "none",
    }
    try:
        return av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="ignore")
    except (av.error.FFmpegError, ValueError) as error:
        raise _refused(f"is not a readable recording: {_words(error)}") from None


def _sound_of(container: Any) -> Any:
    """Returns the first audio stream that can be decoded."""
    for stream in container.streams.audio:
        if stream.codec_context is not None:
            return stream
    raise _refused("has no sound")


def _stated_seconds(container: Any, stream: Any) -> float:
    if stream.duration is not None and stream.time_base is not None:
        return max(0.0, float(stream.duration * stream.time_base))
    return max(0.0, container.duration / _PER_SECOND) if container.duration is not None else 0.0


def _is_end(av: Any, error: Exception) -> bool:
    """Whether the demuxer has failed rather than a single packet."""
    return not isinstance(error, av.error.InvalidDataError)


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", "") or error).partition(": '")[0][:200]


def _refused(message: str) -> FieldRefusedError:
    return FieldRefusedError("file", message)

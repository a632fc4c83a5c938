"""Transcribes a recording piece by piece to segments with times relative to its start.

The library would need the whole recording as one array. Here it gets pieces of PIECE_SECONDS; each starts where the
previous one could not fill its last window, so that no word is cut and memory use does not depend on the length.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weft_extensions.engines.engine_host.http_server import Caller, FieldRefusedError
from weft_extensions.engines.engine_host.media_routes import TranscriptionRequest, send_progress, timings
from weft_extensions.engines.faster_whisper.recording import SAMPLE_RATE, RecordingReader

PIECE_SECONDS = 180
WINDOW_SECONDS = 30
"""Length that the model processes at a time."""
PROMPT_TOKENS = 224
"""Maximum number of previous tokens in the prompt: half of the model's context."""
SILENCE_PEAK = 1e-4
"""A piece with a lower peak (-80 dB) counts as silence, in which models invent words."""
OPEN_VOICE_SECONDS = 1.0
"""A voice that ends this close to the end of a piece may continue in the next one."""
NEW_CONTEXT_TEMPERATURE = 0.5
"""Text decoded above this temperature is not used as context for the next window, as in the library."""
TEMPERATURE_STEP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The modules that the engine uses."""

    whisper: Any
    vad: Any
    av: Any
    numpy: Any


@dataclass(frozen=True, slots=True)
class _Span:
    """The part of a piece to transcribe, in samples."""

    begin: int
    end: int
    used: int
    """Number of samples of the piece that are then processed."""
    is_closed: bool
    """Whether it ends in silence, so that its last window need not be full."""


class Listening:
    """The transcription of a recording."""

    def __init__(
        self,
        library: Library,
        model: Any,
        request: TranscriptionRequest,
        caller: Caller,
        beam_size: int,
        *,
        detects_voices: bool,
    ) -> None:
        """`model` is a WhisperModel for this request only. Raises RefusedError for an unknown language."""
        self._library, self._model, self._request, self._caller = library, model, request, caller
        self._beam_size, self._detects_voices = beam_size, detects_voices
        self._language = request.language.lower()
        known = model.supported_languages
        if self._language and self._language not in known:
            has = "only English" if list(known) == ["en"] else f"{len(known)} languages by their ISO 639-1 codes"
            raise FieldRefusedError("language", f"this model supports {has}, not {request.language!r}")
        self._context = self._prompt_tokens()
        self._total_seconds = self._done_seconds = 0.0
        self._token_count = 0
        model.model = _WatchedModel(model.model, self._at_step)

    def hear(self, recording: RecordingReader) -> None:
        """Sends the segments of a recording, and the end. Raises RefusedError, GoneError."""
        worked = time.perf_counter()
        self._total_seconds = recording.stated_seconds
        self._tell_progress()
        concatenate, begin, transcribed = self._library.numpy.concatenate, 0, 0
        rest = self._library.numpy.zeros(0, dtype="float32")
        pieces = recording.pieces(PIECE_SECONDS * SAMPLE_RATE, self._caller.raise_if_gone)
        for piece, is_last in _with_last(pieces):
            transcribed += len(piece)
            if is_last:
                self._total_seconds = transcribed / SAMPLE_RATE
            audio = concatenate((rest, piece)) if len(rest) else piece
            used = self._piece(audio, begin / SAMPLE_RATE, is_last=is_last)
            begin, rest = begin + used, audio[used:].copy()
            self._tell_progress(begin / SAMPLE_RATE)
        self._caller.send(
            {
                "type": "transcript.text.done",
                **self._facts,
                "usage": {"type": "duration", "seconds": transcribed / SAMPLE_RATE},
                "timings": timings(time.perf_counter() - worked, self._token_count),
            }
        )

    def _piece(self, audio: Any, offset: float, *, is_last: bool) -> int:
        """Sends the segments of a piece that starts at `offset`. Returns the number of processed samples."""
        if float(abs(audio).max(initial=0.0)) < SILENCE_PEAK:
            return len(audio)
        span = _Span(0, len(audio), len(audio), is_last)
        if self._detects_voices:
            found = self._library.vad.get_speech_timestamps(audio)
            self._caller.raise_if_gone()
            span = voices_of(found, len(audio), is_last=is_last)
        if span.begin == span.end:
            return span.used
        segments = self._segments(audio[span.begin : span.end], filters=self._detects_voices and span.is_closed)
        begin = last = offset + span.begin / SAMPLE_RATE
        length = (span.end - span.begin) / SAMPLE_RATE
        for segment in segments:
            self._caller.raise_if_gone()
            window = segment.seek / self._model.frames_per_second
            if not span.is_closed and window > 0 and window + WINDOW_SECONDS > length:
                return span.begin + int(window * SAMPLE_RATE)
            self._send(segment, begin)
            last = begin + float(segment.end)
            self._tell_progress(last)
        if span.is_closed:
            return span.used
        end = max(round((last - offset) * SAMPLE_RATE), span.end - WINDOW_SECONDS * SAMPLE_RATE)
        # The last segment may extend into the padding of the window.
        return min(end, len(audio))

    def _segments(self, audio: Any, *, filters: bool) -> Iterator[Any]:
        try:
            segments, info = self._model.transcribe(
                audio,
                language=self._language or None,
                task="translate" if self._request.translate else "transcribe",
                beam_size=self._beam_size,
                initial_prompt=list(self._context) or None,
                word_timestamps=self._request.with_words,
                vad_filter=filters,
                **self._decoding(),
            )
        except ValueError as error:
            raise FieldRefusedError("file", f"cannot be transcribed: {error}") from error
        self._language = info.language
        return iter(segments)

    def _decoding(self) -> dict[str, Any]:
        """Returns the temperatures: the requested one, then higher ones if an answer is improbable or loops."""
        given = self._request.temperature
        if not given:
            return {}
        steps = int((1.0 - given) / TEMPERATURE_STEP + 1e-6)
        return {"temperature": [round(given + step * TEMPERATURE_STEP, 3) for step in range(steps + 1)]}

    def _prompt_tokens(self) -> list[int]:
        prompt = self._request.prompt.strip()
        if not prompt:
            return []
        ids = self._model.hf_tokenizer.encode(f" {prompt}", add_special_tokens=False).ids
        return list(ids)[-PROMPT_TOKENS:]

    def _send(self, segment: Any, offset: float) -> None:
        self._token_count += len(segment.tokens)
        kept = [] if segment.temperature > NEW_CONTEXT_TEMPERATURE else [*self._context, *segment.tokens]
        self._context = kept[-PROMPT_TOKENS:]
        words = [
            {
                "word": word.word.strip(),
                "start": round(offset + float(word.start), 3),
                "end": round(offset + float(word.end), 3),
                "probability": float(word.probability),
            }
            for word in segment.words or ()
        ]
        figures = {
            "avg_logprob": float(segment.avg_logprob),
            "no_speech_prob": float(segment.no_speech_prob),
            "compression_ratio": float(segment.compression_ratio),
            "temperature": float(segment.temperature),
        }
        start, end = round(offset + float(segment.start), 3), round(offset + float(segment.end), 3)
        part = {"start": start, "end": end, "text": segment.text, "words": words, **figures}
        self._caller.send({"type": "transcript.text.delta", "delta": segment.text, "segment": part, **self._facts})

    @property
    def _facts(self) -> dict[str, Any]:
        """Language and duration of the recording."""
        return {"language": self._language, "duration": self._total_seconds}

    def _tell_progress(self, done_seconds: float | None = None) -> None:
        self._done_seconds = max(self._done_seconds, done_seconds or 0.0)
        if self._total_seconds:
            self._done_seconds = min(self._done_seconds, self._total_seconds)
        done, total = round(self._done_seconds, 3), round(self._total_seconds, 3)
        send_progress(self._caller, done, total)

    def _at_step(self) -> None:
        """Reports progress before each attempt at a window. Raises GoneError if the caller has disconnected."""
        self._caller.raise_if_gone()
        self._tell_progress()


class _WatchedModel:
    """Wraps the library's model and calls `at_step` before each step of its work."""

    def __init__(self, model: Any, at_step: Callable[[], None]) -> None:
        self._model, self._at_step = model, at_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode(self, *given: Any, **named: Any) -> Any:
        """Encodes a window of the recording."""
        self._at_step()
        return self._model.encode(*given, **named)

    def generate(self, *given: Any, **named: Any) -> Any:
        """Decodes a window at one temperature."""
        self._at_step()
        return self._model.generate(*given, **named)


def voices_of(found: list[dict[str, int]], length: int, *, is_last: bool) -> _Span:
    """Returns the part of a piece to transcribe, given the voices detected in it. Pure."""
    if not found:
        # A voice that starts at the very end is detected in the next piece.
        kept = 0 if is_last else min(length, round(OPEN_VOICE_SECONDS * SAMPLE_RATE))
        return _Span(0, 0, length - kept, is_closed=True)
    begin, end = found[0]["start"], found[-1]["end"]
    if is_last or end < length - OPEN_VOICE_SECONDS * SAMPLE_RATE:
        return _Span(begin, end, length if is_last else end, is_closed=True)
    if len(found) > 1:
        return _Span(begin, found[-2]["end"], found[-1]["start"], is_closed=True)
    return _Span(begin, length, length, is_closed=False)


def _with_last(pieces: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields each piece with whether it is the last."""
    before: Any = None
    for piece in pieces:
        if before is not None:
            yield before, False
        before = piece
    if before is not None:
        yield before, True

"""The speech route of an engine program: speaks one sentence at a time and encodes its samples immediately."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from weft_extensions.engines.engine_host.http_server import Caller, Engine, FieldRefusedError, Route
from weft_extensions.engines.engine_host.media_routes import send_progress, send_sound, timings
from weft_extensions.engines.engine_host.sound_encoder import MEDIA_TYPES, SAMPLE_BYTES, encoded, format_of

MAX_PIECE_CHARS = 400
"""Maximum length of a piece; a longer sentence is split after a comma or between words."""
SHORT_CHARS = 24
"""A shorter sentence is joined with its neighbor ("Dr. Who", "3. The end") ..."""
MAX_JOINED_CHARS = 120
"""... if the result is shorter than this."""
_UNSPOKEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]+")
"""Control characters and unpaired surrogates."""
_END = re.compile(
    r"(?<=[.!?\u2026])[\"')\]\u00bb\u201d\u2019]*\s+"  # with closing quotation marks or brackets
    r"|(?<=[\u3002\uff01\uff1f])"  # Chinese and Japanese marks, which are not followed by a space
    r"|\s*\n\s*\n\s*"
)
_CUTS = (re.compile(r"(?<=[,\u060c\u3001\uff0c])\s*"), re.compile(r"\s+"))


def spoken_pieces(text: str) -> list[str]:
    """Splits a text into non-empty pieces of at most MAX_PIECE_CHARS, without control characters."""
    pieces: list[str] = []
    for sentence in _sentences(_UNSPOKEN.sub(" ", text)):
        last = pieces[-1] if pieces else ""
        is_short = min(len(last), len(sentence)) < SHORT_CHARS and len(last) + len(sentence) < MAX_JOINED_CHARS
        if last and is_short:
            pieces[-1] = f"{last} {sentence}"
        else:
            pieces += _cut(sentence)
    return pieces


def _sentences(text: str) -> list[str]:
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return list(filter(None, found))


def _cut(sentence: str) -> list[str]:
    parts: list[str] = []
    while len(sentence) > MAX_PIECE_CHARS:
        place = next(filter(None, (_last_cut(sentence, cut) for cut in _CUTS)), MAX_PIECE_CHARS)
        parts.append(sentence[:place].strip())
        sentence = sentence[place:].strip()
    return list(filter(None, (*parts, sentence)))


def _last_cut(sentence: str, cut: re.Pattern[str]) -> int:
    """Returns the end of the last possible split within MAX_PIECE_CHARS; 0: there is none."""
    places = [found.end() for found in cut.finditer(sentence, 0, MAX_PIECE_CHARS)]
    return next((place for place in reversed(places) if 0 < place <= MAX_PIECE_CHARS), 0)


MAX_SOUND_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """A request to speak a text."""

    text: str
    voice: str
    speaker: str = ""
    """Speaker of the voice; empty: its first."""
    format: str = ""
    """`mp3`, `opus`, `aac`, `flac`, `wav` or `pcm`; empty: mp3, or wav without an encoder."""
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """A voice of an engine, see runner_svc.policy.voices.KnownVoice."""

    name: str
    language: str = ""
    aliases: Sequence[str] = ()
    speakers: Sequence[str] = ()
    fault: str = ""


class Speaker(Protocol):
    """Converts text to samples: 16-bit little-endian mono."""

    @property
    def voices(self) -> Sequence[Voice]:
        """Its voices, including unusable ones."""
        ...

    def sample_rate(self, voice: str) -> int:
        """Loads a voice if necessary and returns its sample rate. Raises RefusedError."""
        ...

    def samples(self, text: str, request: SpeechRequest, caller: Caller) -> Iterator[bytes]:
        """Generates the audio samples of a sentence. Raises RefusedError, GoneError."""
        ...


class SpeechEngine(Engine):
    """An engine that synthesizes speech."""

    def __init__(self, speaker: Speaker, encoders: Any | None, slots: int) -> None:
        """`encoders`: PyAV; None: it is not installed."""
        self._speaker, self._encoders, self.slots = speaker, encoders, slots

    @property
    def routes(self) -> Mapping[str, Route]:
        """See Engine.routes."""
        return {"/v1/audio/speech": Route(lambda body, caller: self.speak(speech_of(body), caller))}

    def props(self) -> dict[str, Any]:
        """See Engine.props."""
        return {"voices": list(map(asdict, self._speaker.voices))}

    def speak(self, request: SpeechRequest, caller: Caller) -> None:
        """Sends a recording. Raises RefusedError, GoneError."""
        began = time.perf_counter()
        pieces = spoken_pieces(request.text)
        rate, sample_count = self._speaker.sample_rate(request.voice), 0

        def spoken() -> Iterator[bytes]:
            nonlocal sample_count
            total, done = sum(map(len, pieces)), 0
            for piece in pieces:
                caller.raise_if_gone()
                for samples in self._speaker.samples(piece, request, caller):
                    caller.raise_if_gone()
                    sample_count += len(samples) // SAMPLE_BYTES
                    yield samples
                done += len(piece)
                send_progress(caller, done, total)
            if not sample_count:
                raise FieldRefusedError("input", "contains nothing that this voice can speak")

        form = format_of(self._encoders, request.format)
        for data in encoded(self._encoders, form, rate, spoken()):
            for start in range(0, len(data), MAX_SOUND_BYTES):
                send_sound(caller, data[start : start + MAX_SOUND_BYTES], MEDIA_TYPES[form])
        usage = {"seconds": sample_count / rate}
        caller.send({"type": "speech.audio.done", "usage": usage, "timings": timings(time.perf_counter() - began)})


def speech_of(body: Mapping[str, Any]) -> SpeechRequest:
    """Converts a body to a request."""
    return SpeechRequest(
        text=body["input"],
        voice=body["voice"],
        speaker=body.get("speaker", ""),
        format=body.get("response_format", ""),
        speed=body.get("speed", 1.0),
    )

"""The route of an engine that speaks: sentence by sentence, encoded as the samples come."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from runner_svc.engine_host.http_server import Caller, Engine, FieldRefusedError, Route
from runner_svc.engine_host.media_routes import send_progress, send_sound, timings
from runner_svc.engine_host.sound_encoder import MEDIA_TYPES, SAMPLE_BYTES, format_of, make_encoder

MAX_PIECE_CHARS = 400
"""Maximum length of a piece; a longer sentence is cut after a comma or between two words."""
SHORT_CHARS = 24
"""A shorter sentence is spoken together with its neighbour: "Dr. Who", "3. The end" ..."""
MAX_JOINED_CHARS = 120
"""... as long as both together are not longer than this."""
_UNSPOKEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]+")
"""Control characters and halves of surrogate pairs."""
_END = re.compile(
    r"(?<=[.!?\u2026])[\"')\]\u00bb\u201d\u2019]*\s+"  # with a closing quotation mark or bracket
    r"|(?<=[\u3002\uff01\uff1f])"  # marks of Chinese and Japanese, which have no space after them
    r"|\s*\n\s*\n\s*"
)
_CUTS = (re.compile(r"(?<=[,\u060c\u3001\uff0c])\s*"), re.compile(r"\s+"))


def spoken_pieces(text: str) -> list[str]:
    """Returns the text in pieces of at most MAX_PIECE_CHARS, without control characters; none is empty."""
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
    """Returns the sentences, each with the marks that end it."""
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return list(filter(None, found))


def _cut(sentence: str) -> list[str]:
    """Returns a sentence in pieces that are short enough."""
    parts: list[str] = []
    while len(sentence) > MAX_PIECE_CHARS:
        place = next(filter(None, (_last_cut(sentence, cut) for cut in _CUTS)), MAX_PIECE_CHARS)
        parts.append(sentence[:place].strip())
        sentence = sentence[place:].strip()
    return list(filter(None, (*parts, sentence)))


def _last_cut(sentence: str, cut: re.Pattern[str]) -> int:
    """Returns the end of the last place in the first MAX_PIECE_CHARS where it may be cut; 0: there is none."""
    places = [found.end() for found in cut.finditer(sentence, 0, MAX_PIECE_CHARS)]
    return next((place for place in reversed(places) if 0 < place <= MAX_PIECE_CHARS), 0)


MAX_SOUND_BYTES = 256 * 1024
"""Maximum size of one piece of a recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """A request to speak a text."""

    text: str
    voice: str
    speaker: str = ""
    """Of the voice; empty: its first."""
    format: str = ""
    """`mp3`, `opus`, `aac`, `flac`, `wav` or `pcm`; empty: mp3, or wav where there is no encoder of it."""
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
    """What turns text into samples: 16 bits, one channel, least significant byte first."""

    @property
    def voices(self) -> Sequence[Voice]:
        """Its voices, those that cannot be used included."""
        ...

    @property
    def variants(self) -> Sequence[str]:
        """Its variants, which go with every voice, as in `en-gb+f3`."""
        ...

    def sample_rate(self, voice: str) -> int:
        """Returns the samples per second of a voice, which is loaded then. Raises RefusedError."""
        ...

    def samples(self, text: str, request: SpeechRequest, caller: Caller) -> Iterator[bytes]:
        """Yields the samples of a piece of the text as they come. Raises RefusedError, GoneError."""
        ...


class SpeechEngine(Engine):
    """An engine that speaks."""

    def __init__(self, speaker: Speaker, encoders: Any | None, slots: int) -> None:
        """`encoders`: PyAV, or None where it is not installed."""
        self._speaker, self._encoders, self.slots = speaker, encoders, slots

    @property
    def routes(self) -> Mapping[str, Route]:
        """See Engine.routes."""
        return {"/v1/audio/speech": Route(lambda body, caller: self.speak(speech_of(body), caller))}

    def props(self) -> dict[str, Any]:
        """See Engine.props."""
        return {"voices": list(map(asdict, self._speaker.voices)), "voice_variants": list(self._speaker.variants)}

    def speak(self, request: SpeechRequest, caller: Caller) -> None:
        """Send a recording. Raises RefusedError, GoneError."""
        began = time.perf_counter()
        pieces = spoken_pieces(request.text)
        rate = self._speaker.sample_rate(request.voice)
        form = format_of(self._encoders, request.format)
        encoder = make_encoder(self._encoders, form, rate)
        recording = _Recording(caller, MEDIA_TYPES[form])
        total, done, sample_count = sum(map(len, pieces)), 0, 0
        for piece in pieces:
            caller.raise_if_gone()
            for samples in self._speaker.samples(piece, request, caller):
                caller.raise_if_gone()
                sample_count += len(samples) // SAMPLE_BYTES
                recording.send(encoder.feed(samples))
            done += len(piece)
            send_progress(caller, done, total)
        if not sample_count:
            raise FieldRefusedError("input", "has nothing that this voice can speak")
        recording.send(encoder.finish())
        usage = {"seconds": sample_count / rate}
        caller.send({"type": "speech.audio.done", "usage": usage, "timings": timings(time.perf_counter() - began)})


class _Recording:
    """The pieces of a recording on their way to the runner."""

    def __init__(self, caller: Caller, media_type: str) -> None:
        self._caller = caller
        self._media_type = media_type

    def send(self, data: bytes) -> None:
        """Send bytes in pieces of at most MAX_SOUND_BYTES; none for no bytes."""
        for start in range(0, len(data), MAX_SOUND_BYTES):
            send_sound(self._caller, data[start : start + MAX_SOUND_BYTES], self._media_type)


def speech_of(body: Mapping[str, Any]) -> SpeechRequest:
    """Returns the request of a body."""
    return SpeechRequest(
        text=body["input"],
        voice=body["voice"],
        speaker=body.get("speaker", ""),
        format=body.get("response_format", ""),
        speed=body.get("speed", 1.0),
    )

"""The route of an engine that speaks: sentence by sentence, encoded as the samples come."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from runner_svc.engine_host.http_server import Caller, Engine, FieldRefusedError, Route
from runner_svc.engine_host.media_routes import send_progress, send_sound, timings
from runner_svc.engine_host.sentences import spoken_pieces
from runner_svc.engine_host.sound_encoder import MEDIA_TYPES, SAMPLE_BYTES, format_of, make_encoder

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

"""The work on a request for speech, whatever speaks: sentence by sentence, encoded as the samples come."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from runner_svc.engine_host.engine import Job, RefusedError
from runner_svc.engine_host.messages import Done, Ready, Sound, Speak, Voice, Work, Worked
from runner_svc.engine_host.sentences import spoken_pieces
from runner_svc.engine_host.sound_encoder import MEDIA_TYPES, SAMPLE_BYTES, format_of, make_encoder

MAX_SOUND_BYTES = 256 * 1024
"""Maximum size of one piece of a recording."""


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

    def samples(self, text: str, request: Speak, job: Job) -> Iterator[bytes]:
        """Yields the samples of a piece of the text as they come; raises as Engine.work."""
        ...


class SpeechEngine:
    """An engine that speaks, see Engine."""

    def __init__(self, speaker: Speaker, encoders: Any | None, slots: int) -> None:
        """`encoders`: PyAV, or None where it is not installed."""
        self._speaker = speaker
        self._encoders = encoders
        self._slots = slots

    @property
    def facts(self) -> Ready:
        """See Engine.facts."""
        voices, variants = list(self._speaker.voices), list(self._speaker.variants)
        return Ready(slots=self._slots, voices=voices, voice_variants=variants)

    def work(self, request: Work, job: Job) -> None:
        """See Engine.work."""
        if not isinstance(request, Speak):
            raise _only_speech()
        began = time.perf_counter()
        pieces = spoken_pieces(request.text)
        rate = self._speaker.sample_rate(request.voice)
        form = format_of(self._encoders, request.format)
        encoder = make_encoder(self._encoders, form, rate)
        recording = _Recording(job, MEDIA_TYPES[form])
        total, done, sample_count = sum(map(len, pieces)), 0, 0
        for piece in pieces:
            job.raise_if_cancelled()
            for samples in self._speaker.samples(piece, request, job):
                job.raise_if_cancelled()
                sample_count += len(samples) // SAMPLE_BYTES
                recording.send(encoder.feed(samples))
            done += len(piece)
            job.send(Worked(id=job.id, done=done, total=total))
        if not sample_count:
            raise RefusedError("INVALID_ARGUMENT", "input: has nothing that this voice can speak")
        recording.send(encoder.finish())
        seconds = time.perf_counter() - began
        job.send(Done(id=job.id, audio_seconds=sample_count / rate, seconds=seconds))


class _Recording:
    """The pieces of a recording on their way to the runner."""

    def __init__(self, job: Job, media_type: str) -> None:
        self._job = job
        self._media_type = media_type

    def send(self, data: bytes) -> None:
        """Send bytes in pieces of at most MAX_SOUND_BYTES; none for no bytes."""
        for start in range(0, len(data), MAX_SOUND_BYTES):
            piece = data[start : start + MAX_SOUND_BYTES]
            self._job.send(Sound(id=self._job.id, data=piece, media_type=self._media_type))


def _only_speech() -> RefusedError:
    return RefusedError("UNSUPPORTED_OPERATION", "this engine only speaks")

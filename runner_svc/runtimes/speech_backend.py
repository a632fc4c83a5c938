"""The common part of backends that speak: which voices there are, and which one a request has."""

from typing import Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.port import BackendFacts
from runner_svc.engine_host.messages import Ready, Speak
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.policy.voices import KnownVoice, VoiceCatalog
from runner_svc.runtimes.media_backend import MediaBackend, SpeechCall
from runner_svc.runtimes.speech_settings import SpeechSettings
from weft.api.common.v1 import audio_pb2
from weft.kernel.abilities import Abilities
from weft.kernel.request import Operation

OPERATIONS = frozenset({Operation.SPEECH})
SPEAKER = "speaker"
"""The option of a request that names the speaker of its voice."""
Settings = TypeVar("Settings", bound=SpeechSettings)


class SpeechBackend(MediaBackend[Settings], Generic[Settings]):
    """A Backend over one host process that speaks."""

    _catalog = VoiceCatalog(voices=())

    @override
    def operations(self) -> frozenset[Operation]:
        return OPERATIONS

    @override
    def abilities(self) -> Abilities:
        return Abilities(voices=self._catalog.published)

    @property
    def usual_voice(self) -> str:
        """The voice of requests that name none, where the settings name none either; empty: the engine's first."""
        return ""

    @override
    async def facts_of(self, ready: Ready) -> BackendFacts:
        """See HostBackend.facts_of. Raises INVALID_ARGUMENT for a setting that names a voice that there is not."""
        voices = tuple(
            KnownVoice(
                name=voice.name,
                language=voice.language,
                aliases=tuple(voice.aliases),
                speakers=tuple(voice.speakers),
                fault=voice.fault,
            )
            for voice in ready.voices
        )
        self._catalog = VoiceCatalog(
            voices=voices,
            variants=tuple(ready.voice_variants),
            default=self.model.default_voice or self.usual_voice,
            aliases=self.model.voice_aliases,
        ).checked()
        return await super().facts_of(ready)

    @override
    def speech_call(self, payload: audio_pb2.SpeechPayload) -> SpeechCall:
        """See MediaBackend.speech_call. Raises INVALID_ARGUMENT naming the voice that there is not."""
        request = super().speech_call(payload).request
        voice = self._catalog.choose(payload.voice)
        request.voice, request.format = voice.name, payload.format
        request.options = {SPEAKER: voice.speaker} if voice.speaker else {}
        warnings = [] if voice.warning is None else [voice.warning]
        if payload.instructions:
            warnings.append(ParameterWarning(field="instructions", message="this engine follows no instructions"))
        return SpeechCall(request=request, warnings=(*warnings, *self.further_warnings(request)))

    def further_warnings(self, request: Speak) -> tuple[ParameterWarning, ...]:
        """Returns warnings about what the engine cannot do as it is asked for."""
        del request
        return ()

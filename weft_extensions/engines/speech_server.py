"""Base of backends for speech: the list of voices, and the voice of a request."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from runner_svc.backend.port import Backend, BackendFacts, CallInfo, LoadOrder, SpeechPart
from runner_svc.openai_upstream import media
from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.openai_upstream.dialects import read_json
from runner_svc.openai_upstream.openai_request import warning_frame
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.policy.voices import KnownVoice, VoiceCatalog
from runner_svc.runtimes.llama_props import PROPS, PROPS_TIMEOUT_SECONDS
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from weft.api.common.v1 import audio_pb2
from weft.kernel.requests.capabilities import Capabilities
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.library_server import MediaServer
from weft_extensions.engines.speech_settings import SpeechSettings

OPERATIONS = frozenset({Operation.SPEECH})
Settings = TypeVar("Settings", bound=SpeechSettings)


class _Props(msgspec.Struct):
    voices: list[KnownVoice]


class SpeechServer(MediaServer[Settings], Generic[Settings]):
    """Backend of one speech server process."""

    operations = OPERATIONS
    _catalog = VoiceCatalog(voices=())

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        """See StartedServer.facts. Raises INVALID_ARGUMENT if a setting names an unknown voice."""
        _, body = await http.call_route("GET", PROPS, PROPS_TIMEOUT_SECONDS)
        props = read_json(body, _Props, "the engine's voices are")
        self._catalog = VoiceCatalog(
            voices=props.voices,
            default=self.model.default_voice or "",
            aliases=self.model.voice_aliases,
        ).checked()
        self.capabilities = Capabilities(voices=self._catalog.published)
        return await super().facts(http, order)

    @override
    async def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        """See Backend.speak. Raises INVALID_ARGUMENT naming an unknown voice."""
        voice = self._catalog.choose(payload.voice)
        warnings = [] if voice.warning is None else [voice.warning]
        if payload.instructions:
            warnings.append(ParameterWarning(field="instructions", message="this engine does not support instructions"))
        spoken = audio_pb2.SpeechPayload()
        spoken.CopyFrom(payload)
        spoken.voice = voice.name
        speak = partial(media.speak, speaker=voice.speaker)
        async with aclosing(self._streamed(Operation.SPEECH, speak, spoken, call)) as parts:
            async for part in parts:
                if part.receipt is not None:
                    part.receipt.warnings.extend(event.warning for event in warning_frame(warnings))
                yield part


def speech_engine(model: SpeechSettings, context: ModelContext, make_backend: Callable[[], Backend]) -> ModelEngine:
    """Returns the engine. It uses only the processor, so it needs no lease on accelerator memory."""
    return ModelEngine(
        make_backend=make_backend,
        operations=OPERATIONS,
        slots=model.slots,
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )

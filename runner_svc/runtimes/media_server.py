"""The common part of backends whose engine is a library that makes images, transcribes or speaks."""

from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CallInfo, LoadOrder, not_offered
from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.runtimes.library_server import LibraryServer
from runner_svc.runtimes.settings import StartedModelSettings
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.operations import generation_of
from weft.kernel.abilities import UNKNOWN, Abilities

Settings = TypeVar("Settings", bound=StartedModelSettings)


class MediaServer(LibraryServer[Settings], Generic[Settings]):
    """A Backend over one server process that works on images or recordings."""

    @property
    def abilities(self) -> Abilities:
        """What the loaded model takes beside its own operations."""
        return UNKNOWN

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        return BackendFacts(
            operations=self.operations, context_tokens=0, slots=self.model.slots, abilities=self.abilities
        )

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        raise not_offered(generation_of(payload).operation)

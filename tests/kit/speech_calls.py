"""Speech requests to a backend."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from runner_svc.backend.port import Backend, BackendFacts, CallInfo, SpeechPart
from weft.api.common.v1 import audio_pb2, receipt_pb2

CALL = CallInfo(request_id="r1", traceparent="")
SECONDS = 60.0
FOX = "The quick brown fox jumps over the lazy dog. The answer to everything is forty two, as they say."
AnyBackend = TypeVar("AnyBackend", bound=Backend)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A recording in the pieces received."""

    pieces: tuple[bytes, ...]
    media_type: str
    receipt: receipt_pb2.Receipt

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def seconds(self) -> float:
        return self.receipt.usage.audio_milliseconds / 1000

    @property
    def warned_fields(self) -> list[str]:
        return [warning.field for warning in self.receipt.warnings]


@asynccontextmanager
async def speaking(backend: AnyBackend) -> AsyncGenerator[tuple[AnyBackend, BackendFacts]]:
    """Starts a backend and stops it at the end of the block."""
    async with asyncio.timeout(SECONDS):
        facts = await backend.start()
    try:
        yield backend, facts
    finally:
        await backend.stop()


async def spoken(backend: Backend, text: str = FOX, **fields: Any) -> Spoken:
    """Returns a complete recording."""
    parts: list[SpeechPart] = []
    async with asyncio.timeout(SECONDS), aclosing(backend.speak(payload(text, **fields), CALL)) as arrivals:
        parts += [part async for part in arrivals]
    last = parts.pop()
    assert last.receipt is not None
    assert not last.data
    assert all(part.data for part in parts)
    assert len({part.media_type for part in parts}) == 1
    return Spoken(tuple(part.data for part in parts), parts[0].media_type, last.receipt)


async def first_piece(backend: Backend, text: str) -> bytes:
    """Returns the first piece of a recording, then cancels the request."""
    async with asyncio.timeout(SECONDS), aclosing(backend.speak(payload(text), CALL)) as arrivals:
        return (await anext(arrivals)).data


def payload(text: str, **fields: Any) -> audio_pb2.SpeechPayload:
    return audio_pb2.SpeechPayload(input=text, **fields)

"""What an engine may offer beside text and vectors. Every part is optional: a Backend has those methods that it has.

All of them raise as `Backend.generate`; UNSUPPORTED_OPERATION where the model is not configured for it.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from runner_svc.backends.port import CallInfo
from weft.api.common.v1 import audio_pb2, image_pb2, rerank_pb2, tokenize_pb2, usage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """Scores, the best first, and what they cost."""

    scores: list[rerank_pb2.RerankScore]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResult:
    """Images and what they cost."""

    images: list[image_pb2.GeneratedImage]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True)
class SpeechPart:
    """Bytes of a recording, never none, and the media type of the whole."""

    data: bytes
    media_type: str


@runtime_checkable
class Tokenizes(Protocol):
    """A backend that counts tokens as it would read them."""

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """The tokens of a text or of a conversation. It waits for no slot of the engine.

        `max_context_tokens` is 0 where the engine does not say it with its tokens.
        """
        ...


@runtime_checkable
class Reranks(Protocol):
    """A backend that compares documents with a query."""

    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        """One score per document, or those of the best `top_n`."""
        ...


@runtime_checkable
class MakesImages(Protocol):
    """A backend that makes images."""

    async def generate_images(self, payload: image_pb2.ImagePayload, call: CallInfo) -> ImageResult:
        """At least one image."""
        ...


@runtime_checkable
class Transcribes(Protocol):
    """A backend that writes down what is said."""

    async def transcribe(self, payload: audio_pb2.TranscriptionPayload, call: CallInfo) -> audio_pb2.Transcription:
        """The words."""
        ...


@runtime_checkable
class Speaks(Protocol):
    """A backend that speaks."""

    def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        """The recording as it is made. Closing the generator stops the engine's work on it."""
        ...

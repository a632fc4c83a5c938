"""Ports of the gateway: the request dispatcher and the registry.

`weft.dispatch` and `gateway.resources.registry_client` implement them; tests script them.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, receipt_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.request_call import SpeechPiece
from weft.dispatch.request_trace import RequestContext
from weft.documents.document_base import ResourceKind
from weft.documents.documents import Document, EventDocument, ModelDocument

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Generation(Protocol):
    """A generation in progress; see `weft.dispatch.request_call.GenerationCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """The receipt, once the request has ended."""
        ...

    def frames(self) -> AsyncGenerator[Frame]:
        """Yields every frame of events. Raises the WeftError that ended the request; closing it cancels the request."""
        ...


class UnaryCall(Protocol[ResultT_co]):
    """A unary request in progress; see `weft.dispatch.dispatcher.UnaryCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """The receipt, once the request has ended."""
        ...

    async def result(self) -> ResultT_co:
        """Returns the answer. Raises the WeftError that ended the request."""
        ...


Embedding = UnaryCall[list[embedding_pb2.Embedding]]


class Speech(Protocol):
    """Generated speech in progress; see `weft.dispatch.request_call.SpeechCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """The receipt, once the request has ended."""
        ...

    def pieces(self) -> AsyncGenerator[SpeechPiece]:
        """Yields at least one chunk. Raises the WeftError that ended the request; closing it cancels the request."""
        ...


class RequestDispatcher(Protocol):
    """Runs requests; see `weft.dispatch.dispatcher.Dispatcher`."""

    def generate(self, context: RequestContext, payload: GenerationPayload) -> Generation:
        """Returns a chat or text completion. Nothing happens until its frames are read."""
        ...

    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> Embedding:
        """Returns an embedding. Nothing happens until its result is awaited."""
        ...

    def rerank(
        self, context: RequestContext, payload: rerank_pb2.RerankPayload
    ) -> UnaryCall[list[rerank_pb2.RerankScore]]:
        """Returns scores of documents, best first. Nothing happens until the result is awaited (next three, too)."""
        ...

    def tokenize(
        self, context: RequestContext, payload: tokenize_pb2.TokenizePayload
    ) -> UnaryCall[tokenize_pb2.TokenizeResult]:
        """Returns the tokens of a text or of a conversation."""
        ...

    def generate_images(
        self, context: RequestContext, payload: image_pb2.ImagePayload
    ) -> UnaryCall[list[image_pb2.GeneratedImage]]:
        """Returns generated images."""
        ...

    def transcribe(
        self, context: RequestContext, payload: audio_pb2.TranscriptionPayload
    ) -> UnaryCall[audio_pb2.Transcription]:
        """Returns the transcription of a recording."""
        ...

    def speak(self, context: RequestContext, payload: audio_pb2.SpeechPayload) -> Speech:
        """Returns generated speech. Nothing happens until its pieces are read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePage:
    """A page of resources of a kind, sorted by name."""

    documents: Sequence[Document]
    next_page_token: str
    """Empty on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMembers:
    """A pool with its members' documents."""

    pool: str
    is_explicit: bool
    """Whether a member names the pool; otherwise it has one model and the model's name."""
    size: int
    active_count: int
    members: Sequence[ModelDocument]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """A filter of events."""

    kind: ResourceKind | None = None
    """None: all kinds."""
    name: str = ""
    """Empty: all resources; otherwise `kind` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedResource:
    """The outcome for one document."""

    kind: ResourceKind
    name: str
    outcome: Literal["created", "configured", "unchanged"]
    before: Document | None
    """None when it did not exist."""
    after: Document | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """Settings of the whole mesh."""

    allow_cloud_fallback: bool
    """Whether routes may fall back to models off the premises."""


class RegistryPort(Protocol):
    """The registry's resources; see `gateway.resources.registry_client.RegistryClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def list_page(self, kind: ResourceKind, page_size: int, page_token: str) -> ResourcePage:
        """Returns a page of the resources of a kind; `page_size` 0 means the registry's default."""
        ...

    async def get(self, kind: ResourceKind, name: str) -> Document:
        """Returns one resource."""
        ...

    async def members(self, model: str) -> PoolMembers:
        """Returns the pool of a model."""
        ...

    async def list_events(self, events: EventFilter, limit: int) -> Sequence[EventDocument]:
        """Returns the newest events, oldest first; `limit` 0 means the registry's default."""
        ...

    def watch_events(self, events: EventFilter) -> AsyncGenerator[EventDocument]:
        """Yields new events until it is closed."""
        ...

    async def apply(self, documents: Sequence[Document], *, dry_run: bool, adopt: bool) -> Sequence[AppliedResource]:
        """Brings all resources to their declared state, or none."""
        ...

    async def delete(self, kind: ResourceKind, name: str, *, force: bool) -> None:
        """Removes a resource; `force`: unload its loaded models first."""
        ...

    async def settings(self) -> MeshSettings:
        """Returns the mesh's settings."""
        ...

    async def update_settings(self, settings: MeshSettings) -> MeshSettings:
        """Updates the mesh's settings; returns them once they are stored."""
        ...

"""What the edge needs from the rest of the mesh.

`weft.dispatch` and `gateway.resources.registry_client` satisfy it; tests script it.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, receipt_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.request_trace import RequestContext
from weft.dispatch.streamed_call import SpeechPiece
from weft.documents.document_base import ResourceKind
from weft.documents.documents import Document, EventDocument, ModelDocument

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Generation(Protocol):
    """A generation under way; see `weft.dispatch.GenerationCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """What happened, once it is over."""
        ...

    def frames(self) -> AsyncGenerator[Frame]:
        """Every frame of events. Raises the WeftError that ended the request; closing it cancels the work."""
        ...


class UnaryCall(Protocol[ResultT_co]):
    """A request under way that is answered in one piece; see `weft.dispatch.UnaryCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """What happened, once it is over."""
        ...

    async def result(self) -> ResultT_co:
        """The answer. Raises the WeftError that ended the request."""
        ...


Embedding = UnaryCall[list[embedding_pb2.Embedding]]


class Speech(Protocol):
    """A recording under way; see `weft.dispatch.SpeechCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """What happened, once it is over."""
        ...

    def pieces(self) -> AsyncGenerator[SpeechPiece]:
        """Every piece, at least one. Raises the WeftError that ended the request; closing it cancels the work."""
        ...


class RequestDispatcher(Protocol):
    """Runs requests; see `weft.dispatch.Dispatcher`."""

    def generate(self, context: RequestContext, payload: GenerationPayload) -> Generation:
        """A chat or text completion. Nothing happens until its frames are read."""
        ...

    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> Embedding:
        """An embedding. Nothing happens until its result is awaited."""
        ...

    def rerank(
        self, context: RequestContext, payload: rerank_pb2.RerankPayload
    ) -> UnaryCall[list[rerank_pb2.RerankScore]]:
        """Scores of documents, the best first. Nothing happens until the result is awaited; so with the next three."""
        ...

    def tokenize(
        self, context: RequestContext, payload: tokenize_pb2.TokenizePayload
    ) -> UnaryCall[tokenize_pb2.TokenizeResult]:
        """Tokens of a text or of a conversation."""
        ...

    def generate_images(
        self, context: RequestContext, payload: image_pb2.ImagePayload
    ) -> UnaryCall[list[image_pb2.GeneratedImage]]:
        """Images."""
        ...

    def transcribe(
        self, context: RequestContext, payload: audio_pb2.TranscriptionPayload
    ) -> UnaryCall[audio_pb2.Transcription]:
        """Words of a recording."""
        ...

    def speak(self, context: RequestContext, payload: audio_pb2.SpeechPayload) -> Speech:
        """Spoken words. Nothing happens until its pieces are read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePage:
    """Some resources of a kind, by name."""

    documents: Sequence[Document]
    next_page_token: str
    """Empty at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMembers:
    """A pool with everything that is known of its members."""

    pool: str
    is_explicit: bool
    """Whether a member names the pool; otherwise it is that of one model."""
    size: int
    active_count: int
    members: Sequence[ModelDocument]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events."""

    kind: ResourceKind | None = None
    """None: of all kinds."""
    name: str = ""
    """Empty: of all resources; otherwise `kind` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedResource:
    """What was done for one document."""

    kind: ResourceKind
    name: str
    outcome: Literal["created", "configured", "unchanged"]
    before: Document | None
    """None when it did not exist."""
    after: Document | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """What operators set for the whole mesh."""

    allow_cloud_fallback: bool
    """Whether routes may fall back to models off the premises."""


class RegistryPort(Protocol):
    """Who keeps the resources; see `gateway.resources.registry_client.RegistryClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def list_page(self, kind: ResourceKind, page_size: int, page_token: str) -> ResourcePage:
        """A page of the resources of a kind; `page_size` 0 is the registry's own."""
        ...

    async def get(self, kind: ResourceKind, name: str) -> Document:
        """One resource."""
        ...

    async def members(self, model: str) -> PoolMembers:
        """The pool that a model is in."""
        ...

    async def list_events(self, events: EventFilter, limit: int) -> Sequence[EventDocument]:
        """The newest events, oldest first; `limit` 0 is the registry's own."""
        ...

    def watch_events(self, events: EventFilter) -> AsyncGenerator[EventDocument]:
        """Events from now on, until it is closed."""
        ...

    async def apply(self, documents: Sequence[Document], *, dry_run: bool, adopt: bool) -> Sequence[AppliedResource]:
        """Bring all of them to their declared state, or none."""
        ...

    async def delete(self, kind: ResourceKind, name: str, *, force: bool) -> None:
        """Remove a resource; `force`: unload what is loaded of it first."""
        ...

    async def settings(self) -> MeshSettings:
        """What is set for the whole mesh."""
        ...

    async def update_settings(self, settings: MeshSettings) -> MeshSettings:
        """Set it; returns what is set once it is kept."""
        ...

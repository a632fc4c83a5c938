"""What the edge needs from the rest of the mesh. `weft.dispatch` satisfies it; tests script it."""

from collections.abc import AsyncGenerator
from typing import Protocol

from weft.api.common.v1 import embedding_pb2, receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.journey import RequestContext


class Generation(Protocol):
    """A generation under way; see `weft.dispatch.GenerationCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """What happened, once it is over."""
        ...

    def frames(self) -> AsyncGenerator[Frame]:
        """Every frame of events. Raises the WeftError that ended the request; closing it cancels the work."""
        ...


class Embedding(Protocol):
    """An embedding under way; see `weft.dispatch.EmbeddingCall`."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """What happened, once it is over."""
        ...

    async def result(self) -> list[embedding_pb2.Embedding]:
        """The vectors in input order. Raises the WeftError that ended the request."""
        ...


class RequestDispatcher(Protocol):
    """Runs requests; see `weft.dispatch.Dispatcher`."""

    def generate(self, context: RequestContext, payload: GenerationPayload) -> Generation:
        """A chat or text completion. Nothing happens until its frames are read."""
        ...

    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> Embedding:
        """An embedding. Nothing happens until its result is awaited."""
        ...


class FleetSource(Protocol):
    """Who knows the mesh; see `weft.dispatch.fleet.FleetWatcher`."""

    @property
    def view(self) -> FleetView:
        """The newest view; revision 0 before the first snapshot."""
        ...

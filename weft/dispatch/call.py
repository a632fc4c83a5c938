"""A call of an operation, and layers around it.

A layer is a function `(call, proceed) -> chunks` that adds one concern: it may act before, after and between the chunks
of `proceed(call)`, or answer itself. A layer with nothing to do returns `proceed(call)`, which has no overhead per
chunk.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from weft.api.common.v1 import event_pb2, warning_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.operation_table import ChunkT, OperationSpec, PayloadT
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from weft.api.common.v1 import receipt_pb2
    from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus

T = TypeVar("T")


class Call(Generic[ChunkT]):
    """One request for an operation. Nothing happens until its chunks are read or its result is awaited."""

    __slots__ = ("_run", "context", "joined_texts", "payload", "rate_limits", "receipt", "spec", "whole")

    def __init__(
        self,
        spec: OperationSpec[Any, ChunkT],
        context: RequestContext,
        payload: Any,
        run: "Proceed[ChunkT]",
        *,
        whole: bool = False,
    ) -> None:
        self.spec = spec
        self.context = context
        self.payload = payload
        self.whole = whole
        """Whether the caller reads the answer only when it is complete, so that it may arrive in few, large chunks."""
        self.joined_texts = False
        """Whether the caller accepts deltas that join texts, see `Delta.piece_lengths`."""
        self.receipt: receipt_pb2.Receipt | None = None
        """The receipt; None until the request has ended."""
        self.rate_limits: RateLimitStatus | None = None
        """What is left of the caller's rate limits; None: no limit applies, or the router has not answered yet."""
        self._run = run

    def chunks(self) -> AsyncGenerator[ChunkT]:
        """Yields every chunk. Raises the WeftError that ended the request; closing the generator cancels the request.

        `content_started` in the error's metadata means that content was sent before the error.
        """
        return self._run(self)

    async def whole_result(self) -> Any:
        """Returns the whole answer of an operation with `OperationSpec.whole`. Raises as `result`.

        The runner holds the answer back until it is complete, so losing the runner before that costs only a retry.
        """
        assert self.spec.whole is not None, "the operation has a whole answer"
        self.whole = True
        async with aclosing(self._run(self)) as chunks:
            frames: list[Any] = [chunk async for chunk in chunks]
        return self.spec.whole.collect(frames)

    async def result(self) -> ChunkT:
        """Returns the result of a unary operation. Raises the WeftError that ended the request."""
        found: list[ChunkT] = []
        async with aclosing(self._run(self)) as chunks:
            async for chunk in chunks:
                found.append(chunk)  # noqa: PERF401 - the generator must be read to its end, which is reported then
        if not found:
            raise WeftError(Reason.WORKER_LOST, "the request ended without a result")
        return found[-1]

    def through(self, *layers: "Layer[ChunkT]") -> "Call[ChunkT]":
        """Puts layers around the call, the last one outermost; returns the call."""
        for layer in layers:
            self._run = partial(layer, proceed=self._run)
        return self


class Proceed(Protocol[T]):
    """The rest of the call, inside a layer."""

    def __call__(self, call: "Call[T]", /) -> AsyncGenerator[T]:
        """Returns the chunks of the call."""
        ...


class Layer(Protocol[T]):
    """One concern around a call."""

    def __call__(self, call: "Call[T]", /, proceed: Proceed[T]) -> AsyncGenerator[T]:
        """Returns the chunks of the call."""
        ...


class RequestDispatcher(Protocol):
    """Makes calls; see `weft.dispatch.dispatcher.Dispatcher`."""

    def call(
        self, spec: OperationSpec[PayloadT, ChunkT], context: RequestContext, payload: PayloadT, *, whole: bool = False
    ) -> Call[ChunkT]:
        """Returns the call of an operation. Nothing happens until its chunks are read or its result is awaited."""
        ...


class LayeredDispatcher(RequestDispatcher):
    """A dispatcher that puts layers around every call of another one."""

    def __init__(self, dispatcher: RequestDispatcher, *layers: Layer[Any]) -> None:
        """The last layer is the outermost."""
        self._dispatcher = dispatcher
        self._layers = layers

    def call(
        self, spec: OperationSpec[PayloadT, ChunkT], context: RequestContext, payload: PayloadT, *, whole: bool = False
    ) -> Call[ChunkT]:
        """See `RequestDispatcher.call`."""
        return self._dispatcher.call(spec, context, payload, whole=whole).through(*self._layers)


def warned(warnings: Sequence[warning_pb2.Warning]) -> Layer[Frame]:
    """Returns a layer that adds warnings to those of the runner.

    They are added to each attempt: events of an earlier one are discarded.
    """
    events = [event_pb2.InferenceEvent(warning=warning) for warning in warnings]

    async def layer(call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        async with aclosing(proceed(call)) as frames:
            async for frame in frames:
                yield with_events(frame, events)

    return layer


def with_events(frame: Any, events: Frame) -> Any:
    """Returns a frame with `events` behind the start of an attempt, if that is in it."""
    for index, event in enumerate(frame, start=1):
        if event.HasField("started"):
            return [*frame[:index], *events, *frame[index:]]
    return frame

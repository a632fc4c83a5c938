"""The placement port between dispatchers and schedulers, independent of transport.

Implementations: the router's own (`router_svc.placement.LocalPlacement`) and the gRPC client
(`weft.dispatch.remote_router.RemoteRouter`). `weft_testing.conformance.placement` tests both.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeAlias

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1.quote_pb2 import Quote
from weft.kernel.access.principal import actor_words
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft.kernel.time.timestamps import optional_duration

Decision: TypeAlias = pb.PlaceResponse
"""`queued` or `loading`, for the caller, or `granted`; the first one also has the caller's rate limits, if any."""


def in_queue(position: int, reason: str, eta_seconds: float | None = None) -> Decision:
    """Returns the decision that a request is queued."""
    queued = event_pb2.Queued(position=position, reason=reason, eta=optional_duration(eta_seconds))
    return pb.PlaceResponse(queued=queued)


def for_load(stage: str, progress: float | None = None, eta_seconds: float | None = None) -> Decision:
    """Returns the decision that a request waits for a model to load."""
    loading = event_pb2.Loading(stage=stage, progress=progress, eta=optional_duration(eta_seconds))
    return pb.PlaceResponse(loading=loading)


def waiting_event(decision: Decision) -> event_pb2.InferenceEvent:
    """Returns the client's event of a decision that is no grant."""
    if decision.HasField("loading"):
        return event_pb2.InferenceEvent(loading=decision.loading)
    return event_pb2.InferenceEvent(queued=decision.queued)


OnCancelled = Callable[[WeftError], None]
"""Called with `request_cancelled` from the event loop; must not block. Raises a WeftError if the request cannot be
cancelled; the request then continues."""
CANCELLED_BY = "cancelled_by"
"""Metadata key of an error for the name of the caller who cancelled the request."""
MAX_CANCELLER_CHARS = 256
MAX_ATTEMPT_MESSAGE_CHARS = 512
"""Maximum characters of an attempt's error in the request's record."""
MAX_ATTEMPT_LOG_LINES, MAX_ATTEMPT_LOG_BYTES = 10, 2_048
"""Last lines of the engine log, and their UTF-8 bytes, in an attempt's error for its record."""


def request_cancelled(cancelled_by: str) -> WeftError:
    """Returns the CANCELLED error of a request that another call cancelled, with that call's caller."""
    return WeftError(
        Reason.CANCELLED,
        f"the request was cancelled by {actor_words(cancelled_by)}",
        metadata={CANCELLED_BY: cancelled_by},
    )


PLACED_AGAIN = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.NO_ROUTER_AVAILABLE, Reason.ROUTER_STANDBY})
"""A router's reasons after which a request is placed again instead of failing."""


def canceller_of(error: BaseException | None) -> str:
    """Returns the caller who cancelled a request with this error; empty: it was not cancelled by another call."""
    return error.metadata.get(CANCELLED_BY, "") if isinstance(error, WeftError) else ""


class Placement(Protocol):
    """A request's placement from arrival to end. Leaving the context releases everything it holds."""

    never_waits: ClassVar[bool] = False
    """Whether entering and reports end immediately, so that they need no time limits."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def next_decision(self) -> Decision:
        """Returns the scheduler's next decision. Read-only.

        Raises the error of a rejection, `request_cancelled` for a cancelled request, and SERVICE_UNAVAILABLE for a lost
        router.
        """
        ...

    def watch_cancellation(self, on_cancelled: "OnCancelled") -> None:
        """Calls `on_cancelled` when the request is cancelled during its latest grant; immediately if it already was.

        A later call replaces an earlier one.
        """
        ...

    async def report_first_content(self, attempt: int) -> None:
        """Reports that the answer has begun, which rules out failover. Never raises."""
        ...

    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        """Reports a failure before any content; the next decision grants another runner or raises. Never raises.

        `message`: the error text for the request's record, at most `MAX_ATTEMPT_MESSAGE_CHARS`. `retry_after_seconds`:
        how long the runner takes no further request, as its engine says; None: unknown.
        """
        ...

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        """Reports the end of the request; UNSPECIFIED means success. Never raises.

        `receipt` is read-only; None: unknown. Returns whether the scheduler received the end; False if it may be lost.
        """
        ...


class PlacementPort(Protocol):
    """Places requests on runners."""

    def place(self, request: PlacementRequest) -> Placement:
        """Returns a placement for a request. Nothing happens until its context is entered."""
        ...


class QuoteSource(Protocol):
    """Source of quotes; see `RouterPort`."""

    async def quote(self, request: PlacementRequest) -> Sequence[Quote]:
        """Returns when each place would answer a request that arrives now, the soonest first; it is not accepted.

        Raises what a refusal would, SERVICE_UNAVAILABLE for a lost router.
        """
        ...


class QueueSource(Protocol):
    """Source of queue lengths; see `RouterPort`."""

    async def queues(self) -> Sequence[PoolQueue]:
        """Returns queues by pool, sorted by name. Raises SERVICE_UNAVAILABLE for a lost router."""
        ...


class EndPort(Protocol):
    """Records how requests ended that lost their scheduler."""

    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        """Reports the end of a request that its placement could not report.

        Returns whether it was recorded; False: the end was already known. Raises SERVICE_UNAVAILABLE,
        NO_ROUTER_AVAILABLE or ROUTER_STANDBY if the report should be retried.
        """
        ...


class RouterPort(PlacementPort, QuoteSource, QueueSource, EndPort, Protocol):
    """All of the router that dispatchers use."""

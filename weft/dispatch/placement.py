"""The placement port between dispatchers and schedulers, independent of transport.

Two implementations exist, the router's own (`router_svc.placement.LocalPlacement`) and the one over gRPC
(`weft.dispatch.remote_router.RemotePlacement`); `weft_testing.conformance.placement` is the suite both pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.kernel.errors import WeftError
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.principal import actor_words
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.value import value_class


@value_class(kw_only=True)
class WaitingInQueue:
    """The request waits."""

    position: int
    reason: str
    eta_seconds: float | None = None
    rate_limits: RateLimitStatus | None = None
    """See `Grant.rate_limits`."""


@value_class(kw_only=True)
class LoadingModel:
    """The request waits for a model to load."""

    stage: str
    progress: float | None = None
    eta_seconds: float | None = None
    rate_limits: RateLimitStatus | None = None
    """See `Grant.rate_limits`."""


@value_class(kw_only=True)
class Grant:
    """A permit and where to use it."""

    claims: bytes
    """A serialized TicketClaims."""
    mac: bytes
    runner: str
    runner_incarnation: str
    address: str
    """gRPC target of the runner."""
    host: str
    model: str
    attempt: int
    keep_alive_seconds: float | None = None
    """As the request's route sets it; None: unset."""
    priority: Priority | None = None
    """The priority class of the grant; None: as requested."""
    seconds_left: float | None = None
    """Until the answer must be complete, by the request or its route; None: as the request says."""
    rate_limits: RateLimitStatus | None = None
    """How much more its caller may ask for. The first decision has it where a limit counts the request. Read-only."""


Decision = WaitingInQueue | LoadingModel | Grant


def waiting_event(decision: WaitingInQueue | LoadingModel) -> event_pb2.InferenceEvent:
    """The client's event for a decision of the scheduler."""
    event = event_pb2.InferenceEvent()
    if isinstance(decision, WaitingInQueue):
        event.queued.position = decision.position
        event.queued.reason = decision.reason
        if decision.eta_seconds is not None:
            event.queued.eta.FromNanoseconds(int(decision.eta_seconds * 1e9))
        return event
    event.loading.stage = decision.stage
    if decision.progress is not None:
        event.loading.progress = decision.progress
    if decision.eta_seconds is not None:
        event.loading.eta.FromNanoseconds(int(decision.eta_seconds * 1e9))
    return event


OnCancelled = Callable[[WeftError], None]
"""Called with `request_cancelled`, from the event loop; must not block. Raises the WeftError that says why nothing can
end the request; then it continues."""
CANCELLED_BY = "cancelled_by"
"""Key of an error's metadata with the name of who cancelled the request."""
MAX_CANCELLER_CHARS = 256
MAX_ATTEMPT_MESSAGE_CHARS = 512
"""Characters of an attempt's error that the record of its request has."""


def request_cancelled(cancelled_by: str) -> WeftError:
    """Returns the error CANCELLED of a request that a separate call cancelled, with the name of its caller."""
    return WeftError(
        Reason.CANCELLED,
        f"the request was cancelled by {actor_words(cancelled_by)}",
        metadata={CANCELLED_BY: cancelled_by},
    )


PLACED_AGAIN = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.NO_ROUTER_AVAILABLE, Reason.ROUTER_STANDBY})
"""Reasons of a router after which a request is placed again: none of them is its end."""


def canceller_of(error: BaseException | None) -> str:
    """Returns the name of the caller who cancelled the request that ended with an error; empty: not cancelled so."""
    return error.metadata.get(CANCELLED_BY, "") if isinstance(error, WeftError) else ""


class Placement(Protocol):
    """One request's place in the mesh, from arrival to its end. Leaving the context releases whatever it held."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def next_decision(self) -> Decision:
        """The scheduler's next decision.

        Raises the error of a rejection, `request_cancelled` for a cancelled request, SERVICE_UNAVAILABLE for a lost
        router.
        """
        ...

    def watch_cancellation(self, on_cancelled: "OnCancelled") -> None:
        """Calls `on_cancelled` when the request is cancelled while its latest grant is used; now if it was before.

        A later call replaces an earlier one.
        """
        ...

    async def report_first_content(self, attempt: int) -> None:
        """The answer has begun: no failover from here on. Never raises."""
        ...

    async def report_attempt_failed(self, attempt: int, reason: Reason, message: str = "") -> None:
        """The attempt failed before any content; the next decision grants another runner or raises. Never raises.

        `message`: its error in words, at most `MAX_ATTEMPT_MESSAGE_CHARS`, for the record of the request.
        """
        ...

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        """Reports the end of the request, with UNSPECIFIED when it completed. Never raises.

        `receipt` is only read; None: unknown. Returns whether the scheduler has the end; False: it may not, as it was
        lost.
        """
        ...

    def end_at_once(
        self,
        reason: Reason,  # noqa: ARG002 - a scheduler of another process does nothing at once
        receipt: receipt_pb2.Receipt,  # noqa: ARG002
        *,
        content_of: int | None,  # noqa: ARG002
    ) -> bool:
        """Reports the end and leaves where the scheduler is in this process; returns whether that was done.

        `content_of`: the attempt whose answer had begun, which is reported first; None: there is none to report.
        """
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolQueue:
    """The load of one pool, or of one route."""

    pool: str
    """Its name; or `route/` and a route's."""
    waiting: int
    max_waiting: int
    """Maximum number of waiting requests."""
    running: int
    """Requests running on its models, under any name."""
    average_wait_seconds: float | None = None
    """Average over recently placed requests; None: none were placed."""


class PlacementPort(Protocol):
    """Places requests on runners."""

    def place(self, request: PlacementRequest) -> Placement:
        """Requests a placement. Nothing happens until the returned context is entered."""
        ...


class QueueSource(Protocol):
    """Source of queue lengths; see `RouterPort`."""

    async def queues(self) -> Sequence[PoolQueue]:
        """Queues by pool, sorted by name. Raises SERVICE_UNAVAILABLE for a lost router."""
        ...


class EndPort(Protocol):
    """Records how requests ended whose scheduler was lost."""

    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        """Hands over the end of a request whose placement did not hear of it.

        Returns whether it is recorded; False: its end is known already. Raises SERVICE_UNAVAILABLE,
        NO_ROUTER_AVAILABLE or ROUTER_STANDBY where it is to be tried again.
        """
        ...


class RouterPort(PlacementPort, QueueSource, EndPort, Protocol):
    """The router for dispatchers."""

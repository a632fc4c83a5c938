"""The port through which a router's scheduling is counted, and what it counts of each event."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router_svc.policy.decisions import RequestDecision, WaitKind
from router_svc.policy.endpoints.candidates import HostMemory
from router_svc.policy.request import Request
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors import WeftError
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.pool_queue import PoolQueue
from weft.kernel.reasons import Reason
from weft.kernel.tracing import NO_TRACING, Tracing
from weft.kernel.value import value_class


@value_class(kw_only=True)
class RequestEnded:
    """The end of a request. The loop sends it to each of its subscribers, once."""

    request: Request
    at: float
    """Time on the router's monotonic clock."""
    view: FleetView
    reason: Reason
    """UNSPECIFIED: it completed."""
    receipt: receipt_pb2.Receipt | None = None
    """None: its dispatcher left without one."""
    refusal: WeftError | None = None
    """The error of a request that was refused before the scheduler, such as one above a rate limit."""
    last_error: Reason | None = None
    """The reason of the last error that its dispatcher got; None: none since its last grant."""
    was_placed: bool = False
    """Whether a runner may have worked on it."""
    is_closing: bool = False
    """Whether this router stops, so that the dispatcher continues without it."""


Subscriber = Callable[[RequestEnded], None]
"""Called from the event loop with the end of each request; never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """Reads of the state of a router."""

    queues: Callable[[], Iterable[PoolQueue]]
    hosts: Callable[[], Mapping[str, HostMemory]]
    memory_age_seconds: Callable[[], float | None]
    """How old the memory of the hosts is; None: never read."""
    tracing: Tracing = NO_TRACING
    view_revision: Callable[[], int] = lambda: 0
    watch_lag_seconds: Callable[[], float | None] = lambda: None
    """For how long the watch of the registry has been lost; None: it has not begun."""
    fair_share: Callable[[str], float | None] = lambda _: None
    """A tenant's account of fair share, in tokens by its weight; None: it has none."""
    active_tenants: Callable[[], int] = lambda: 0


class SchedulingObserver:
    """Gets every event of one router's scheduling. Its methods neither wait nor raise; here they do nothing."""

    def show(self, state: RouterState) -> None:
        """Gets the reads of the state, once."""

    def note_decision(self, decision: RequestDecision, request: PlacementRequest, view: FleetView) -> None:
        """A decision about a request."""

    def note_wait(self, request: PlacementRequest, kind: WaitKind, view: FleetView) -> None:
        """A request that waits, or that waits for something else now."""

    def note_estimate(self, request: PlacementRequest, error: float, view: FleetView) -> None:
        """A request that was shown a wait and has been placed: the error of the first one; see `estimate_error`."""

    def note_wake(self, model: str) -> None:
        """A wake or a load that waiting requests caused."""

    def note_failed_wake(self, model: str, reason: Reason) -> None:
        """A wake that failed."""

    def note_failed_attempt(self, reason: Reason) -> None:
        """An attempt that failed before any content."""

    def note_end(self, ended: RequestEnded) -> None:
        """The end of a request."""

"""The port for counting a router's scheduling events."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from router_svc.policy.decisions import RequestDecision, WaitKind
from router_svc.policy.endpoints.candidates import HostMemory
from router_svc.policy.quotes import Coverage
from router_svc.policy.router_request import Request
from router_svc.receipt_counts import ReceiptCounts
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing


@dataclass(slots=True, kw_only=True)
class RequestEnded:
    """The end of a request. The loop sends it once to each subscriber."""

    request: Request
    at: float
    """Seconds on the router's monotonic clock."""
    view: FleetView
    reason: Reason
    """UNSPECIFIED: success."""
    receipt: receipt_pb2.Receipt | None = None
    """None: its dispatcher left without one."""
    refusal: WeftError | None = None
    """The error of a refusal before the scheduler, such as a rate limit."""
    last_error: Reason | None = None
    """Reason of the last error sent to its dispatcher; None: none since its last grant."""
    was_placed: bool = False
    """Whether a runner may have worked on it."""
    is_closing: bool = False
    """Whether this router is stopping, so that the dispatcher continues without it."""
    is_no_request: bool = field(init=False)
    """See the function."""
    is_counted: bool = field(init=False)
    """Whether it counts as a request: attempts of tasks do not, as the task counts when it ends."""
    counts: ReceiptCounts | None = field(init=False)
    """What its receipt counts."""
    outcome: "receipt_pb2.Outcome.ValueType | None" = field(init=False)
    """The outcome; OUTCOME_UNSPECIFIED: unknown, None: its dispatcher places it again."""
    asked_label: str = field(init=False)
    """The requested name, or `unknown`."""
    answered_label: str = field(init=False, default="")
    """The model that answered, or `unknown`; empty: without an attempt, its receipt repeats the requested name."""

    def __post_init__(self) -> None:
        # Most subscribers ask for each of these.
        spec, receipt = self.request.spec, self.receipt
        self.is_no_request = is_no_request(spec, self.reason)
        self.is_counted = not (spec.task_id or self.is_no_request)
        self.counts = None if receipt is None else ReceiptCounts(receipt, spec.priority)
        self.outcome = self._outcome_without_receipt() if receipt is None else receipt.outcome
        self.asked_label = self.view.label(spec.model)
        if receipt is not None and receipt.attempts:
            self.answered_label = self.view.label(receipt.model)

    def _outcome_without_receipt(self) -> "receipt_pb2.Outcome.ValueType | None":
        """A dispatcher that is refused over gRPC can only leave: its request ends as cancelled without a receipt."""
        if self.refusal is not None:
            return receipt_pb2.OUTCOME_REJECTED
        error, is_closing = self.last_error, self.is_closing
        if error is Reason.SERVICE_UNAVAILABLE and not (is_closing and self.was_placed):
            return None
        if error is Reason.CANCELLED:
            return receipt_pb2.OUTCOME_CANCELLED
        if error is None or is_closing:
            return receipt_pb2.OUTCOME_UNSPECIFIED
        return receipt_pb2.OUTCOME_FAILED if self.was_placed else receipt_pb2.OUTCOME_REJECTED


def is_no_request(spec: PlacementRequest, reason: Reason) -> bool:
    """Return whether nothing was to be recorded: tokens were to be counted by a model that cannot count them.

    Clients ask before they send, such as the workbench; they estimate then, so nothing has failed.
    """
    return spec.operation is Operation.TOKENIZE and reason is Reason.UNSUPPORTED_OPERATION


Subscriber = Callable[[RequestEnded], None]
"""Called from the event loop at the end of each request; must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """Functions that read the state of a router."""

    queues: Callable[[], Iterable[PoolQueue]]
    hosts: Callable[[], Mapping[str, HostMemory]]
    memory_age_seconds: Callable[[], float | None]
    """Age of the hosts' memory; None: never read."""
    tracing: Tracing = NO_TRACING
    view_revision: Callable[[], int] = lambda: 0
    watch_lag_seconds: Callable[[], float | None] = lambda: None
    """How long the watch of the registry has been lost; None: it has not begun."""
    fair_share: Callable[[str], float | None] = lambda _: None
    """A tenant's fair-share account in weighted tokens; None: it has none."""
    active_tenants: Callable[[], int] = lambda: 0
    quotes: Callable[[], Mapping[str, Coverage]] = dict
    """How often quoted times were kept, by what was quoted."""


class SchedulingObserver:
    """Receives a router's scheduling events. Methods must neither block nor raise; here they do nothing."""

    def show(self, state: RouterState) -> None:
        """Receives the state functions, once."""

    def note_decision(self, decision: RequestDecision, request: PlacementRequest, view: FleetView) -> None:
        """Receives a decision about a request."""

    def note_wait(self, request: PlacementRequest, kind: WaitKind, view: FleetView) -> None:
        """Receives what a request waits for when that changes."""

    def note_estimate(self, request: PlacementRequest, error: float, view: FleetView) -> None:
        """Receives the error of the first wait that a placed request was shown; see `estimate_error`."""

    def note_wake(self, model: str) -> None:
        """Receives a wake or load caused by waiting requests."""

    def note_failed_wake(self, model: str, reason: Reason) -> None:
        """Receives a failed wake."""

    def note_failed_attempt(self, reason: Reason) -> None:
        """Receives an attempt that failed before any content."""

    def note_end(self, ended: RequestEnded) -> None:
        """Receives the end of a request."""

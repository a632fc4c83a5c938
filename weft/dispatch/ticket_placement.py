"""A request that arrives at its runner with its ticket: the placement that it has, and the report of its end."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.placement import Decision, Grant, OnCancelled, Placement, PlacementPort, PlacementRequest
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

AT_ONCE = ReconnectConfig(router_outage_limit_seconds=0.0, view_lag_limit_seconds=0.0)
"""For dispatchers over a `TicketPlacement`: there is no router that could place the request again."""

SendReport = Callable[[str, lane_service_pb2.AttemptReport], None]
"""Reports an attempt to the router of this name; returns at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketRunner:
    """The runner of this process, as a grant names it."""

    address: str
    """gRPC target of the runner."""
    host: str


class TicketedAttempt:
    """One request with a ticket that its runner has reserved; exactly one report of its end is sent."""

    def __init__(
        self, ticket: ticket_pb2.Ticket, claims: ticket_pb2.TicketClaims, clock: Clock, send: SendReport
    ) -> None:
        self.claims = claims
        self._ticket = ticket
        self._clock = clock
        self._send = send
        self._arrived = clock.monotonic()
        self._first_content: float | None = None
        self._is_reported = False
        self._cancelled: WeftError | None = None
        self._on_cancelled: OnCancelled | None = None

    def cancel(self, error: WeftError) -> None:
        """Deliver a cancellation, now or as soon as there is something to cancel. The first one counts."""
        if self._cancelled is not None:
            return
        self._cancelled = error
        if self._on_cancelled is not None:
            self._on_cancelled(error)

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        """See Placement.watch_cancellation."""
        self._on_cancelled = on_cancelled
        if self._cancelled is not None:
            on_cancelled(self._cancelled)

    def note_first_content(self) -> None:
        """Note that the answer has begun."""
        self._first_content = self._clock.monotonic()

    def end(self, receipt: receipt_pb2.Receipt) -> None:
        """Report the end to the router that the ticket names. Only the first call counts."""
        if self._is_reported:
            return
        self._is_reported = True
        if not self.claims.lane.report_to:
            return
        report = lane_service_pb2.AttemptReport(ticket=self._ticket, receipt=receipt)
        if self._first_content is not None:
            report.time_to_first_content.FromNanoseconds(int((self._first_content - self._arrived) * 1e9))
        self._send(self.claims.lane.report_to, report)

    def end_refused(self, reason: Reason) -> None:
        """Report an end before the request was dispatched. Does nothing where the end was reported."""
        receipt = receipt_pb2.Receipt(
            request_id=self.claims.request_id,
            model=self.claims.model,
            outcome=receipt_pb2.OUTCOME_CANCELLED if reason is Reason.CANCELLED else receipt_pb2.OUTCOME_FAILED,
            reason=reason.value,  # type: ignore[arg-type]  # same numbers
        )
        self.end(receipt)

    def grant(self, runner: TicketRunner) -> Grant:
        """Returns the grant that the ticket is."""
        claims, terms = self.claims, self.claims.lane
        return Grant(
            claims=self._ticket.claims,
            mac=self._ticket.mac,
            runner=claims.runner,
            runner_incarnation=claims.runner_incarnation,
            address=runner.address,
            host=runner.host,
            model=claims.model,
            attempt=claims.attempt,
            keep_alive_seconds=terms.keep_alive.ToNanoseconds() / 1e9 if terms.HasField("keep_alive") else None,
            priority=Priority.from_wire(terms.priority) if terms.priority else None,
            seconds_left=terms.time_left.ToNanoseconds() / 1e9 if terms.HasField("time_left") else None,
            queue_wait_seconds=terms.queue_wait.ToNanoseconds() / 1e9,
            load_wait_seconds=terms.load_wait.ToNanoseconds() / 1e9,
        )


class TicketPlacement(PlacementPort):
    """A PlacementPort for the one request of a ticket: it is granted at once, and placed nowhere else."""

    def __init__(self, attempt: TicketedAttempt, runner: TicketRunner) -> None:
        self._attempt = attempt
        self._runner = runner

    @override
    def place(self, request: PlacementRequest) -> "TicketPlace":
        return TicketPlace(self._attempt, self._runner)


class TicketPlace(Placement):
    """The place that a ticket gives its request."""

    def __init__(self, attempt: TicketedAttempt, runner: TicketRunner) -> None:
        self._attempt = attempt
        self._runner = runner
        self._is_granted = False
        self._failed: Reason | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @override
    async def next_decision(self) -> Decision:
        if not self._is_granted:
            self._is_granted = True
            return self._attempt.grant(self._runner)
        raise WeftError(self._failed or Reason.NO_RUNNER_AVAILABLE, "the ticket was for one attempt")

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        self._attempt.watch_cancellation(on_cancelled)

    @override
    async def report_first_content(self, attempt: int) -> None:
        self._attempt.note_first_content()

    @override
    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None:
        self._failed = reason

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        if receipt is not None:
            self._attempt.end(receipt)
        else:
            self._attempt.end_refused(reason)
        return True

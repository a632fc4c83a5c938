"""One request of the lane: what it was granted, what its witnesses said, and its receipt."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.picker.ends import ProxySight, disagreements, proxy_record, seen_end
from gateway.picker.engine_slot import EngineSlot
from gateway.picker.subset import ANYWHERE, Allowed
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.lane import EndpointKind
from weft.dispatch.placement import Grant, Placement
from weft.dispatch.request_trace import RequestContext, RequestTrace
from weft.kernel.errors import WeftError
from weft.kernel.failures import may_succeed_elsewhere
from weft.kernel.reasons import Reason, reason_of
from weft.kernel.value import value_class


@value_class(kw_only=True)
class GatewayTerms:
    """What the proxy of a request can do with the answer, and what it allows."""

    shows_responses: bool = False
    """Whether responses come to the picker: then it is a gateway that weft has not configured."""
    allowed: Allowed = ANYWHERE
    proxy: str = ""
    """Its IP address; empty: it is on the picker's machine."""
    connection: str = ""
    """The gRPC peer: all streams of one connection have the same one."""


OWN_PROXY = GatewayTerms()


@dataclass(slots=True, eq=False)
class LaneRequest:
    """The state of one request, without its body. Times are seconds on the picker's monotonic clock."""

    context: RequestContext
    placement: Placement
    trace: RequestTrace
    terms: GatewayTerms
    """What its proxy can do, and what it allows."""
    states_usage: bool
    """See `LaneWork.shows_usage`."""
    kind: EndpointKind = EndpointKind.SIDECAR
    grants: tuple[Grant, ...] = ()
    """Those of the endpoints that the proxy may try, in order; empty: it waits."""
    remote: tuple[bool, ...] = ()
    """Of each grant, whether its use may send bytes off the premises."""
    destinations: tuple[str, ...] = ()
    granted_at: float = 0.0
    slot: EngineSlot | None = None
    """The slot that it holds at an engine; None: its endpoint is a runner."""
    is_slot_lost: bool = False
    """Whether the runner has ended that slot's call: the engine is gone."""
    reports: dict[int, lane_service_pb2.AttemptReport] = field(default_factory=dict)
    """What runners reported, by the place of their grants."""
    settled: int | None = None
    """The last place whose report is that of the end: no other endpoint is tried after it; None: no report is."""
    sight: ProxySight | None = None
    due_at: float | None = None
    """When it ends by what is known then; None: it waits for an endpoint."""
    proxy_gone_at: float | None = None
    """When the connection of its proxy ended; None: it has not, or the proxy has told of the request since."""
    asked_at: float | None = None
    """When its runners are asked whether it has come, because its proxy is gone; None: they are not."""
    receipt: receipt_pb2.Receipt | None = None
    """Its receipt, once it has ended."""
    cancelled: WeftError | None = None
    """The error of its cancellation by a separate call; None: it was not cancelled so."""
    ended_at: float = 0.0
    unreported_of: int | None = None
    """The place of the endpoint that served it as far as was known at its end, if no report of it had come by then;
    None: one had."""

    @property
    def request_id(self) -> str:
        """Its id, unique among the requests under way."""
        return self.context.request_id

    @property
    def is_unseen(self) -> bool:
        """Whether its end was assumed, because the proxy is gone that alone could tell of it."""
        return self.kind is EndpointKind.ENGINE and self.proxy_gone_at is not None and self.sight is None

    @property
    def shows_usage(self) -> bool:
        """Whether a complete answer states its usage in the proxy's log: engines are always asked for it."""
        return self.kind is EndpointKind.ENGINE or self.states_usage

    def place_of(self, claims: ticket_pb2.TicketClaims) -> int | None:
        """Returns the place of the grant that a ticket belongs to; None: it is none of this request."""
        for index, grant in enumerate(self.grants):
            if (grant.runner, grant.runner_incarnation, grant.attempt) == (
                claims.runner,
                claims.runner_incarnation,
                claims.attempt,
            ):
                return index
        return None

    def note_report(self, index: int, report: lane_service_pb2.AttemptReport) -> bool:
        """Records the report of the runner at a place; returns whether it is that of the end."""
        self.reports[index] = report
        told = reason_of(report.receipt.reason)
        settles = (
            index == len(self.grants) - 1
            or told is Reason.UNSPECIFIED
            or report.HasField("time_to_first_content")
            or not may_succeed_elsewhere(told)
        )
        if settles and (self.settled is None or index > self.settled):
            self.settled = index
        return settles

    @property
    def served(self) -> int:
        """The place of the endpoint that was tried last, as far as it is known."""
        if self.settled is not None:
            return self.settled
        if self.sight is not None and self.sight.endpoint in self.destinations:
            return self.destinations.index(self.sight.endpoint)
        return max(self.reports, default=0)

    def end(self, unreported: Reason) -> tuple[Reason, receipt_pb2.Receipt | None]:
        """Returns how it ended and the runner's part of its receipt; `unreported`: the reason without a report.

        The runner's word counts, then the proxy's; neither for a request that was cancelled before a runner had it.
        """
        if unreported is Reason.CANCELLED:
            return unreported, None
        report = self.reports.get(self.served)
        if report is not None and (self.settled is not None or self.sight is None):
            return reason_of(report.receipt.reason), report.receipt
        if self.sight is None:
            return unreported, None
        seen = seen_end(self.sight, shows_usage=self.shows_usage)
        part = None if self.sight.usage is None else receipt_pb2.Receipt(usage=self.sight.usage)
        return seen.reason, part

    def note_tried(self) -> None:
        """Record the endpoints that failed before the one that was tried last."""
        for index in range(self.served):
            report = self.reports.get(index)
            reason = Reason.CONNECT_FAILED if report is None else reason_of(report.receipt.reason)
            self.trace.note_attempt_failed(reason, self.granted_at)
            self.trace.note_grant(self.grants[index + 1], self.granted_at, remote=self.remote[index + 1])

    def note_last(self, reason: Reason, now: float) -> None:
        """Record how the attempt that was the last one ended; UNSPECIFIED: it completed."""
        last = self.trace.attempts[-1]
        if reason is Reason.UNSPECIFIED:
            last.reason, last.ended = reason, None
        else:
            self.trace.note_attempt_failed(reason, now)

    def correct_tried(self, index: int) -> bool:
        """Give an attempt before the last one the reason that its runner reports late; returns whether it is one."""
        tried = next((each for each in self.trace.attempts[:-1] if each.grant == self.grants[index]), None)
        if tried is None:
            return False
        tried.reason = reason_of(self.reports[index].receipt.reason)
        return True

    @property
    def unreported(self) -> Sequence[int]:
        """The places of the endpoints that were tried, as far as is known, and whose runners have not reported."""
        return [index for index in range(self.served + 1) if index not in self.reports]

    def note_first_content(self) -> None:
        """Record when the first content came, where the runner says so."""
        report = self.reports.get(self.served)
        if report is not None and report.HasField("time_to_first_content"):
            self.trace.note_first_content(self.granted_at + report.time_to_first_content.ToNanoseconds() / 1e9)

    def contradictions(self) -> list[str]:
        """Returns where the two witnesses contradict each other; none where one of them has said nothing."""
        if self.sight is None or self.receipt is None or self.served not in self.reports:
            return []
        return disagreements(self.receipt, self.sight, shows_usage=self.shows_usage)

    def add_proxy_record(self) -> list[str]:
        """Put the proxy's part into the receipt; returns the contradictions in it."""
        assert self.receipt is not None, "it has ended"
        if self.sight is None:
            return []
        found = self.contradictions()
        self.receipt.proxy.CopyFrom(proxy_record(self.sight, found))
        return found

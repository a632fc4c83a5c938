"""Requests that a proxy has carried on while the picker that placed them was gone, and how they ended.

The process that granted them was killed or stopped. Its successor hears of their ends: from the runner, whose report
has the ticket, and from the proxy's log. Both are collected for a moment; then the router records what is known. What
only the lost process knew is missing: the decisions of the queue, and, unless its router had written the request down,
the caller's client id and the name of the pool.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.picker.ends import ProxySight, disagreements, proxy_record, seen_end
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.lane import LostRequests
from weft.kernel.reasons import Reason, reason_of
from weft.kernel.report_limits import ReportLimits

MAX_COLLECTED = ReportLimits().max_held
"""Requests of whose ends something was heard a moment ago; beyond it the oldest is recorded at once."""
_BETWEEN = " on "
"""Stands between model and runner where the picker names what it has placed."""


@dataclass(slots=True)
class LostRequest:
    """What was heard of the end of one request."""

    request_id: str
    due_at: float
    """When it is recorded, on the picker's monotonic clock."""
    reports: dict[int, tuple[ticket_pb2.TicketClaims, lane_service_pb2.AttemptReport]] = field(default_factory=dict)
    """Reports of runners by the numbers of their attempts."""
    sight: ProxySight | None = None

    def claims(self) -> ticket_pb2.TicketClaims:
        """Returns the claims of the attempt that counted; without a report only the id is known."""
        if not self.reports:
            return ticket_pb2.TicketClaims(request_id=self.request_id)
        return self.reports[self._counted()][0]

    def receipt(self) -> receipt_pb2.Receipt:
        """Returns its receipt: the runner's word counts, then the proxy's."""
        receipt = self._told() if self.reports else self._seen()
        receipt.request_id = self.request_id
        if self.sight is not None:
            # Whether its answer had to state a usage is not known any more.
            found = disagreements(receipt, self.sight, shows_usage=False) if self.reports else []
            receipt.proxy.CopyFrom(proxy_record(self.sight, found))
        return receipt

    def _counted(self) -> int:
        ends = [attempt for attempt, (_, report) in self.reports.items() if _is_end(report)]
        return max(ends or self.reports)

    def _told(self) -> receipt_pb2.Receipt:
        counted = self._counted()
        claims, report = self.reports[counted]
        receipt = receipt_pb2.Receipt()
        receipt.CopyFrom(report.receipt)
        receipt.model, receipt.asked_model = claims.model, claims.lane.asked_model
        # A runner knows of its own attempt alone.
        receipt.ClearField("attempts")
        for attempt in sorted(self.reports):
            named, its = self.reports[attempt]
            if attempt <= counted:
                receipt.attempts.add(
                    runner=named.runner,
                    runner_incarnation=named.runner_incarnation,
                    model=named.model,
                    reason=its.receipt.reason,
                )
        return receipt

    def _seen(self) -> receipt_pb2.Receipt:
        assert self.sight is not None, "something was heard of it"
        seen = seen_end(self.sight, shows_usage=False)
        reason = seen.reason if seen.is_known else Reason.ROUTER_LOST
        model, _, runner = self.sight.placed.rpartition(_BETWEEN)
        receipt = receipt_pb2.Receipt(
            outcome=_OUTCOMES.get(reason, receipt_pb2.OUTCOME_FAILED),
            reason=reason.value,  # type: ignore[arg-type]  # same numbers
            model=model,
            usage=self.sight.usage,
        )
        receipt.attempts.add(runner=runner, model=model, reason=receipt.reason)
        if self.sight.duration_seconds is not None:
            receipt.total_time.FromNanoseconds(int(self.sight.duration_seconds * 1e9))
        return receipt


_OUTCOMES = {
    Reason.UNSPECIFIED: receipt_pb2.OUTCOME_COMPLETED,
    Reason.CANCELLED: receipt_pb2.OUTCOME_CANCELLED,
}


def _is_end(report: lane_service_pb2.AttemptReport) -> bool:
    """Whether a report is that of the end of its request: the proxy tries no other endpoint after it."""
    told = reason_of(report.receipt.reason)
    return told in _OUTCOMES or report.HasField("time_to_first_content")


class LostRequestBook:
    """Collects what is heard of lost requests, each for a moment. Called from the picker's event loop alone."""

    def __init__(self, port: LostRequests, wait_seconds: float) -> None:
        """`wait_seconds`: how long the second witness, and reports of other attempts, are waited for."""
        self._port = port
        self._wait_seconds = wait_seconds
        self._collected: OrderedDict[tuple[str, str], LostRequest] = OrderedDict()
        """By tenant and id, the oldest first; under the tenant "" where only the proxy has spoken."""
        self._by_id: dict[str, LostRequest] = {}
        """The same: the proxy's log has no tenant."""

    def note_attempt(self, claims: ticket_pb2.TicketClaims, report: lane_service_pb2.AttemptReport, now: float) -> bool:
        """Takes a runner's report about a request that is not known; returns whether it is of a lost one."""
        key = (claims.tenant, claims.request_id)
        if not self._port.is_lost(claims.request_id, claims.tenant):
            return False
        lost = self._collected.get(key) or self._collected.pop(("", claims.request_id), None)
        lost = lost or LostRequest(claims.request_id, now + self._wait_seconds)
        if claims.attempt in lost.reports:
            return False
        lost.reports[claims.attempt] = (claims, report)
        self._keep(key, lost)
        self._port.note_gone(claims)
        return True

    def note_sight(self, sight: ProxySight, now: float) -> None:
        """Takes the log's entry of a request that is not known."""
        lost = self._by_id.get(sight.request_id)
        if lost is None:
            lost = LostRequest(sight.request_id, now + self._wait_seconds)
            self._keep(("", sight.request_id), lost)
        lost.sight = lost.sight or sight

    def sweep(self, now: float) -> None:
        """Has the router record what was collected for long enough."""
        while self._collected:
            if next(iter(self._collected.values())).due_at > now:
                return
            self._record_oldest()

    def close(self) -> None:
        """Has the router record all that was collected."""
        while self._collected:
            self._record_oldest()

    def _keep(self, key: tuple[str, str], lost: LostRequest) -> None:
        self._collected[key] = self._by_id[lost.request_id] = lost
        if len(self._collected) > MAX_COLLECTED:
            self._record_oldest()

    def _record_oldest(self) -> None:
        _, lost = self._collected.popitem(last=False)
        if self._by_id.get(lost.request_id) is lost:
            del self._by_id[lost.request_id]
        claims = lost.claims()
        if self._port.is_lost(lost.request_id, claims.tenant):
            self._port.recover(claims, lost.receipt())

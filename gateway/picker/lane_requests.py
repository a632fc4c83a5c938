"""The requests of the lane from arrival to end: placed, routed, followed by their witnesses, ended with a receipt.

The permit of a request is held from the grant to the end of the request, which the runner reports (`AttemptReports`)
and the proxy's access log. The first witness that settles it ends it; the second one is waited for a moment, and
compared. A request whose end neither reports ends after a limit, with the reason DEADLINE_EXCEEDED.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gateway.picker.ended_requests import EndedRequests
from gateway.picker.endpoint_addresses import EndpointAddresses
from gateway.picker.ends import ProxySight, has_begun, is_whole, was_never_reached
from gateway.picker.engine_body import engine_body
from gateway.picker.engine_reach import EngineReach
from gateway.picker.engine_slot import EngineSlots
from gateway.picker.intake import LaneWork
from gateway.picker.lane_cancellation import cancel_at_runners, not_cancellable, void_at_runners
from gateway.picker.lane_request import OWN_PROXY, GatewayTerms, LaneRequest
from gateway.picker.limits import PickerLimits
from gateway.picker.lost_requests import LostRequestBook
from gateway.picker.metrics import PickerMetrics
from gateway.picker.session import Route
from gateway.picker.subset import Allowed, allowed_runners
from gateway.rate_limit_headers import rate_limit_headers
from gateway.request_facts import facts_of
from weft.api.common.v1 import receipt_pb2
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.agents import known_names
from weft.dispatch.dispatcher import may_leave, name_alias, placement_request, record_spans, reported_error
from weft.dispatch.fleet import FleetSource
from weft.dispatch.lane import AttemptReports, EndpointKind, LaneEndpoint, LostRequests, endpoint_in
from weft.dispatch.placement import Grant, LanePlacement, Placement, PlacementPort, canceller_of
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.dispatch.request_trace import RequestTrace, log_receipt
from weft.dispatch.tickets import TICKET_HEADER, ticket_text
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import DESTINATION_NAMESPACE, PLACED, REQUEST_ID_HEADER
from weft.kernel.log import get_logger
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import ChannelPool
from weft.kernel.service import start_restarting, start_task, stop_tasks
from weft.kernel.telemetry import TRACEPARENT
from weft.kernel.tracing import NO_TRACING, ServiceName, Tracing

log = get_logger("weft.picker")

SWEEP_SECONDS = 0.25
"""Interval in which requests are looked through for ends that are due."""
_KEYS = ("authorization", "x-api-key")
"""Headers with the caller's key, which is checked here and goes no further."""
_TIMEOUT_HEADER, _RETRIES_HEADER = "x-envoy-upstream-rq-timeout-ms", "x-envoy-max-retries"


def _amend_nothing(tenant: str, receipt: receipt_pb2.Receipt) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePorts:
    """What the lane is built over."""

    placement: PlacementPort
    fleet: FleetSource
    channels: ChannelPool
    """To runners, for the slots of engines."""
    clock: Clock
    report_to: str
    """Name of the router that hears from runners, among the routers."""
    steady: ReconnectConfig
    host: str = ""
    """Name of this machine, as runners report theirs; empty: not known."""
    sign_interval_seconds: float = 10.0
    """Interval in which the proxy tells of each request that goes on (`access_log_flush_interval`)."""
    tracing: Tracing = NO_TRACING
    amend: Callable[[str, receipt_pb2.Receipt], None] = _amend_nothing
    """Puts a receipt, to which the second witness has added, into the record of the tenant's request."""
    lost: LostRequests | None = None
    """Where the ends of requests are recorded that an earlier process has placed; None: nowhere."""


class LaneRequests(AttemptReports):
    """All requests of the lane of one picker. Called from one event loop."""

    def __init__(self, ports: LanePorts, limits: PickerLimits, metrics: PickerMetrics) -> None:
        self._ports = ports
        self._limits = limits
        self._metrics = metrics
        self._addresses = EndpointAddresses(ports.clock)
        self._reach = EngineReach(ports.host, self._addresses)
        self._slots = EngineSlots(ports.channels)
        self._open: dict[str, LaneRequest] = {}
        self._ended = EndedRequests(limits.max_open_requests)
        self._lost = None if ports.lost is None else LostRequestBook(ports.lost, limits.report_wait_seconds)
        self._has_signs_of_life = False
        self._sweeping: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._on_idle: asyncio.Future[None] | None = None

    @property
    def open_count(self) -> int:
        """Number of requests that wait or are answered."""
        return len(self._open)

    async def start(self) -> None:
        """Begin to look for ends that are due."""
        self._sweeping = start_restarting(self._sweep_on, name="picker-sweep", clock=self._ports.clock)

    async def idle(self) -> None:
        """Return once no request is open."""
        while self._open:
            self._on_idle = asyncio.get_running_loop().create_future()
            await self._on_idle

    async def stop(self) -> None:
        """End what is left: its bytes flow on without the picker. Idempotent."""
        if self._sweeping is not None:
            await stop_tasks([self._sweeping])
            self._sweeping = None
        for lane in list(self._open.values()):
            # The proxy goes on with what is placed: the next process of this router hears how it ends.
            self._end(lane, Reason.ROUTER_LOST if lane.grants else Reason.SHUTTING_DOWN, "none")
        if self._lost is not None:
            self._lost.close()
        while self._closing:
            await asyncio.wait(self._closing)

    async def place(self, work: LaneWork, on_waiting: Callable[[], None], terms: GatewayTerms = OWN_PROXY) -> Route:
        """Waits for an endpoint and returns the route to it; `on_waiting` is called once where there is none at once.

        Raises the WeftError of a refusal. A cancelled wait ends the request: its caller has left.
        """
        if len(self._open) >= self._limits.max_open_requests:
            words = f"the picker follows {self._limits.max_open_requests} requests already (picker.max_open_requests)"
            raise WeftError(Reason.TOO_MANY_RESOURCES, words, retry_after_seconds=1)
        only_runners = frozenset[str]()
        if not terms.allowed.are_all:
            endpoints = await self._addresses.of_runners(self._ports.fleet.view.runners.values())
            only_runners = allowed_runners(endpoints, terms.allowed)
        lane = self._begin(work, terms, only_runners)
        try:
            return await self._route(lane, work, on_waiting)
        except WeftError as error:
            name_alias(error, work.context)
            self._end(lane, error.reason, "", cancelled_by=canceller_of(error))
            raise
        except BaseException:
            self._end(lane, Reason.CANCELLED, "")
            raise

    def note_attempt(self, claims: ticket_pb2.TicketClaims, report: lane_service_pb2.AttemptReport) -> bool:
        """See `AttemptReports.note_attempt`."""
        lane = self._open.get(claims.request_id) or self._ended.get(claims.request_id)
        index = None if lane is None else lane.place_of(claims)
        if lane is None or index is None or index in lane.reports:
            self._metrics.unknown("runner")
            now = self._ports.clock.monotonic()
            return lane is None and self._lost is not None and self._lost.note_attempt(claims, report, now)
        settles = lane.note_report(index, report)
        if lane.receipt is not None and lane.correct_tried(index):
            self._correct_tried(lane)
        elif lane.receipt is not None:
            self._note_late_report(lane, index, settles=settles)
        elif settles or lane.sight is not None:
            self._end(lane, Reason.WORKER_LOST, "runner")
        else:
            # The proxy may try the next endpoint, whose report or whose log follows.
            self._extend(lane)
        return True

    def note_sight(self, sight: ProxySight) -> None:
        """Note an entry of the proxy's log."""
        self._has_signs_of_life |= sight.goes_on
        lane = self._open.get(sight.request_id)
        if lane is None:
            self._note_late(sight)
        elif sight.goes_on:
            lane.proxy_gone_at = lane.asked_at = None
            self._extend(lane)
        elif lane.grants:
            lane.sight = sight
            if lane.kind is EndpointKind.ENGINE or was_never_reached(sight):
                self._end(lane, Reason.WORKER_LOST, "proxy")
            else:
                lane.due_at = self._ports.clock.monotonic() + self._limits.report_wait_seconds
                if is_whole(sight):
                    # Under load the report comes after further requests of the same callers.
                    lane.placement.free_slot_at_once()

    def note_proxy_gone(self, connection: str) -> None:
        """Note the end of a proxy's connection: what it has not sent on by then has reached no runner.

        A runner that has a request sees its caller leave, and reports it; the others are asked. Of an engine that the
        proxy calls itself nothing else tells: unless a proxy that has only connected again does within its interval,
        the request has ended with it.
        """
        now, wait = self._ports.clock.monotonic(), self._limits.report_wait_seconds
        for lane in self._open.values():
            if lane.due_at is None or lane.terms.connection != connection:
                continue
            lane.proxy_gone_at = now
            if lane.kind is EndpointKind.ENGINE:
                lane.due_at = min(lane.due_at, now + self._ports.sign_interval_seconds + wait)
            else:
                lane.asked_at = now + wait

    def sweep(self) -> None:
        """End what is due, and forget what has ended long enough ago."""
        now = self._ports.clock.monotonic()
        for lane in self._open.values():
            if lane.asked_at is not None and lane.asked_at <= now:
                lane.asked_at = None
                if lane.sight is None:
                    self._run(self._void_at_runners(lane), "picker-void")
        for lane in [each for each in self._open.values() if each.due_at is not None and each.due_at <= now]:
            self._end_due(lane)
        self._ended.forget(now)
        if self._lost is not None:
            self._lost.sweep(now)

    def _end_due(self, lane: LaneRequest) -> None:
        """End a request by what is known of it now."""
        if lane.is_slot_lost and lane.sight is None:
            self._end(lane, Reason.SERVER_DIED, "runner")
        elif lane.is_unseen:
            log.warning("the proxy of a request is gone", request_id=lane.request_id, runner=lane.grants[0].runner)
            self._end(lane, Reason.CANCELLED, "none")
        elif lane.sight is None and not lane.reports:
            log.warning("end of a request not reported", request_id=lane.request_id, runner=lane.grants[0].runner)
            self._end(lane, Reason.DEADLINE_EXCEEDED, "none")
        else:
            self._end(lane, Reason.WORKER_LOST, "runner" if lane.sight is None else "proxy")

    async def _sweep_on(self) -> None:
        while True:
            await self._ports.clock.sleep(SWEEP_SECONDS)
            self.sweep()

    def _begin(self, work: LaneWork, terms: GatewayTerms, only_runners: frozenset[str]) -> LaneRequest:
        context, ports = work.context, self._ports
        facts = facts_of(work.scope)
        if context.request_id in self._open or context.request_id in self._ended:
            # Witnesses name a request by its id, and callers may use one again.
            facts.request_id = new_id("req")
            context = replace(context, request_id=facts.request_id)
        trace = RequestTrace(context, facts.arrived)
        facts.was_dispatched = True
        seconds_left = context.timeout_seconds
        if seconds_left is not None:
            seconds_left = max(0.0, seconds_left - (ports.clock.monotonic() - facts.arrived))
        fallbacks = self._limits.foreign_fallbacks if terms.shows_responses else self._limits.fallbacks
        lane_terms = LanePlacement(report_to=ports.report_to, fallbacks=fallbacks, only_runners=only_runners)
        request = placement_request(context, work.payload, seconds_left=seconds_left, lane=lane_terms)
        placement = ReconnectingPlacement(
            ports.placement,
            request,
            ports.clock,
            ports.steady,
            knows=lambda name: name in known_names(ports.fleet.view),
        )
        lane = self._open[context.request_id] = LaneRequest(
            context, placement, trace, terms=terms, states_usage=work.shows_usage
        )
        return lane

    async def _route(self, lane: LaneRequest, work: LaneWork, on_waiting: Callable[[], None]) -> Route:
        clock, last_error, rate_limits = self._ports.clock, None, None
        await lane.placement.__aenter__()
        while True:
            try:
                decision = await lane.placement.next_decision()
            except WeftError as rejection:
                raise reported_error(rejection, last_error) from rejection
            rate_limits = decision.rate_limits or rate_limits
            if not isinstance(decision, Grant):
                if not lane.trace.waits:
                    on_waiting()
                lane.trace.note_waiting(decision, clock.monotonic())
                continue
            now = lane.granted_at = clock.monotonic()
            lane.trace.note_grant(decision, now, remote=may_leave(self._ports.fleet.view, decision))
            try:
                route = await self._route_of(lane, work, decision)
            except WeftError as error:
                lane.trace.note_attempt_failed(error.reason, clock.monotonic())
                last_error = error
                await lane.placement.report_attempt_failed(decision.attempt, error.reason)
                continue
            lane.placement.watch_cancellation(partial(self._cancel, lane))
            if lane.cancelled is not None:
                raise lane.cancelled
            self._follow(lane, decision)
            return _with_answer_headers(route, lane, rate_limits)

    async def _route_of(self, lane: LaneRequest, work: LaneWork, grant: Grant) -> Route:
        """Returns the route of a grant. Raises the error of an attempt whose endpoint does not take it."""
        operation = lane.context.operation
        endpoint = await self._endpoint_of(lane, grant)
        if endpoint is None:
            words = f"the runner {grant.runner} has no address that this proxy reaches or allows; set its http_port"
            raise WeftError(Reason.TOOL_UNAVAILABLE, words)
        lane.kind = endpoint.kind
        if endpoint.kind is EndpointKind.ENGINE:
            return await self._engine_route(lane, work.request.body, grant)
        allowed, view = lane.terms.allowed, self._ports.fleet.view
        grants, places = [grant], [await self._addresses.of(endpoint.url)]
        _require_allowed(allowed, places[0])
        for other in grant.fallbacks:
            its = self.endpoint_of(other, operation)
            if its is not None and its.kind is EndpointKind.SIDECAR:
                place = await self._addresses.of(its.url)
                if allowed.has(place):
                    grants.append(other)
                    places.append(place)
        lane.grants, lane.destinations = tuple(grants), tuple(places)
        lane.remote = tuple([may_leave(view, each) for each in grants])
        tickets = ",".join([ticket_text(each.claims, each.mac) for each in grants])
        return Route(
            destinations=lane.destinations,
            set_headers=((TICKET_HEADER, tickets), *self._headers(lane, grant)),
            remove_headers=_KEYS,
            facts=_facts(grant),
        )

    async def _engine_route(self, lane: LaneRequest, body: bytes, grant: Grant) -> Route:
        slot = lane.slot = await self._slots.hold(grant)
        try:
            place = await self._addresses.of(slot.url)
            # It may have started again since it was looked at.
            _require_allowed(lane.terms.allowed, place)
        except BaseException:
            slot.release()
            raise
        slot.watch(lambda: self._note_slot_lost(lane))
        lane.grants = (grant,)
        lane.destinations = (place,)
        key = (("authorization", f"Bearer {slot.api_key}"),) if slot.api_key else ()
        return Route(
            destinations=lane.destinations,
            set_headers=(*key, *self._headers(lane, grant)),
            remove_headers=("x-api-key", TICKET_HEADER) if key else (*_KEYS, TICKET_HEADER),
            body=engine_body(body, slot.model or grant.model),
            facts=_facts(grant),
        )

    def endpoint_of(self, grant: Grant, operation: Operation) -> LaneEndpoint | None:
        """Returns where the proxy sends a request of a grant; None: nowhere."""
        runner = self._ports.fleet.view.runners.get(grant.runner)
        return None if runner is None else lane_endpoint(endpoint_in(runner, grant.model), runner.lane_url, operation)

    async def _endpoint_of(self, lane: LaneRequest, grant: Grant) -> LaneEndpoint | None:
        """Returns where the proxy of a request sends it: not to an engine that it does not reach, or does not allow."""
        found = self.endpoint_of(grant, lane.context.operation)
        if found is None or found.kind is EndpointKind.SIDECAR:
            return found
        runner, allowed = self._ports.fleet.view.runners[grant.runner], lane.terms.allowed
        url = runner.instances[grant.model].engine_lane_url
        is_allowed = allowed.are_all or (bool(url) and allowed.has(await self._addresses.of(url)))
        if is_allowed and await self._reach.reaches(lane.terms.proxy, runner, grant.model):
            return found
        return LaneEndpoint(kind=EndpointKind.SIDECAR, url=runner.lane_url) if runner.lane_url else None

    def _headers(self, lane: LaneRequest, grant: Grant) -> tuple[tuple[str, str], ...]:
        found = [
            (REQUEST_ID_HEADER, lane.request_id),
            (TRACEPARENT, lane.context.traceparent),
            (_RETRIES_HEADER, str(len(lane.destinations) - 1)),
        ]
        left = self._seconds_left(lane, grant)
        if left is not None:
            found.append((_TIMEOUT_HEADER, str(max(1, int(left * 1e3)))))
        return tuple(found)

    def _seconds_left(self, lane: LaneRequest, grant: Grant) -> float | None:
        own = lane.context.timeout_seconds
        if own is not None:
            own -= self._ports.clock.monotonic() - lane.trace.arrived
        left = [seconds for seconds in (own, grant.seconds_left) if seconds is not None]
        return max(0.0, min(left)) if left else None

    def _follow(self, lane: LaneRequest, grant: Grant) -> None:
        """Wait for the witnesses of a request that the proxy carries from here on."""
        limit = self._limits.end_report_limit_seconds
        lane.due_at = self._ports.clock.monotonic() + limit + (self._seconds_left(lane, grant) or 0.0)
        if self._has_signs_of_life:
            self._extend(lane)

    def _extend(self, lane: LaneRequest) -> None:
        lane.due_at = self._ports.clock.monotonic() + self._limits.end_report_limit_seconds

    def _note_slot_lost(self, lane: LaneRequest) -> None:
        """The engine of a request is gone; the proxy's log says what its caller got."""
        if lane.receipt is None and lane.request_id in self._open and lane.grants:
            lane.is_slot_lost = True
            lane.due_at = self._ports.clock.monotonic() + self._limits.report_wait_seconds

    def _cancel(self, lane: LaneRequest, error: WeftError) -> None:
        """End a request; see `OnCancelled`."""
        if lane.due_at is not None and lane.kind is EndpointKind.ENGINE and lane.proxy_gone_at is None:
            raise not_cancellable()
        lane.cancelled = error
        if lane.due_at is not None:
            self._run(self._cancel_at_runners(lane, canceller_of(error)), "picker-cancel")

    async def _cancel_at_runners(self, lane: LaneRequest, cancelled_by: str) -> None:
        is_at_runner = lane.kind is EndpointKind.SIDECAR
        asked = [grant for index, grant in enumerate(lane.grants) if is_at_runner and index not in lane.reports]
        if not await cancel_at_runners(self._ports.channels, asked, cancelled_by):
            self._end(lane, Reason.CANCELLED, "")

    async def _void_at_runners(self, lane: LaneRequest) -> None:
        """End a request that has come to no runner, and let none take it; ask again where one does not answer."""
        asked = [grant for index, grant in enumerate(lane.grants) if index not in lane.reports]
        is_voided = await void_at_runners(self._ports.channels, asked)
        if is_voided is None:
            # Less and less often: a runner that is gone for good is not asked about each of its requests without end.
            now = self._ports.clock.monotonic()
            if lane.proxy_gone_at is not None:
                lane.asked_at = now + max(self._limits.report_wait_seconds, now - lane.proxy_gone_at)
        elif is_voided:
            self._end(lane, Reason.CANCELLED, "runner")

    def _note_late(self, sight: ProxySight) -> None:
        """Note an entry of a request that has ended, or that this picker does not know."""
        ended = self._ended.get(sight.request_id)
        if ended is not None and ended.grants and ended.sight is None and not sight.goes_on:
            is_assumed = ended.is_unseen and ended.cancelled is None
            ended.sight = sight
            if is_assumed:
                self._end_again(ended)
            self._compare(ended)
        elif ended is None and sight.placed and not sight.goes_on:
            self._metrics.unknown("proxy")
            log.info(
                "the proxy reports the end of a request that this picker has not placed",
                request_id=sight.request_id,
                placed=sight.placed,
                status=sight.status,
                details=sight.details,
            )
            if self._lost is not None:
                self._lost.note_sight(sight, self._ports.clock.monotonic())

    def _note_late_report(self, lane: LaneRequest, index: int, *, settles: bool) -> None:
        """Put a runner's report that came after the end into the receipt: it knows more than was assumed then."""
        assert lane.receipt is not None, "it has ended"
        if lane.unreported_of == index and settles:
            self._end_again(lane)
            lane.unreported_of = None
        self._compare(lane)

    def _end_again(self, lane: LaneRequest) -> None:
        """Make the receipt of a request that has ended by what a witness has said since."""
        reason, part = lane.end(Reason.WORKER_LOST)
        lane.note_last(reason, lane.ended_at)
        lane.note_first_content()
        lane.receipt = lane.trace.receipt(reason, part, lane.ended_at)
        lane.receipt.cancelled_by = canceller_of(lane.cancelled) if reason is Reason.CANCELLED else ""

    def _correct_tried(self, lane: LaneRequest) -> None:
        """Make the receipt of a request that has ended again: an attempt before the last one was reported late."""
        assert lane.receipt is not None, "it has ended"
        reason, cancelled_by = Reason(lane.receipt.reason), lane.receipt.cancelled_by
        _, part = lane.end(Reason.WORKER_LOST)
        lane.receipt = lane.trace.receipt(reason, part, lane.ended_at)
        lane.receipt.cancelled_by = cancelled_by
        lane.add_proxy_record()
        self._ports.amend(lane.context.tenant, lane.receipt)

    def _compare(self, lane: LaneRequest) -> None:
        """Add what the second witness says to the receipt of a request that has ended."""
        assert lane.receipt is not None, "it has ended"
        self._note_disagreements(lane, lane.add_proxy_record())
        self._ports.amend(lane.context.tenant, lane.receipt)

    def _note_disagreements(self, lane: LaneRequest, found: list[str]) -> None:
        if found:
            self._metrics.disagreed(found)
            log.warning("witnesses of a request disagree", request_id=lane.request_id, about=found)

    def _end(self, lane: LaneRequest, unreported: Reason, witness: str, *, cancelled_by: str = "") -> None:
        """End a request with its receipt and give its permit back; idempotent."""
        if self._open.pop(lane.request_id, None) is None:
            return
        clock, context, trace = self._ports.clock, lane.context, lane.trace
        now, reason, part = clock.monotonic(), unreported, None
        if lane.grants:
            reason, part = lane.end(unreported)
            lane.note_tried()
            lane.note_last(reason, now)
            lane.note_first_content()
        receipt = lane.receipt = trace.receipt(reason, part, now)
        receipt.cancelled_by = cancelled_by or (canceller_of(lane.cancelled) if reason is Reason.CANCELLED else "")
        contradictions = lane.add_proxy_record()
        log_receipt(context, receipt, now - trace.arrived)
        self._note_disagreements(lane, contradictions)
        if witness:
            self._metrics.ended(witness)
        record_spans(self._ports.tracing, clock, ServiceName.ROUTER, trace, receipt, now)
        if lane.slot is not None:
            lane.slot.release()
        if lane.grants:
            lane.ended_at, wait = now, self._limits.report_wait_seconds
            if lane.kind is EndpointKind.SIDECAR and (missing := lane.unreported):
                # A runner under load may say later how it was, and knows better than what is assumed until then.
                wait = self._limits.end_report_limit_seconds
                lane.unreported_of = lane.served if lane.served in missing else None
            elif lane.is_unseen:
                wait = self._limits.end_report_limit_seconds
            self._ended.keep(lane, now, wait)
        if not self._open and self._on_idle is not None and not self._on_idle.done():
            self._on_idle.set_result(None)
        self._close(lane, reason, receipt)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run something that `stop` waits for."""
        task = start_task(work, name=name)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _close(self, lane: LaneRequest, reason: Reason, receipt: receipt_pb2.Receipt) -> None:
        """Report the end to the scheduler: at once to one of this process, to another one in a task."""
        has_content = lane.sight is not None and has_begun(lane.sight)
        has_failed = bool(lane.grants) and reason is not Reason.UNSPECIFIED
        attempt = None
        if has_failed and (has_content or lane.trace.first_content is not None):
            attempt = lane.grants[lane.served].attempt
        if not lane.placement.end_at_once(reason, receipt, content_of=attempt):
            self._run(_report_end(lane.placement, reason, receipt, attempt), "picker-end")


async def _report_end(placement: Placement, reason: Reason, receipt: receipt_pb2.Receipt, attempt: int | None) -> None:
    """Reports the end of a request and leaves it; `attempt`: the one whose answer had begun; None: none, or unsaid."""
    if attempt is not None:
        await placement.report_first_content(attempt)
    with suppress(WeftError):
        await placement.report_finished(reason, receipt)
    await placement.__aexit__(None, None, None)


def lane_endpoint(found: LaneEndpoint | None, runner_url: str, operation: Operation) -> LaneEndpoint | None:
    """Returns the endpoint for an operation: an engine answers chats alone, whose end the proxy's log shows."""
    if found is not None and found.kind is EndpointKind.ENGINE and operation is not Operation.CHAT:
        return LaneEndpoint(kind=EndpointKind.SIDECAR, url=runner_url) if runner_url else None
    return found


def _with_answer_headers(route: Route, lane: LaneRequest, rate_limits: RateLimitStatus | None) -> Route:
    """Returns a route with the headers of the answer that its endpoint does not know; weft's own proxy knows the id."""
    limits = tuple((name.decode(), value.decode()) for name, value in rate_limit_headers(rate_limits))
    own = ((REQUEST_ID_HEADER, lane.request_id),) if lane.terms.shows_responses else ()
    return replace(route, answer_headers=(*own, *limits)) if own or limits else route


def _require_allowed(allowed: Allowed, endpoint: str) -> None:
    """Raises the error of an attempt on a runner that has come since the subset was read: another one may serve."""
    if not allowed.has(endpoint):
        raise WeftError(Reason.TOOL_UNAVAILABLE, "the runner is none of the endpoints that the gateway allows")


def _facts(grant: Grant) -> tuple[tuple[str, str, str], ...]:
    return ((DESTINATION_NAMESPACE, PLACED, f"{grant.model} on {grant.runner}"),)

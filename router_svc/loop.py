"""The scheduling loop: the single writer of the scheduler.

It owns the clock, timers and mailboxes and signs tickets; it makes no decisions.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from router_svc.client_registry import ClientRegistry, ClientsConfig
from router_svc.declared_tenants import declared_in, limits_of, settings_of
from router_svc.figures import DAY, FigureLimits, FiguresRecorder
from router_svc.fleet_view import MeshDiff
from router_svc.observer import RequestEnded, SchedulingObserver, Subscriber
from router_svc.policy.decisions import (
    Decision,
    FailedAttempt,
    Loads,
    Placed,
    Rejects,
    RequestDecision,
    Served,
    StopsWaking,
    WaitKind,
    Waits,
    WakeFailure,
    Wakes,
)
from router_svc.policy.endpoints.candidates import HostMemory
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.prefix_affinity import PrefixReport
from router_svc.policy.estimates import estimate_error
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import RateLimitConfig, Settings
from router_svc.policy.quotes import Quote
from router_svc.policy.router_request import MEDIA_UNITS, Request
from router_svc.policy.scheduler import Scheduler
from router_svc.receipt_counts import ReceiptCounts
from router_svc.request_log import RequestLog, RequestLogLimits
from router_svc.request_record import was_left
from router_svc.spans import WakeSpans
from router_svc.usage import UsageRecorder
from weft.api.common.v1 import receipt_pb2
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.api.registry.v1.tenant_pb2 import Tenant
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1 import request_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch import placement
from weft.dispatch.fleet import FleetView, RunnerView
from weft.dispatch.tickets import TICKET_LIFETIME_SECONDS, sign
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import trace_id_of
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import NANOSECONDS, duration_of, optional_duration
from weft.kernel.values.names import new_id

log = get_logger("weft.router")

TICK_SECONDS = 0.25
"""Interval of checks while requests wait or wakes are under way; there is no timer otherwise."""
VIEW_INTERVAL_SECONDS = 0.02
"""Minimum time between two views of a large mesh, which changes constantly."""
LARGE_MESH_MODELS = 256
"""Number of models that makes a mesh large: comparing two such views takes about 50 us."""

MAX_NAMED_TENANTS = 5
"""Maximum tenants that a refusal lists."""

_ABOUT_MODEL = frozenset({Reason.MODEL_NOT_FOUND, Reason.UNSUPPORTED_OPERATION, Reason.MODALITY_UNSUPPORTED})
"""Refusals that another value of the request's `model` field would avoid."""


@dataclass(slots=True)
class Mailbox:
    """Decisions for a request, in order, for at most one reader."""

    request: Request
    rate_limits: RateLimitStatus | None = None
    """What is left for its caller, for its first decision; None: already read, or no limit applies."""
    _decisions: list[placement.Decision | WeftError] = field(default_factory=list)
    """A list, as a deque would take 0.7 KB for as long as the request runs."""
    _arrived: asyncio.Future[None] | None = None
    cancelled: WeftError | None = None
    refused: Reason | None = None
    """Reason of the last delivered error; None: none."""
    was_placed: bool = False
    ended: asyncio.Future[None] | None = None
    """Completed at the end of the request; None: nothing waits for it."""
    _on_cancelled: placement.OnCancelled | None = None
    wait_kind: WaitKind | None = None
    """What the request last waited for; None: it has not waited."""
    estimate: tuple[float, float] | None = None
    """Time and seconds of the first wait shown to the request; None: none, or it has been placed."""

    def cancel(self, error: WeftError) -> None:
        """Deliver a cancellation, even if the caller reads no decisions. Only the first one counts."""
        if self.cancelled is not None:
            return
        if self._on_cancelled is not None:
            self._on_cancelled(error)
        self.cancelled = error
        self.put(error)

    def watch_cancellation(self, on_cancelled: placement.OnCancelled) -> None:
        """See Placement.watch_cancellation."""
        self._on_cancelled = on_cancelled
        if self.cancelled is not None:
            on_cancelled(self.cancelled)

    def unwatch(self) -> None:
        """Remove the callback of `watch_cancellation`, as a reference cycle would keep the mailbox in memory."""
        self._on_cancelled = None

    def end(self) -> None:
        """Note the end of the request."""
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def put(self, decision: placement.Decision | WeftError) -> None:
        """Deliver a decision. A status message replaces an unread earlier one."""
        last = self._decisions[-1] if self._decisions else None
        if last is not None and not isinstance(last, WeftError) and not last.HasField("granted"):
            self._decisions.pop()
        self._decisions.append(decision)
        if isinstance(decision, WeftError):
            self.refused = decision.reason
        elif decision.HasField("granted"):
            self.was_placed, self.refused = True, None
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def get(self) -> placement.Decision:
        """Return the next decision; raises the WeftError of a rejection."""
        while not self._decisions:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        decision = self._decisions.pop(0)
        if isinstance(decision, WeftError):
            raise decision
        if self.rate_limits is not None:
            decision.rate_limits.CopyFrom(self.rate_limits)
            self.rate_limits = None
        return decision


class TicketIssuer:
    """Turns placed requests into grants, with tickets signed by the key of the runner's session."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def grant(self, placed: Placed, mailbox: Mailbox, view: FleetView) -> placement.Decision:
        """Return the grant of an attempt.

        `view`: the view that the scheduler decided on; it contains the candidate's runner.
        """
        candidate, request = placed.candidate, mailbox.request.spec
        runner = view.runners[candidate.runner]
        claims = ticket_pb2.TicketClaims(
            ticket_id=new_id("tkt"),
            request_id=request.request_id,
            tenant=request.tenant,
            model=candidate.model,
            runner=candidate.runner,
            runner_incarnation=candidate.incarnation,
            attempt=placed.attempt,
            allow_remote=mailbox.request.needs.allow_remote,
            prompt_source=self._prompt_source(placed, request, view),
        )
        deadline_at = placed.deadline_at
        granted = pb.Granted(
            ticket=self._signed(claims, runner),
            runner=candidate.runner,
            runner_incarnation=candidate.incarnation,
            address=runner.address,
            host=runner.host,
            model=candidate.model,
            attempt=placed.attempt,
            keep_alive=optional_duration(placed.keep_alive_seconds),
            priority=request.priority.wire,  # type: ignore[arg-type]  # same numbers
            time_left=None if deadline_at is None else duration_of(deadline_at - self._clock.monotonic()),
        )
        return pb.PlaceResponse(granted=granted)

    def _prompt_source(
        self, placed: Placed, request: PlacementRequest, view: FleetView
    ) -> ticket_pb2.PromptSource | None:
        """Return where the runner fetches a stored prompt; None: it does not."""
        expected = None if placed.choice is None else placed.choice.expected
        if expected is None or (move := expected.move) is None:
            return None
        model, name, incarnation = move.source
        holder = view.runners.get(name)
        if holder is None or not holder.active or holder.incarnation != incarnation:
            return None
        claims = ticket_pb2.TicketClaims(
            ticket_id=new_id("tkt"),
            request_id=request.request_id,
            tenant=request.tenant,
            model=model,
            runner=name,
            runner_incarnation=incarnation,
            moved_prefix=move.hit.digest,
        )
        seconds = expected.restore_seconds + expected.move_saves_seconds
        return ticket_pb2.PromptSource(
            address=holder.address, ticket=self._signed(claims, holder), max_time=duration_of(seconds)
        )

    def _signed(self, claims: ticket_pb2.TicketClaims, runner: RunnerView) -> ticket_pb2.Ticket:
        expires = self._clock.utc_now().timestamp() + TICKET_LIFETIME_SECONDS
        claims.expire_time.seconds, claims.expire_time.nanos = divmod(int(expires * NANOSECONDS), NANOSECONDS)
        signed = claims.SerializeToString()
        return ticket_pb2.Ticket(claims=signed, mac=sign(signed, runner.ticket_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeEnd:
    """The end of a wake."""

    error: WeftError | None = None
    """None: success."""
    self_reported: bool = False
    """Whether the runner insists that the model is awake although the registry's view does not show it."""


WakeFinished = Callable[[WakeEnd], None]
"""Called once at the end of a wake."""


class WakeStarter(Protocol):
    """Port that performs wakes."""

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        """Start a wake and return immediately; `finished` is called later from the event loop."""
        ...

    def give_up(self, model: str) -> None:
        """End a wake that waits in vain for memory, and report its end; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRecords:
    """Records of a router: its requests, clients and figures."""

    requests: RequestLog
    clients: ClientRegistry
    usage: UsageRecorder
    figures: FiguresRecorder

    @staticmethod
    def empty(
        clock: Clock,
        *,
        clients: ClientsConfig | None = None,
        rate_limits: RateLimitConfig | None = None,
        request_log: RequestLogLimits | None = None,
        figures: FigureLimits | None = None,
    ) -> "RouterRecords":
        """Return the empty records of a new router."""
        registry = ClientRegistry(clients or ClientsConfig(), rate_limits or RateLimitConfig(), clock)
        return RouterRecords(
            requests=RequestLog(request_log),
            clients=registry,
            usage=UsageRecorder(clock),
            figures=FiguresRecorder(clock, figures, day=FiguresRecorder(clock, DAY)),
        )


def _ignore_waiting() -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDeps:
    """Dependencies of the loop."""

    waker: WakeStarter
    tickets: TicketIssuer
    records: RouterRecords
    observer: SchedulingObserver = field(default_factory=SchedulingObserver)
    tracing: Tracing = NO_TRACING
    """Receives the spans of wakes."""
    on_waiting: Callable[[], None] = _ignore_waiting
    """Called repeatedly while callers wait, to poll more often for what they wait for."""


class SchedulingLoop:
    """Runs a Scheduler on an event loop. All methods are called from that loop, so there are no locks."""

    def __init__(self, limits: SchedulerLimits, settings: Settings, clock: Clock, deps: LoopDeps) -> None:
        self.scheduler = Scheduler(limits, settings)
        self._clock = clock
        self._deps = deps
        self._wake_spans = WakeSpans(deps.tracing, clock)
        self._mesh = MeshDiff()
        self._newest: FleetView | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        records = deps.records
        self._subscribers: tuple[Subscriber, ...] = (
            records.requests.note_end,
            records.clients.note_end,
            records.usage.note_end,
            records.figures.note_end,
            deps.observer.note_end,
            self._release,
        )
        self._keys = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.TimerHandle | None = None
        self._opens_at: float | None = None
        self._view_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def update_view(self, view: FleetView) -> None:
        """Apply a new view of the registry."""
        if self._newest is None or view.tenants is not self._newest.tenants:
            self._take_tenants(view.tenants)
        self._newest = view
        if self._view_timer is not None:
            return
        self._take_view()
        if len(view.models) >= LARGE_MESH_MODELS:
            self._view_timer = asyncio.get_running_loop().call_later(VIEW_INTERVAL_SECONDS, self._take_later_view)

    def update_memory(self, hosts: Mapping[str, HostMemory]) -> None:
        """Apply a new state of the VRAM ledger."""
        self._apply(MeshChange(hosts=hosts))

    def note_prefixes(self, report: PrefixReport) -> None:
        """Apply what an engine reports about the prefixes in its cache."""
        self._apply(MeshChange(prefixes=(report,)))

    def submit(self, spec: PlacementRequest) -> tuple[int, Mailbox]:
        """Submit a request; its decisions are delivered to the returned mailbox.

        Raises SHUTTING_DOWN, SERVICE_UNAVAILABLE before the first view, and RATE_LIMIT_EXCEEDED for a tenant or client
        above its rate.
        """
        request, now = self._arrived(spec)
        key = request.key
        limits = self._admit(request, now)
        mailbox = self._mailboxes[key] = Mailbox(request, limits)
        request.budget_left = budget_left(limits)
        try:
            self._deliver(self.scheduler.submit(request, now), now)
        except Exception:
            # The caller did not get the key with which to end it.
            self.finish(key, Reason.INTERNAL)
            raise
        return key, mailbox

    def quote(self, spec: PlacementRequest) -> list[Quote]:
        """Return when each place would answer a request that arrives now.

        Raises as `submit`, but it counts in no rate limit, and the error of a refusal.
        """
        request, now = self._arrived(spec)
        request.arrived_wall = self._clock.utc_now()
        request.budget_left = budget_left(self._deps.records.clients.limits_left(spec))
        quotes = self.scheduler.quote(request, now)
        if isinstance(quotes, Rejects):
            raise _error_of(quotes, spec)
        return quotes

    def _arrived(self, spec: PlacementRequest) -> tuple[Request, float]:
        """Return a request that arrives now, and the time."""
        if self._closed:
            raise WeftError(Reason.SHUTTING_DOWN, "the router is stopping")
        if self._newest is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router does not know the mesh yet")
        now = self._clock.monotonic()
        spec = self._deps.records.clients.resolve(spec)
        tenant = self.scheduler.tenant(spec.tenant)
        allow_remote = tenant.permits_remote(requested=spec.allow_remote)
        priority = spec.priority.within(max(spec.max_priority, tenant.max_priority))
        spec = spec if priority is spec.priority else replace(spec, priority=priority)
        return Request.of(next(self._keys), spec, now, allow_remote=allow_remote), now

    def report_first_content(self, key: int) -> None:
        """See Placement.report_first_content."""
        now = self._clock.monotonic()
        decisions = self.scheduler.report_first_content(key, now)
        # Nothing follows from it while no request waits, as usual.
        if decisions or self.scheduler.waiting:
            self._deliver(decisions, now)

    def report_failed(
        self, key: int, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        """See Placement.report_attempt_failed. A cancelled request is not placed again, as its dispatcher ends it."""
        mailbox = self._mailboxes.get(key)
        if mailbox is not None and mailbox.cancelled is not None:
            return
        now = self._clock.monotonic()
        self._deps.records.requests.note_failed(key, FailedAttempt(attempt, reason, message), now)
        self._deps.observer.note_failed_attempt(reason)
        self._deliver(self.scheduler.report_failed(key, attempt, reason, now, retry_after_seconds), now)

    def finish(self, key: int, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> None:
        """End a request; idempotent."""
        mailbox = self._mailboxes.pop(key, None)
        if mailbox is None:
            return
        if mailbox.cancelled is not None and reason is Reason.CANCELLED:
            mailbox.request.cancelled_by = placement.canceller_of(mailbox.cancelled)
        mailbox.end()
        self._tell(
            RequestEnded(
                request=mailbox.request,
                at=self._clock.monotonic(),
                view=self._mesh.view,
                reason=reason,
                receipt=receipt,
                last_error=mailbox.refused,
                was_placed=mailbox.was_placed,
                is_closing=self._closed,
            )
        )

    def _tell(self, ended: RequestEnded) -> None:
        for subscriber in self._subscribers:
            subscriber(ended)

    def _release(self, ended: RequestEnded) -> None:
        """Release what an ended request held; its end counts for estimates and fair share."""
        if ended.refusal is None:
            failure = None if ended.reason is Reason.UNSPECIFIED else ended.reason
            served = _served(ended.counts, ended.request.spec.operation)
            self._deliver(self.scheduler.finish(ended.request.key, ended.at, served, failure), ended.at)

    def task_ended(self, spec: PlacementRequest, receipt: receipt_pb2.Receipt) -> None:
        """Count the end of a task, as its placements are not counted; its store counts its usage."""
        now, reason = self._clock.monotonic(), reason_of(receipt.reason)
        request = Request.of(0, replace(spec, task_id=""), now)
        ended = RequestEnded(request=request, at=now, view=self._mesh.view, reason=reason, receipt=receipt)
        self._deps.records.figures.note_end(ended)
        self._deps.observer.note_end(ended)

    def lacks_end(self, request: PlacementRequest) -> bool:
        """Whether the end of a request is unknown here.

        Raises SERVICE_UNAVAILABLE while a request with this id is under way, as its dispatcher may just have left.
        """
        requests = self._deps.records.requests
        known = requests.find(request.request_id, self._clock.monotonic(), request.tenant)
        if known is not None and requests.is_under_way(known.key):
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "a request with this id is running", retry_after_seconds=1)
        return requests.lacks_end(request.request_id, request.tenant)

    def remembers(self, request: PlacementRequest) -> bool:
        """Whether a request with this tenant and id is in memory."""
        found = self._deps.records.requests.find(request.request_id, self._clock.monotonic(), request.tenant)
        return found is not None

    def recover(
        self, lost: PlacementRequest, receipt: receipt_pb2.Receipt, stored: request_pb2.RequestRecord | None
    ) -> bool:
        """Record and count the end of a request that lost its router; returns False if the end is already known.

        `stored`: its record in the database; None: none, or in memory. Fair-share accounts and limits do not change, as
        they count when a request is granted.
        """
        records, now = self._deps.records, self._clock.monotonic()
        requests = records.requests
        if not requests.lacks_end(lost.request_id, lost.tenant):
            return False
        before = requests.recover(lost, receipt, now, self._clock.utc_now(), stored)
        known = lost if before is None else replace(lost, model=before.target)
        was_counted = before is not None and was_left(before)
        records.usage.note_recovered(known, receipt, self._mesh.view, was_counted=was_counted)
        log.info(
            "the end of a request became known",
            request_id=lost.request_id,
            model=receipt.model,
            reason=Reason(receipt.reason).name.lower() if receipt.reason else None,
        )
        return True

    def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> dict[int, asyncio.Future[None]]:
        """Cancel the requests under way with this id; returns futures of their ends, by key.

        An empty tenant means any tenant. Raises INVALID_ARGUMENT naming `tenant` if several tenants have requests with
        this id, as each tenant chooses ids freely.
        """
        found = {
            key: mailbox
            for key, mailbox in self._mailboxes.items()
            if mailbox.request.spec.request_id == request_id and tenant in ("", mailbox.request.spec.tenant)
        }
        tenants = sorted({mailbox.request.spec.tenant for mailbox in found.values()})
        if len(tenants) > 1:
            named = ", ".join(tenants[:MAX_NAMED_TENANTS])
            raise invalid_field("tenant", f"must name one: requests of several tenants have this id ({named})")
        ends = {}
        for key, mailbox in found.items():
            mailbox.ended = mailbox.ended or asyncio.get_running_loop().create_future()
            mailbox.cancel(placement.request_cancelled(cancelled_by))
            log.info("request cancelled", request_id=request_id, tenant=tenants[0], cancelled_by=cancelled_by)
            ends[key] = mailbox.ended
        return ends

    def wake_finished(self, model: str, end: WakeEnd) -> None:
        """Report the end of a wake to the scheduler."""
        if not self._closed:
            error, now = end.error, self._clock.monotonic()
            self._wake_spans.ended(model, error, self._mesh.view)
            if error is not None:
                self._deps.observer.note_failed_wake(model, error.reason)
            failure = None if error is None else WakeFailure(reason=error.reason, message=error.message)
            self._deliver(self.scheduler.wake_finished(model, failure, now, self_reported=end.self_reported), now)

    def close(self) -> None:
        """Refuse all waiting and future requests."""
        self._closed = True
        for timer in (self._timer, self._opening, self._view_timer):
            if timer is not None:
                timer.cancel()
        for mailbox in self._mailboxes.values():
            mailbox.put(WeftError(Reason.SERVICE_UNAVAILABLE, "the router is stopping"))

    def _admit(self, request: Request, now: float) -> RateLimitStatus | None:
        """Record a request and count it for its client; one above a rate limit is recorded as refused.

        Returns what is left for its caller; None: no limit applies.
        """
        records = self._deps.records
        records.requests.note_arrival(request, self._clock.utc_now())
        try:
            return records.clients.admit(request.key, request.spec)
        except WeftError as error:
            self._tell(RequestEnded(request=request, at=now, view=self._mesh.view, reason=error.reason, refusal=error))
            raise

    def _take_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        """Apply the declared tenants without interrupting waiting or running requests."""
        declared = declared_in(tenants)
        self._deps.records.clients.declare({name: limits_of(each) for name, each in declared.items()})
        settings = {name: settings_of(each) for name, each in declared.items()}
        now = self._clock.monotonic()
        self._deliver(self.scheduler.declare_tenants(settings, now), now)

    def _take_view(self) -> None:
        assert self._newest is not None, "a view has arrived"
        self._apply(self._mesh.changes_to(self._newest))

    def _take_later_view(self) -> None:
        self._view_timer = None
        if not self._closed and self._newest is not self._mesh.view:
            assert self._newest is not None, "a view has arrived"
            self.update_view(self._newest)

    def _apply(self, change: MeshChange) -> None:
        if change != MeshChange():
            now = self._clock.monotonic()
            self._deliver(self.scheduler.apply(change, now), now)

    def _deliver(self, decisions: Sequence[Decision], now: float) -> None:
        records = self._deps.records
        if decisions:
            records.requests.note_decisions(decisions, now)
        records.figures.tally.note_load(self.scheduler.waiting, self.scheduler.running, now)
        for decision in decisions:
            try:
                self._carry_out(decision)
            except Exception:
                # The other decisions must not be lost: each is returned only once.
                log.exception("a decision could not be carried out", decision=type(decision).__name__)
                self._undo(decision)
        if self.scheduler.needs_ticks:
            if self._timer is None:
                self._set_timer()
            self._await_opening(now)

    def _await_opening(self, now: float) -> None:
        """Set the timer with which an engine gets its next prompt before it idles."""
        at = self.scheduler.opens_at(now)
        if at == self._opens_at or self._closed:
            return
        if self._opening is not None:
            self._opening.cancel()
        self._opens_at = at
        self._opening = None if at is None else asyncio.get_running_loop().call_later(at - now, self._proceed)

    def _proceed(self) -> None:
        self._opening = self._opens_at = None
        now = self._clock.monotonic()
        self._deliver(self.scheduler.proceed(now), now)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Wakes):
            if not self._closed:
                self._deps.observer.note_wake(decision.model)
                caused_by = None if decision.request is None else self._mailboxes.get(decision.request)
                self._wake_spans.begin(decision, "" if caused_by is None else caused_by.request.spec.traceparent)
                self._deps.waker.begin(decision, partial(self.wake_finished, decision.model))
        elif isinstance(decision, StopsWaking):
            self._deps.waker.give_up(decision.model)
        elif (mailbox := self._mailboxes.get(decision.key)) is not None:
            self._note_wait(decision, mailbox)
            self._deps.observer.note_decision(decision, mailbox.request.spec, self._mesh.view)
            mailbox.put(self._decision_of(decision, mailbox))

    def _note_wait(self, decision: RequestDecision, mailbox: Mailbox) -> None:
        if isinstance(decision, Placed):
            if mailbox.estimate is not None:
                self._note_estimate(mailbox, *mailbox.estimate)
            return
        if isinstance(decision, Waits):
            kind = decision.kind
        elif isinstance(decision, Loads):
            kind = WaitKind.LOAD
        else:
            return
        if mailbox.estimate is None and decision.eta_seconds is not None:
            mailbox.estimate = (self._clock.monotonic(), decision.eta_seconds)
        if kind is not mailbox.wait_kind:
            mailbox.wait_kind = kind
            self._deps.observer.note_wait(mailbox.request.spec, kind, self._mesh.view)

    def _note_estimate(self, mailbox: Mailbox, shown_at: float, seconds: float) -> None:
        """Compare the first wait shown to a placed request with its actual wait since then."""
        error = estimate_error(seconds, self._clock.monotonic() - shown_at)
        mailbox.estimate = None
        self._deps.observer.note_estimate(mailbox.request.spec, error, self._mesh.view)

    def _undo(self, decision: Decision) -> None:
        """A refused caller returns its slot, a wake is reported as failed."""
        error = WeftError(Reason.INTERNAL, "an internal error; the router's log has the details")
        if isinstance(decision, Wakes):
            ends = partial(self.wake_finished, decision.model, WakeEnd(error=error))
            asyncio.get_running_loop().call_soon(ends)
        elif isinstance(decision, (Placed, Rejects)) and (mailbox := self._mailboxes.get(decision.key)) is not None:
            mailbox.put(error)

    def _set_timer(self) -> None:
        if self._timer is None and self.scheduler.needs_ticks and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
            if self.scheduler.is_hurried:
                self._deps.on_waiting()

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        try:
            self._deliver(self.scheduler.tick(now), now)
        except Exception:
            # Without the next tick, no waiting request would be refused or get a status.
            log.exception("the tick of the scheduler failed")
            self._set_timer()

    def _decision_of(self, decision: RequestDecision, mailbox: Mailbox) -> placement.Decision | WeftError:
        match decision:
            case Placed():
                if log.writes_debug():
                    request = mailbox.request.spec
                    log.debug(
                        "granted",
                        request_id=request.request_id,
                        trace_id=trace_id_of(request.traceparent) if request.traceparent else None,
                        model=decision.candidate.model,
                        runner=decision.candidate.runner,
                        attempt=decision.attempt,
                    )
                return self._deps.tickets.grant(decision, mailbox, self._mesh.view)
            case Waits():
                return placement.in_queue(decision.position, decision.reason, decision.eta_seconds)
            case Loads():
                return placement.for_load(decision.stage, decision.progress, decision.eta_seconds)
            case Rejects():
                self._deps.records.clients.note_rejected(decision.key, decision.reason)
                return _rejection(decision, mailbox.request.spec)


def budget_left(limits: RateLimitStatus | None) -> float:
    """Return the share of the tightest window that is left; 1: no limit applies."""
    if limits is None:
        return 1.0
    windows = (limits.requests, limits.tokens)
    return min((window.remaining / window.limit for window in windows if window.limit), default=1.0)


def _served(counts: ReceiptCounts | None, operation: Operation) -> Served | None:
    """Return what a request used; None: unknown. Generated media count even if the engine reports no tokens."""
    if counts is None:
        return None
    was_made = counts.receipt.outcome == receipt_pb2.OUTCOME_COMPLETED and operation in MEDIA_UNITS
    if not (was_made or counts.has_usage):
        return None
    device = counts.receipt.device_usage
    return Served(
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_prompt_tokens,
        output_tokens=counts.completion_tokens,
        energy_joules=device.energy_millijoules / 1e3 if device.HasField("energy_millijoules") else None,
        awaits_tool_results=counts.receipt.awaits_tool_results,
    )


def _rejection(decision: Rejects, request: PlacementRequest) -> WeftError:
    log.info(
        "rejected",
        request_id=request.request_id,
        trace_id=trace_id_of(request.traceparent) if request.traceparent else None,
        model=request.model,
        reason=decision.reason.name.lower(),
    )
    return _error_of(decision, request)


def _error_of(decision: Rejects, request: PlacementRequest) -> WeftError:
    about = {"model": request.model} | ({"field": "model"} if decision.reason in _ABOUT_MODEL else {})
    return WeftError(
        decision.reason,
        decision.message,
        metadata=about | dict(decision.metadata),
        retry_after_seconds=decision.retry_after_seconds,
    )

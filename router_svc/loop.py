"""The single writer around the scheduler: owns the clock, the timer and the waiting callers; decides nothing."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from router_svc.fleet_view import candidates_of
from router_svc.policy.candidates import Candidate, Fleet
from router_svc.policy.decisions import Decision, Loads, Placed, Rejects, RequestDecision, Waits, Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue import Arrival
from router_svc.policy.scheduler import Scheduler
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch import port
from weft.dispatch.fleet import FleetView
from weft.dispatch.tickets import sign
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.ids import new_id
from weft.kernel.reasons import Reason
from weft.kernel.telemetry import trace_id_of

log = structlog.get_logger("weft.router")

TICK_SECONDS = 0.25
"""How often waiting requests are looked at for timeouts. There is no timer while nobody waits."""


_ABOUT_MODEL = frozenset({Reason.MODEL_NOT_FOUND, Reason.UNSUPPORTED_OPERATION})
"""Refusals that another value in the request's `model` field would cure."""


class Mailbox:
    """The decisions for one placed request, in order. At most one caller waits on it."""

    def __init__(self, request: port.PlacementRequest) -> None:
        self.request = request
        self._decisions: deque[port.Decision | WeftError] = deque()
        self._arrived: asyncio.Future[None] | None = None

    def put(self, decision: port.Decision | WeftError) -> None:
        """Deliver a decision. A word about waiting replaces an older one that nobody has read yet."""
        if self._decisions and isinstance(self._decisions[-1], (port.WaitingInQueue, port.LoadingModel)):
            self._decisions.pop()
        self._decisions.append(decision)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def get(self) -> port.Decision:
        """The next decision; raises the WeftError of a rejection."""
        while not self._decisions:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        decision = self._decisions.popleft()
        if isinstance(decision, WeftError):
            raise decision
        return decision


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeEnd:
    """How a wake ended."""

    error: WeftError | None = None
    """None: it succeeded."""
    by_word: bool = False
    """The fleet does not show it, but the model's runner insists that it is awake."""


WakeFinished = Callable[[WakeEnd], None]
"""Told once, when a wake has ended."""


class WakeStarter(Protocol):
    """Who carries a wake out."""

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        """Start a wake; return at once, and call `finished` later, from the event loop."""
        ...


class SchedulingLoop:
    """Runs one Scheduler on one event loop. All methods are called from that loop, so there are no locks."""

    def __init__(
        self, limits: SchedulerLimits, clock: Clock, waker: WakeStarter, *, ticket_lifetime_seconds: float
    ) -> None:
        self._scheduler = Scheduler(limits)
        self._waker = waker
        self._clock = clock
        self._ticket_lifetime_seconds = ticket_lifetime_seconds
        self._view: FleetView | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._keys = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        """How many requests hold a slot."""
        return self._scheduler.running

    def queues(self) -> list[port.PoolQueue]:
        """How much is asked of each pool, in order of their names."""
        return [
            port.PoolQueue(
                pool=length.pool, waiting=length.waiting, max_waiting=length.max_waiting, running=length.running
            )
            for length in self._scheduler.queues()
        ]

    def update_view(self, view: FleetView) -> None:
        """The registry told something new."""
        self._view = view
        self._deliver(self._scheduler.update_fleet(Fleet.of(candidates_of(view)), self._clock.monotonic()))

    def submit(self, request: port.PlacementRequest) -> tuple[int, Mailbox]:
        """A request arrived; its decisions come to the mailbox. Raises SERVICE_UNAVAILABLE before the first view."""
        if self._closed:
            raise WeftError(Reason.SHUTTING_DOWN, "the router is stopping")
        if self._view is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router does not know the mesh yet")
        now = self._clock.monotonic()
        key = next(self._keys)
        mailbox = self._mailboxes[key] = Mailbox(request)
        arrival = Arrival(
            key=key,
            target=request.model,
            operation=request.operation,
            priority=request.priority,
            allow_remote=request.allow_remote,
            arrived_at=now - request.age_seconds,
            deadline_at=None if request.seconds_left is None else now + request.seconds_left,
            attempts_used=request.attempts_used,
        )
        self._deliver(self._scheduler.submit(arrival, now))
        return key, mailbox

    def report_first_content(self, key: int) -> None:
        """See Placement.report_first_content."""
        self._scheduler.report_first_content(key)

    def report_failed(self, key: int, attempt: int, reason: Reason) -> None:
        """See Placement.report_attempt_failed."""
        self._deliver(self._scheduler.report_failed(key, attempt, reason, self._clock.monotonic()))

    def finish(self, key: int) -> None:
        """The request is over, however; idempotent."""
        if self._mailboxes.pop(key, None) is not None:
            self._deliver(self._scheduler.finish(key, self._clock.monotonic()))

    def wake_finished(self, model: str, end: WakeEnd) -> None:
        """A wake ended."""
        if not self._closed:
            said = end.error.message if end.error is not None else None
            now = self._clock.monotonic()
            self._deliver(self._scheduler.wake_finished(model, said, now, by_word=end.by_word))

    def close(self) -> None:
        """Refuse everybody who waits, and everybody who comes."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for mailbox in self._mailboxes.values():
            mailbox.put(WeftError(Reason.SERVICE_UNAVAILABLE, "the router is stopping"))

    def _deliver(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Wakes):
                self._begin_wake(decision)
            elif (mailbox := self._mailboxes.get(decision.key)) is not None:
                mailbox.put(self._word(decision, mailbox.request))
        if self._timer is None and self._scheduler.waiting and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _begin_wake(self, wakes: Wakes) -> None:
        if not self._closed:
            self._waker.begin(wakes, partial(self.wake_finished, wakes.model))

    def _tick(self) -> None:
        self._timer = None
        self._deliver(self._scheduler.tick(self._clock.monotonic()))

    def _word(self, decision: RequestDecision, request: port.PlacementRequest) -> port.Decision | WeftError:
        match decision:
            case Placed():
                return self._grant(decision.candidate, decision.attempt, request)
            case Waits():
                return port.WaitingInQueue(position=decision.position, reason=decision.reason)
            case Loads():
                return port.LoadingModel(
                    stage=decision.stage, progress=decision.progress, eta_seconds=decision.eta_seconds
                )
            case Rejects():
                log.info(
                    "rejected",
                    request_id=request.request_id,
                    trace_id=trace_id_of(request.traceparent) if request.traceparent else None,
                    model=request.model,
                    reason=decision.reason.name.lower(),
                )
                return WeftError(
                    decision.reason,
                    decision.message,
                    metadata={"model": request.model} | ({"field": "model"} if decision.reason in _ABOUT_MODEL else {}),
                    retry_after_seconds=decision.retry_after_seconds,
                )

    def _grant(self, candidate: Candidate, attempt: int, request: port.PlacementRequest) -> port.Grant:
        assert self._view is not None, "a grant before the first view"
        runner = self._view.runners[candidate.runner]
        claims = ticket_pb2.TicketClaims(
            ticket_id=new_id("tkt"),
            request_id=request.request_id,
            tenant=request.tenant,
            model=candidate.model,
            runner=candidate.runner,
            runner_incarnation=candidate.incarnation,
            attempt=attempt,
            allow_remote=request.allow_remote,
        )
        expires = self._clock.utc_now().timestamp() + self._ticket_lifetime_seconds
        claims.expire_time.FromNanoseconds(int(expires * 1e9))
        signed = claims.SerializeToString()
        return port.Grant(
            claims=signed,
            mac=sign(signed, runner.ticket_key),
            runner=candidate.runner,
            runner_incarnation=candidate.incarnation,
            address=runner.address,
            host=runner.host,
            model=candidate.model,
            attempt=attempt,
        )

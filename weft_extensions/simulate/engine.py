"""The simulation engine: runs a scenario's events against a scheduler and carries out its decisions."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from router_svc.policy.decisions import (
    Decision,
    Loads,
    Placed,
    Rejects,
    RequestDecision,
    StopsWaking,
    Waits,
    WakeFailure,
    Wakes,
)
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.choice import Considered
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.port import SchedulerPort
from router_svc.policy.quotes import Quotes
from router_svc.policy.scheduler import Scheduler
from weft.kernel.errors.reasons import Reason
from weft_extensions.simulate.event_queue import EventQueue
from weft_extensions.simulate.hosts import Host, Instance, Phase, Targets, World
from weft_extensions.simulate.invariants import InvariantChecker
from weft_extensions.simulate.metrics import ColdWaitTracker, RunMetrics
from weft_extensions.simulate.runners import Attempt, AttemptListener, Loader, Runners
from weft_extensions.simulate.scenario import Failure, FailureMode, Scenario
from weft_extensions.simulate.traffic import SimulatedRequest, requests_of

MAX_LINES = 1_000
"""Maximum entries per request; later ones are dropped."""


class DecisionLog:
    """Logs decisions about selected requests as text."""

    def __init__(self, keys: Collection[int]) -> None:
        self.lines: dict[int, list[tuple[float, str]]] = {key: [] for key in keys}
        """Time and text of the entries by request."""

    def arrived(self, request: SimulatedRequest) -> None:
        """Logs an arrival."""
        arrival, spec = request.arrival, request.arrival.spec
        if arrival.key in self.lines:
            until = "" if arrival.own_deadline_at is None else f", deadline {arrival.own_deadline_at:.2f}"
            text = (
                f"arrives: {spec.tenant} requests {spec.model}, priority {spec.priority.name.lower()}, "
                f"{spec.prompt_tokens} prompt tokens, {request.output_tokens} to come{until}"
            )
            self._add(arrival.key, arrival.arrived_at, text)

    def decided(self, key: int, now: float, decision: RequestDecision) -> None:
        """Logs a decision."""
        if key not in self.lines:
            return
        match decision:
            case Placed():
                choice = decision.choice
                how = f" by {choice.policy}, one of {choice.count}" if choice is not None else ""
                self._add(key, now, f"attempt {decision.attempt} on {decision.candidate.model}{how}")
                self._consider(key, now, choice.considered if choice is not None else ())
            case Waits():
                eta = "" if decision.eta_seconds is None else f", about {decision.eta_seconds:.1f} s"
                self._add(key, now, f"waits at position {decision.position}: {decision.reason}{eta}")
                self._consider(key, now, decision.considered)
            case Loads():
                eta = "" if decision.eta_seconds is None else f", about {decision.eta_seconds:.1f} s"
                self._add(key, now, f"waits for a load: {decision.stage}{eta}")
            case Rejects():
                self._add(key, now, f"refused: {decision.message}")

    def failed(self, key: int, now: float, attempt: Attempt, reason: Reason) -> None:
        """Logs an attempt that failed before any content."""
        if key in self.lines:
            self._add(key, now, f"attempt {attempt.number} failed: {reason.name.lower()}")

    def over(self, key: int, now: float, reason: Reason | None) -> None:
        """Logs the end."""
        if key in self.lines:
            self._add(key, now, "served" if reason is None else f"ended: {reason.name.lower()}")

    def _consider(self, key: int, now: float, considered: tuple[Considered, ...]) -> None:
        for one in considered:
            text = "chosen" if one.chosen else one.gate or "free"
            text = f"{text}; {one.engine_load}" if one.engine_load else text
            self._add(key, now, f"  {one.model} on {one.runner}, score {one.score:.2f}: {text}")

    def _add(self, key: int, now: float, text: str) -> None:
        entries = self.lines[key]
        if len(entries) < MAX_LINES:
            entries.append((now, text))


TICK_SECONDS = 0.25
"""Tick interval while requests wait, as in the router's loop."""
MAX_OVERTIME_SECONDS = 4 * 3600.0
"""Maximum run time after the last arrival while requests wait; longer than any served request takes."""


MAX_EVENTS_AT_ONCE = 10_000
"""Maximum events at one time beyond those of open requests; more indicate an endless loop."""


class StuckError(RuntimeError):
    """Requests wait without progress, or time does not advance."""


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """A request that has not ended."""

    request: SimulatedRequest
    attempt: Attempt | None = None
    """The attempt in progress; None: it waits."""
    placed_at: float = 0.0
    attempts: int = 0
    estimate: tuple[float, float] | None = None
    """Time and value of the first estimate of its start, in seconds; None: it got none."""


class Simulation:
    """A run of a scenario with a scheduler."""

    def __init__(
        self,
        scenario: Scenario,
        scheduler: SchedulerPort,
        *,
        checker: InvariantChecker | None = None,
        explained: Collection[int] = (),
    ) -> None:
        """`explained`: numbers of the requests whose decisions are logged."""
        self.scenario = scenario
        self.events = EventQueue()
        self.world = World(scenario)
        self.metrics = RunMetrics(scenario)
        self.decision_log = DecisionLog(explained)
        self._scheduler = scheduler
        self._checker = checker
        self.loader = Loader(self.events, scenario.delays, scenario.seed, self._changed)
        listener = AttemptListener(content=self._content, failed=self._failed, ended=self._ended)
        self._runners = Runners(self.events, scenario.delays, scenario.seed, listener, self.loader.unload)
        self._targets = Targets(self.world, scenario.routes, cloud_fallback=scenario.cloud_fallback)
        self._cold_waits = ColdWaitTracker(self._targets, self.metrics)
        self._requests = requests_of(scenario)
        self.open: dict[int, OpenRequest] = {}
        """The requests that have arrived and not ended."""
        self._reported_versions: dict[str, int] = {}
        self._wakes: dict[str, Wakes] = {}
        self._ledgers = {host.name: host.memory() for host in self.world.hosts.values() if host.has_ledger}
        self._changed_ledgers: set[str] = set()
        self._ticking = False
        self._opens_at: float | None = None
        self._all_arrived = False
        self._begin()

    @property
    def arrived(self) -> int:
        """Number of requests that have arrived."""
        return self.metrics.requests

    @property
    def is_over(self) -> bool:
        """Whether every request has ended and none will arrive."""
        return self.events.next_at is None or (self._all_arrived and not self.open)

    @property
    def quotes(self) -> Quotes | None:
        """The quotes of the router's scheduler; None: another one runs."""
        return self._scheduler.quotes if isinstance(self._scheduler, Scheduler) else None

    def run(self, progress: Callable[[], None] | None = None, every_events: int = 20_000) -> None:
        """Runs to the end; `progress` is called every `every_events` events.

        Raises InvariantError for a violated invariant, StuckError if requests wait without progress.
        """
        done, moment, same_moment_count = 0, -1.0, 0
        while not self.is_over:
            self.events.step()
            done += 1
            same_moment_count = same_moment_count + 1 if self.events.now == moment else 0
            moment = self.events.now
            if same_moment_count > MAX_EVENTS_AT_ONCE + 4 * len(self.open):
                raise StuckError(f"time stands still at {moment} s: the same decision is repeated without end")
            if progress is not None and done % every_events == 0:
                progress()
        if self._checker is not None:
            self._checker.ended(self._scheduler, self.world, self.open)

    def _begin(self) -> None:
        scenario = self.scenario
        change = MeshChange(
            candidates=tuple(instance.candidate() for instance in self.world),
            hosts=dict(self._ledgers),
            routes=scenario.routes,
            cloud_fallback=scenario.cloud_fallback,
        )
        self._apply(change)
        if any(host.engine_requests for host in self.world.hosts.values()):
            self.events.after(scenario.delays.engine_figures_seconds, self._sample_engines)
        for failure in scenario.failures:
            for host in self.world.named(failure.hosts):
                self.events.at(failure.at_seconds, partial(self._fail_host, failure, host))
                end = failure.at_seconds + failure.for_seconds
                self.events.at(end, partial(self._fail_host, failure, host, is_over=True))
        self._await_arrival()

    # Requests.

    def _await_arrival(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._all_arrived = True
        else:
            self.events.at(request.arrival.arrived_at, partial(self._arrive, request))

    def _arrive(self, request: SimulatedRequest) -> None:
        self._await_arrival()
        now, key = self.events.now, request.arrival.key
        self.metrics.arrived(request)
        self.decision_log.arrived(request)
        opened = self.open[key] = OpenRequest(request=request)
        if self._checker is not None:
            self._checker.submitted(request, now)
        self._cold_waits.waits(request.arrival, now)
        self._carry_out_decisions(self._scheduler.submit(request.arrival, now))
        if request.leaves_at is not None and key in self.open:
            self.events.at(request.leaves_at, partial(self._leave, opened))

    def _leave(self, opened: OpenRequest) -> None:
        """Ends a request whose caller disconnects."""
        key, attempt = opened.request.arrival.key, opened.attempt
        if key not in self.open or (attempt is not None and attempt.shows_content):
            return
        if attempt is not None:
            self._runners.cancel(attempt)
        self._close(opened, Reason.CANCELLED)
        self._carry_out_decisions(self._scheduler.finish(key, self.events.now))

    def _content(self, attempt: Attempt) -> None:
        self._carry_out_decisions(self._scheduler.report_first_content(attempt.request.arrival.key, self.events.now))

    def _failed(self, attempt: Attempt, reason: Reason) -> None:
        key = attempt.request.arrival.key
        opened = self.open.get(key)
        if opened is None or opened.attempt is not attempt:
            return
        opened.attempt = None
        self.decision_log.failed(key, self.events.now, attempt, reason)
        if self._checker is not None:
            self._checker.failed(key, attempt, reason, self.events.now)
        self._cold_waits.waits(attempt.request.arrival, self.events.now)
        self._carry_out_decisions(self._scheduler.report_failed(key, attempt.number, reason, self.events.now))

    def _ended(self, attempt: Attempt, reason: Reason | None) -> None:
        request, now = attempt.request, self.events.now
        opened = self.open[request.arrival.key]
        served = attempt.served if reason is None else None
        if reason is None:
            waited = opened.placed_at - request.arrival.arrived_at + attempt.engine_wait_seconds
            self.metrics.served(
                request,
                waited_seconds=waited,
                first_token_seconds=attempt.content_at - request.arrival.arrived_at,
                cached_tokens=attempt.cached_tokens,
                now=now,
            )
        self._close(opened, reason)
        self._carry_out_decisions(self._scheduler.finish(request.arrival.key, now, served, reason))

    def _close(self, opened: OpenRequest, reason: Reason | None) -> None:
        """Closes a request; `reason`: why it was not served, None: it was."""
        arrival = opened.request.arrival
        del self.open[arrival.key]
        self._cold_waits.no_longer_waits(arrival)
        if reason is not None:
            self.metrics.lost(opened.request, reason, self.events.now)
        self.decision_log.over(arrival.key, self.events.now, reason)
        if self._checker is not None:
            self._checker.over(arrival.key, reason, self.events.now)

    # Decisions.

    def _carry_out_decisions(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if self._checker is not None:
                self._checker.decided(decision, self.events.now)
            match decision:
                case Placed():
                    self._place(decision)
                case Rejects():
                    self.decision_log.decided(decision.key, self.events.now, decision)
                    self._close(self.open[decision.key], decision.reason)
                case Waits() | Loads():
                    opened = self.open[decision.key]
                    if opened.estimate is None and decision.eta_seconds is not None:
                        opened.estimate = (self.events.now, decision.eta_seconds)
                    self.decision_log.decided(decision.key, self.events.now, decision)
                case Wakes():
                    self._wake(decision)
                case StopsWaking():
                    self._stop_waking(self._wakes[decision.model])
        if self._scheduler.waiting and not self._ticking:
            self._ticking = True
            self.events.after(TICK_SECONDS, self._tick)
        self._await_opening()

    def _await_opening(self) -> None:
        """Schedules the moment at which an engine gets its next prompt before it idles."""
        at = self._scheduler.opens_at(self.events.now)
        if at != self._opens_at:
            self._opens_at = at
            if at is not None:
                self.events.at(at, partial(self._proceed, at))

    def _proceed(self, at: float) -> None:
        if at == self._opens_at:
            self._opens_at = None
            self._carry_out_decisions(self._scheduler.proceed(self.events.now))

    def _tick(self) -> None:
        self._ticking = False
        self._carry_out_decisions(self._scheduler.tick(self.events.now))
        if self._checker is not None:
            self._checker.ticked(self._scheduler, self.world, self.events.now)
        if self.events.now > self.scenario.duration_seconds + MAX_OVERTIME_SECONDS:
            raise StuckError(f"{self._scheduler.waiting} requests of {self.scenario.name} wait without end")

    def _place(self, placed: Placed) -> None:
        opened = self.open[placed.key]
        opened.placed_at = self.events.now
        opened.attempts += 1
        if opened.attempts == 1 and opened.estimate is not None:
            estimated_at, seconds = opened.estimate
            self.metrics.started(seconds, self.events.now - estimated_at)
        self.decision_log.decided(placed.key, self.events.now, placed)
        self._cold_waits.no_longer_waits(opened.request.arrival)
        instance = self.world.instances[placed.candidate.model]
        self.metrics.attempted(opened.attempts, host_is_failing=instance.host.is_failing)
        opened.attempt = self._runners.begin(opened.request, placed, instance)

    # Models and hosts.

    def _wake(self, wakes: Wakes) -> None:
        self._wakes[wakes.model] = wakes
        self._cold_waits.woken(self.world.instances[wakes.model], self.events.now)
        self._carry_out(wakes)
        message = f"it did not take requests within {wakes.max_wait_seconds:.0f} s"
        failure = WakeFailure(reason=Reason.WAKE_FAILED, message=message)
        self.events.after(wakes.max_wait_seconds, partial(self._wake_ended, wakes, failure))

    def _carry_out(self, wakes: Wakes) -> None:
        if self._wakes.get(wakes.model) is not wakes:
            return
        instance, delays = self.world.instances[wakes.model], self.scenario.delays
        if instance.phase is Phase.STOPPING:
            self.events.after(delays.unload_seconds, partial(self._carry_out, wakes))
            return
        was_ready = instance.phase is Phase.READY
        failure = self.loader.wake(instance, wakes.priority)
        if failure is not None or was_ready:
            self.events.after(delays.report_seconds, partial(self._wake_ended, wakes, failure))

    def _stop_waking(self, wakes: Wakes) -> None:
        failure = self.loader.withdraw(self.world.instances[wakes.model])
        if failure is not None:
            self.events.after(self.scenario.delays.report_seconds, partial(self._wake_ended, wakes, failure))

    def _wake_ended(self, wakes: Wakes, failure: WakeFailure | None) -> None:
        if self._wakes.get(wakes.model) is wakes:
            del self._wakes[wakes.model]
            if self._checker is not None:
                self._checker.wake_ended(wakes.model)
            self_reported = failure is None and wakes.doubted
            self._carry_out_decisions(
                self._scheduler.wake_finished(wakes.model, failure, self.events.now, self_reported=self_reported)
            )

    def _fail_host(self, failure: Failure, host: Host, *, is_over: bool = False) -> None:
        """Begins or ends a failure of a host."""
        match failure.mode:
            case FailureMode.DIES:
                if host.is_up is not is_over:
                    (self._returned if is_over else self._died)(host)
            case FailureMode.BREAKS:
                host.break_share = 0.0 if is_over else failure.share
            case FailureMode.SLOW:
                host.slowness = 1.0 if is_over else failure.factor

    def _died(self, host: Host) -> None:
        host.note(self.events.now)
        host.is_up = False
        self._runners.host_died(host)
        self.loader.host_died(host)
        failure = WakeFailure(reason=Reason.WAKE_FAILED, message="its runner is gone")
        for wakes in [self._wakes[each.name] for each in host.instances if each.name in self._wakes]:
            self.events.after(self.scenario.delays.failure_seconds, partial(self._wake_ended, wakes, failure))

    def _returned(self, host: Host) -> None:
        host.note(self.events.now)
        host.is_up = True
        host.incarnation += 1
        for instance in host.instances:
            if instance.kind.remote:
                instance.phase = Phase.READY
            self._changed(instance)

    def _changed(self, instance: Instance) -> None:
        """Schedules the report of a model's state change to the router."""
        host, delays = instance.host, self.scenario.delays
        instance.version += 1
        self._cold_waits.changed(instance, self.events.now)
        if self._checker is not None:
            self._checker.changed(host)
        self._plan_report(instance)
        if host.has_ledger and instance.kind.memory_bytes:
            if not self._changed_ledgers:
                self.events.after(delays.memory_watch_seconds, self._report_ledgers)
            self._changed_ledgers.add(host.name)

    def _plan_report(self, instance: Instance) -> None:
        delays = self.scenario.delays
        delay = delays.report_seconds if instance.host.is_up else delays.death_noticed_seconds
        self.events.after(delay, partial(self._report, instance.candidate(), instance.version))

    def _sample_engines(self) -> None:
        """Reports the figures of all engines and schedules the next report."""
        for instance in self.world:
            host = instance.host
            if not host.engine_requests or not host.is_up or self.events.now >= host.figures_until:
                continue
            figures = self._runners.sample(instance)
            if figures is not None or instance.figures is not None:
                instance.figures = figures
                instance.version += 1
                self._plan_report(instance)
        self.events.after(self.scenario.delays.engine_figures_seconds, self._sample_engines)

    def _report(self, candidate: Candidate, version: int) -> None:
        """Delivers a report, unless a newer one was delivered."""
        if version <= self._reported_versions.get(candidate.model, 0):
            return
        self._reported_versions[candidate.model] = version
        self._apply(MeshChange(candidates=(candidate,)))
        wakes = self._wakes.get(candidate.model)
        # It may have been evicted again by then, but it was awake.
        if wakes is not None and candidate.readiness is Readiness.READY:
            self._wake_ended(wakes, None)

    def _report_ledgers(self) -> None:
        for name in self._changed_ledgers:
            self._ledgers[name] = self.world.hosts[name].memory()
        self._changed_ledgers.clear()
        self._apply(MeshChange(hosts=dict(self._ledgers)))

    def _apply(self, change: MeshChange) -> None:
        if self._checker is not None:
            self._checker.mesh_changed(change, self.events.now)
        self._carry_out_decisions(self._scheduler.apply(change, self.events.now))

"""Simulated runners: attempts of placed requests, and loads and evictions of models."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from zlib import crc32

from router_svc.policy.decisions import Placed, Served, WakeFailure
from router_svc.policy.endpoints.engine_load import EngineFigures
from weft.gpu.eviction import Standing, victims
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.event_queue import EventQueue
from weft_extensions.simulate.hosts import Host, Instance, Phase
from weft_extensions.simulate.scenario import Delays
from weft_extensions.simulate.traffic import SimulatedRequest


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """An attempt of a request on a runner."""

    request: SimulatedRequest
    number: int
    instance: Instance
    keep_alive_seconds: float | None
    cached_tokens: int = 0
    placed_at: float = 0.0
    computed_since: float | None = None
    """When its engine started it; None: it waits in the engine."""
    content_at: float = 0.0
    ends_at: float = 0.0
    in_time: bool = True
    """Whether it ends before its deadline."""
    shows_content: bool = False
    is_over: bool = False

    @property
    def engine_wait_seconds(self) -> float:
        """Time that it waited in its engine before the start."""
        return 0.0 if self.computed_since is None else self.computed_since - self.placed_at

    @property
    def served(self) -> Served:
        """The actual usage."""
        return Served(
            prompt_tokens=self.request.arrival.spec.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.request.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptListener:
    """Callbacks for the progress of attempts."""

    content: Callable[[Attempt], None]
    failed: Callable[[Attempt, Reason], None]
    """Called when a failure before any content is detected."""
    ended: Callable[[Attempt, Reason | None], None]
    """Called at the end; the reason is None if the request was served."""


class Runners:
    """All attempts in progress."""

    def __init__(
        self,
        events: EventQueue,
        delays: Delays,
        seed: int,
        listener: AttemptListener,
        unload: Callable[[Instance], None],
    ) -> None:
        self._events = events
        self._delays = delays
        self._seed = seed
        self._listener = listener
        self._unload = unload
        self._on: dict[str, dict[int, Attempt]] = {}
        """Attempts by instance, then by request key."""
        self._in_engine: dict[str, deque[Attempt]] = {}
        """Attempts that wait in their engines by instance, including those that are over."""

    def begin(self, request: SimulatedRequest, placed: Placed, instance: Instance) -> Attempt:
        """Starts an attempt with a ticket."""
        attempt = Attempt(
            request=request,
            number=placed.attempt,
            instance=instance,
            keep_alive_seconds=placed.keep_alive_seconds,
        )
        refusal = self._refusal(attempt, placed.candidate.incarnation)
        if refusal is not None:
            self._events.after(self._delays.failure_seconds, partial(self._fail, attempt, refusal))
            return attempt
        now, host = self._events.now, instance.host
        host.note(now)
        attempt.placed_at = now
        host.active += 1
        instance.active += 1
        instance.last_used_at = now
        instance.last_band = request.arrival.spec.priority
        begun = self._on.setdefault(instance.name, {})
        begun[request.arrival.key] = attempt
        if host.engine_requests and self.computed(instance) >= host.engine_requests:
            self._in_engine.setdefault(instance.name, deque()).append(attempt)
        else:
            self._compute(attempt)
        return attempt

    def computed(self, instance: Instance) -> int:
        """Number of attempts that the engine of an instance computes."""
        return sum(each.computed_since is not None for each in self._on.get(instance.name, {}).values())

    def sample(self, instance: Instance) -> EngineFigures | None:
        """Returns the current figures of an engine; None: it has no request."""
        computed = self.computed(instance)
        if not instance.active or not instance.host.engine_requests:
            return None
        return EngineFigures(
            sampled_at=self._events.now,
            running=computed,
            waiting=instance.active - computed,
            cache_share=computed / instance.host.engine_requests,
        )

    def _compute(self, attempt: Attempt) -> None:
        """Starts an attempt in its engine."""
        request, instance = attempt.request, attempt.instance
        now, kind, host = self._events.now, instance.kind, instance.host
        attempt.computed_since = now
        if kind.cache_tokens:
            attempt.cached_tokens = instance.cached_tokens(request.blocks)
            instance.store(request.blocks)
        elif request.session in instance.sessions:
            attempt.cached_tokens = int(request.arrival.spec.prompt_tokens * request.cached_share)
        fresh_tokens = request.arrival.spec.prompt_tokens - attempt.cached_tokens
        work_seconds = kind.answer_seconds(request.output_tokens, request.arrival.spec.work)
        # A cloud has more than one engine.
        begins_at = now if kind.remote else max(now, instance.prefilled_at)
        instance.prefilled_at = begins_at + host.slowness * kind.prefill_seconds(fresh_tokens)
        ends_at = instance.prefilled_at + host.slowness * work_seconds
        attempt.content_at = ends_at if kind.is_media else instance.prefilled_at
        deadline_at = request.deadline_at
        attempt.in_time = deadline_at is None or ends_at <= deadline_at
        attempt.ends_at = ends_at if attempt.in_time or deadline_at is None else deadline_at
        self._plan(attempt)

    def _compute_next(self, instance: Instance) -> None:
        """Starts the attempt that has waited longest in an engine, if any."""
        waiting = self._in_engine.get(instance.name, ())
        while waiting:
            attempt = waiting.popleft()
            if not attempt.is_over:
                self._compute(attempt)
                return

    def cancel(self, attempt: Attempt) -> None:
        """Ends an attempt whose caller disconnects."""
        if not attempt.is_over:
            self._free(attempt)

    def host_died(self, host: Host) -> None:
        """Fails all attempts on a dead host."""
        for instance in host.instances:
            self._in_engine.pop(instance.name, None)
            for attempt in tuple(self._on.get(instance.name, {}).values()):
                self._free(attempt)
                attempt.is_over = False
                if attempt.shows_content:
                    self._end(attempt, Reason.WORKER_LOST)
                else:
                    self._events.after(self._delays.failure_seconds, partial(self._fail, attempt, Reason.WORKER_LOST))

    def _plan(self, attempt: Attempt) -> None:
        if attempt.content_at < attempt.ends_at:
            self._events.at(attempt.content_at, partial(self._show, attempt))
        self._events.at(attempt.ends_at, partial(self._complete, attempt))

    def _refusal(self, attempt: Attempt, incarnation: str) -> Reason | None:
        """Returns why the runner refuses the attempt; None: it accepts it."""
        instance, host = attempt.instance, attempt.instance.host
        if not host.is_up:
            return Reason.RUNNER_UNREACHABLE
        if str(host.incarnation) != incarnation:
            return Reason.TICKET_INVALID
        if instance.phase is not Phase.READY:
            return Reason.BACKEND_NOT_READY
        if instance.active >= instance.kind.slots or (host.max_requests and host.active >= host.max_requests):
            return Reason.NO_SLOT_AVAILABLE
        share = host.break_share
        if share and crc32(f"{self._seed}/{attempt.request.arrival.key}/{attempt.number}".encode()) < share * 2**32:
            return Reason.SERVER_DIED
        return None

    def _fail(self, attempt: Attempt, reason: Reason) -> None:
        if not attempt.is_over:
            attempt.is_over = True
            self._listener.failed(attempt, reason)

    def _show(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            attempt.shows_content = True
            self._listener.content(attempt)

    def _complete(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            self._free(attempt)
            if attempt.request.session:
                attempt.instance.remember(attempt.request.session)
            self._end(attempt, None if attempt.in_time else Reason.DEADLINE_EXCEEDED)

    def _end(self, attempt: Attempt, reason: Reason | None) -> None:
        attempt.is_over = True
        self._listener.ended(attempt, reason)

    def _free(self, attempt: Attempt) -> None:
        attempt.is_over = True
        instance = attempt.instance
        if self._on.get(instance.name, {}).pop(attempt.request.arrival.key, None) is None:
            return
        instance.host.note(self._events.now)
        instance.host.active -= 1
        instance.active -= 1
        instance.last_used_at = self._events.now
        if attempt.computed_since is not None:
            self._compute_next(instance)
        if not instance.active:
            self._keep(instance, attempt.keep_alive_seconds)

    def _keep(self, instance: Instance, keep_alive_seconds: float | None) -> None:
        """Schedules the unload of an idle instance after its keep-alive time."""
        seconds = instance.kind.keep_alive_seconds if keep_alive_seconds is None else keep_alive_seconds
        if seconds is not None and seconds >= 0 and not instance.kind.pinned and not instance.kind.remote:
            self._events.after(seconds, partial(self._unload_if_unused, instance, instance.life, instance.last_used_at))

    def _unload_if_unused(self, instance: Instance, life: int, used_at: float) -> None:
        if instance.life == life and not instance.active and instance.last_used_at == used_at:
            self._unload(instance)


class Loader:
    """Loads and evicts models, by the registry's rule."""

    def __init__(self, events: EventQueue, delays: Delays, seed: int, changed: Callable[[Instance], None]) -> None:
        self._events = events
        self._delays = delays
        self._seed = seed
        self._changed = changed
        self.loads = 0
        self.swaps = 0

    def wake(self, instance: Instance, band: Priority) -> WakeFailure | None:
        """Starts a load unless one is in progress; returns why it cannot. The instance must not be stopping."""
        assert instance.phase is not Phase.STOPPING, "a stopping instance is woken after its stop"
        host = instance.host
        if not host.is_up:
            return WakeFailure(reason=Reason.WAKE_FAILED, message="its runner is gone")
        if instance.phase is not Phase.ASLEEP:
            return None
        victims = self.victims(instance, band)
        if victims is None:
            return WakeFailure(
                reason=Reason.INSUFFICIENT_MEMORY, message=f"{host.name} has no memory for {instance.name}"
            )
        self.loads += 1
        self.swaps += bool(victims)
        host.note(self._events.now)
        host.loading += 1
        self._move(instance, Phase.CLAIMING)
        host.claims.append(instance)
        for victim in victims:
            self.unload(victim)
        self._grant(host)
        return None

    def withdraw(self, instance: Instance) -> WakeFailure | None:
        """Cancels the wait for memory; returns the failure of its wake. None: it does not wait, and continues."""
        host = instance.host
        if instance not in host.claims:
            return None
        host.claims.remove(instance)
        host.loading -= 1
        self._move(instance, Phase.ASLEEP)
        self._grant(host)
        return WakeFailure(reason=Reason.INSUFFICIENT_MEMORY, message=f"{instance.name} got no memory on {host.name}")

    def victims(self, instance: Instance, band: Priority) -> list[Instance] | None:
        """Returns the instances to evict so that it fits; None: it would not fit even then."""
        host, wanted = instance.host, instance.kind.memory_bytes
        if not wanted or not host.has_ledger:
            return []
        loaded = [other for other in host.instances if other.phase is Phase.READY and not other.active]
        found = victims(
            [other for other in loaded if other.kind.memory_bytes and _standing(other).may_leave(band)],
            self._promised(host),
            standing=_standing,
            fits=lambda free: wanted <= free,
            freed=lambda free, other, sign: free + sign * other.kind.memory_bytes,
        )
        return None if found is None else list(found)

    def unload(self, instance: Instance) -> None:
        """Unloads an idle model."""
        assert instance.phase is Phase.READY, "only a loaded model is unloaded"
        assert not instance.active, "only an idle model is unloaded"
        self._move(instance, Phase.STOPPING)
        self._events.after(self._delays.unload_seconds, partial(self._unloaded, instance, instance.life))

    def host_died(self, host: Host) -> None:
        """Unloads everything on a dead host."""
        host.loading = 0
        host.claims.clear()
        for instance in host.instances:
            instance.forget()
            self._move(instance, Phase.ASLEEP)

    def _promised(self, host: Host) -> int:
        """Returns the bytes that are free or being freed, minus earlier claims."""
        leaving = sum(other.holds() for other in host.instances if other.phase is Phase.STOPPING)
        return host.free_bytes() + leaving - sum(other.kind.memory_bytes for other in host.claims)

    def _unloaded(self, instance: Instance, life: int) -> None:
        if instance.life == life:
            instance.forget()
            self._move(instance, Phase.ASLEEP)
            self._grant(instance.host)

    def _grant(self, host: Host) -> None:
        """Starts loads whose memory is free, in the order of their claims."""
        while host.claims:
            instance = host.claims[0]
            if host.has_ledger and instance.kind.memory_bytes > host.free_bytes():
                return
            host.claims.pop(0)
            self._begin(instance)

    def _begin(self, instance: Instance) -> None:
        seconds = instance.draw_load_seconds(self._seed) * instance.host.slowness
        instance.loads += 1
        self._move(instance, Phase.LOADING)
        self._events.after(seconds, partial(self._loaded, instance, instance.life, seconds))

    def _loaded(self, instance: Instance, life: int, seconds: float) -> None:
        if instance.life == life:
            instance.last_load_seconds = seconds
            instance.host.note(self._events.now)
            instance.host.loading -= 1
            instance.last_used_at = self._events.now
            self._move(instance, Phase.READY)

    def _move(self, instance: Instance, phase: Phase) -> None:
        instance.phase = phase
        instance.life += 1
        self._changed(instance)


def _standing(instance: Instance) -> Standing:
    return Standing(
        name=instance.name,
        priority=instance.last_band,
        last_used_at=instance.last_used_at,
        in_use=instance.active > 0,
        pinned=instance.kind.pinned,
    )

"""Attempts: what runners make of the requests that are placed on them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from zlib import crc32

from router_svc.policy.decisions import Placed, Served
from router_svc.simulation.events import Events
from router_svc.simulation.hosts import Host, Instance, Phase
from router_svc.simulation.scenario import Delays
from router_svc.simulation.traffic import SimulatedRequest
from weft.kernel.reasons import Reason


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """A request on a runner."""

    request: SimulatedRequest
    number: int
    instance: Instance
    keep_alive_seconds: float | None
    cached_tokens: int = 0
    content_at: float = 0.0
    ends_at: float = 0.0
    in_time: bool = True
    """Whether it ends before its deadline."""
    shows_content: bool = False
    is_over: bool = False

    @property
    def served(self) -> Served:
        """What it really took."""
        return Served(
            prompt_tokens=self.request.arrival.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.request.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Who hears how attempts go on."""

    content: Callable[[Attempt], None]
    failed: Callable[[Attempt, Reason], None]
    """Before any content; told once it is known."""
    ended: Callable[[Attempt, Reason | None], None]
    """None: it was served."""


class Runners:
    """All attempts under way."""

    def __init__(
        self, events: Events, delays: Delays, seed: int, told: Told, unload: Callable[[Instance], None]
    ) -> None:
        self._events = events
        self._delays = delays
        self._seed = seed
        self._told = told
        self._unload = unload
        self._on: dict[str, dict[int, Attempt]] = {}
        """By instance, then by key."""

    def begin(self, request: SimulatedRequest, placed: Placed, instance: Instance) -> Attempt:
        """A request comes with a permit to a runner."""
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
        now, kind, host = self._events.now, instance.kind, instance.host
        host.note(now)
        host.active += 1
        instance.active += 1
        instance.last_used_at = now
        instance.last_band = request.arrival.priority
        self._on.setdefault(instance.name, {})[request.arrival.key] = attempt
        if request.session in instance.sessions:
            attempt.cached_tokens = int(request.arrival.prompt_tokens * request.cached_share)
        fresh_tokens = request.arrival.prompt_tokens - attempt.cached_tokens
        attempt.content_at = now + host.slowness * fresh_tokens / kind.prefill_tokens_per_second
        ends_at = attempt.content_at + host.slowness * request.output_tokens / kind.decode_tokens_per_second
        deadline_at = request.deadline_at
        attempt.in_time = deadline_at is None or ends_at <= deadline_at
        attempt.ends_at = ends_at if attempt.in_time or deadline_at is None else deadline_at
        self._plan(attempt)
        return attempt

    def leave(self, attempt: Attempt) -> None:
        """Its caller goes."""
        if not attempt.is_over:
            self._free(attempt)

    def host_died(self, host: Host) -> None:
        """All that it worked on is lost."""
        for instance in host.instances:
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
        """Why the runner does not take it."""
        instance, host = attempt.instance, attempt.instance.host
        if not host.is_up:
            return Reason.CONNECT_FAILED
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
            self._told.failed(attempt, reason)

    def _show(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            attempt.shows_content = True
            self._told.content(attempt)

    def _complete(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            self._free(attempt)
            if attempt.request.session:
                attempt.instance.remember(attempt.request.session)
            self._end(attempt, None if attempt.in_time else Reason.DEADLINE_EXCEEDED)

    def _end(self, attempt: Attempt, reason: Reason | None) -> None:
        attempt.is_over = True
        self._told.ended(attempt, reason)

    def _free(self, attempt: Attempt) -> None:
        attempt.is_over = True
        instance = attempt.instance
        if self._on.get(instance.name, {}).pop(attempt.request.arrival.key, None) is None:
            return
        instance.host.note(self._events.now)
        instance.host.active -= 1
        instance.active -= 1
        instance.last_used_at = self._events.now
        if not instance.active:
            self._keep(instance, attempt.keep_alive_seconds)

    def _keep(self, instance: Instance, keep_alive_seconds: float | None) -> None:
        """Unload it in the end, if nobody comes."""
        seconds = instance.kind.keep_alive_seconds if keep_alive_seconds is None else keep_alive_seconds
        if seconds is not None and seconds >= 0 and not instance.kind.pinned and not instance.kind.remote:
            self._events.after(seconds, partial(self._unload_if_unused, instance, instance.life, instance.last_used_at))

    def _unload_if_unused(self, instance: Instance, life: int, used_at: float) -> None:
        if instance.life == life and not instance.active and instance.last_used_at == used_at:
            self._unload(instance)

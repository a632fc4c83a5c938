"""The mesh as the scheduler uses it: as told, as runners said themselves, and by host and runner."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from router_svc.policy.arrival import ROUTE_PREFIX
from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import MAX_NAMES_IN_MESSAGE, Candidate, Readiness
from router_svc.policy.endpoints.host_memory import HostMemory
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings


class RunnerReports:
    """Remembers, per model of the fleet at most, what its runner said and against which word of the registry."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Candidate, Readiness]] = {}

    def note(self, last_status: Candidate | None, readiness: Readiness) -> None:
        """Its runner said this. What is told to be down, or is not in the fleet (None), has no say."""
        if last_status is not None and last_status.readiness is not Readiness.DOWN:
            self._said[last_status.model] = (last_status, readiness)

    def corrected(self, last_status: Candidate) -> Candidate:
        """The model with what its runner said; whatever the registry has told anew since then counts again."""
        said = self._said.get(last_status.model)
        if said is None:
            return last_status
        if said[0] != last_status:
            del self._said[last_status.model]
            return last_status
        return replace(last_status, readiness=said[1])

    def forget(self, model: str) -> None:
        """It is not in the mesh any more."""
        self._said.pop(model, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChange:
    """Some of the mesh is different now; what is not named is as it was."""

    candidates: tuple[Candidate, ...] = ()
    """Models that appeared or changed, each with all that is known of it."""
    gone: tuple[str, ...] = ()
    """Models that are no longer in the mesh, by name."""
    hosts: Mapping[str, HostMemory] | None = None
    """The memory of all hosts that have a book of it; None: as it was."""
    routes: Mapping[str, Route] | None = None
    """All routes by name; None: as they were."""
    cloud_fallback: bool | None = None
    """Whether routes may fall back to models off the premises; None: as it was."""


_WHAT_COUNTS = attrgetter(
    *("readiness", "slots", "operations", "remote", "skills", "tools", "context_tokens", "runner_max_requests"),
    *("key", "pool", "host", "memory_bytes", "pinned", "max_wake_seconds", "runner_wakes", "detail"),
)
"""What makes a difference to who waits. Load and progress are looked up when they are needed."""


@dataclass(slots=True)
class ViewDelta:
    """What a change of the mesh may have changed for those who wait."""

    queues: set[str]
    """By name, some of which may be gone."""
    renames: bool = False
    """Whether targets may stand for other lines than before."""
    memory: bool = False


class ClusterView:
    """Keeps the candidate index up to date with what is told."""

    def __init__(self, settings: Settings, limits: SchedulerLimits, is_waking: Callable[[str], bool]) -> None:
        self.index = CandidateIndex(settings, limits)
        self._is_waking = is_waking
        """Whether a wake of a model is under way."""
        self._told: dict[str, Candidate] = {}
        self._first_hand = RunnerReports()
        self._by_host: dict[str, dict[str, Candidate]] = {}
        self._ready_since: dict[str, float] = {}
        self._routes: Mapping[str, Route] = {}
        self._cloud_fallback = False
        self.hosts: Mapping[str, HostMemory] = {}

    def apply(self, change: MeshChange, now: float) -> ViewDelta:
        """The mesh is different now."""
        delta = ViewDelta(set())
        for model in change.gone:
            self._drop(model, delta)
        for candidate in change.candidates:
            self._told[candidate.model] = candidate
            self._refresh(candidate.model, delta, now)
        if change.hosts is not None:
            self.hosts = change.hosts
            delta.memory = True
        if change.routes is not None or change.cloud_fallback is not None:
            self._set_routes(change, delta)
        return delta

    def refresh(self, model: str, now: float) -> ViewDelta:
        """A wake of it has begun or ended, which says what its being down means."""
        delta = ViewDelta(set())
        if model in self._told:
            self._refresh(model, delta, now)
            candidate = self.index.table.candidate(model)
            if candidate is not None:
                delta.queues |= set(self.index.table.queues_of(candidate))
        return delta

    def apply_self_report(self, model: str, readiness: Readiness, now: float) -> ViewDelta:
        """Its runner said that it is so."""
        self._first_hand.note(self._told.get(model), readiness)
        return self.refresh(model, now)

    def is_doubted(self, candidate: Candidate) -> bool:
        """Whether the registry shows it as ready and its runner says that it is not."""
        last_status = self._told.get(candidate.model)
        return (
            candidate.readiness is Readiness.ASLEEP
            and last_status is not None
            and last_status.readiness is Readiness.READY
        )

    def readiness_of(self, model: str) -> Readiness | None:
        """What it does now; None: it is not in the mesh."""
        candidate = self.index.table.candidate(model)
        return None if candidate is None else candidate.readiness

    def usual_load_of(self, model: str) -> float | None:
        """How long a load of it takes in seconds, by its runner's newest word; None: unknown."""
        candidate = self.index.table.candidate(model)
        return None if candidate is None else candidate.usual_load_seconds

    def larger_than_its_host(self, model: str) -> tuple[Candidate, HostMemory] | None:
        """The model and the memory of its host, if it would not even fit into all of that; else, or unknown: None."""
        candidate = self.index.table.candidate(model)
        memory = None if candidate is None else self.hosts.get(candidate.host)
        if candidate is None or memory is None or candidate.memory_bytes <= memory.total_bytes:
            return None
        return candidate, memory

    def route_of(self, queue: str) -> Route | None:
        """The route whose line this is; None: it is a pool's."""
        return self._routes.get(queue.removeprefix(ROUTE_PREFIX)) if queue.startswith(ROUTE_PREFIX) else None

    def ready_on(self, host: str) -> Iterator[tuple[Candidate, float]]:
        """What takes requests on a host, and since when."""
        for model, candidate in self._by_host.get(host, {}).items():
            if candidate.readiness is Readiness.READY:
                yield candidate, self._ready_since[model]

    def some_names(self) -> str:
        """A few of the names that requests can be for, to put into an error message."""
        names = self.index.table.some_names(MAX_NAMES_IN_MESSAGE + 1)
        more = ", ..." if len(names) > MAX_NAMES_IN_MESSAGE else ""
        return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + more if names else "none"

    def _refresh(self, model: str, delta: ViewDelta, now: float) -> None:
        """Put what is known of a model into the index, if it is new."""
        before = self.index.table.candidate(model)
        candidate = self._first_hand.corrected(self._told[model])
        if candidate.readiness is Readiness.DOWN and self._is_waking(model):
            # A host that wakes may look gone for a moment; its wake tells how it ends.
            candidate = replace(candidate, readiness=Readiness.ASLEEP)
        if candidate == before:
            return
        if before is not None:
            self._take_off(before)
        self._put_on(candidate, before, now)
        if before is None or _WHAT_COUNTS(before) != _WHAT_COUNTS(candidate):
            old_queues = set(self.index.table.queues_of(before)) if before is not None else set()
            self.index.table.put(candidate)
            queues = set(self.index.table.queues_of(candidate))
            delta.queues |= old_queues | queues
            delta.renames |= old_queues != queues
        else:
            self.index.table.put(candidate)

    def _drop(self, model: str, delta: ViewDelta) -> None:
        self._told.pop(model, None)
        self._first_hand.forget(model)
        self._ready_since.pop(model, None)
        before = self.index.table.candidate(model)
        if before is not None:
            delta.queues |= set(self.index.table.queues_of(before))
            delta.renames = True
            self._take_off(before)
            self.index.table.drop(model)

    def _set_routes(self, change: MeshChange, delta: ViewDelta) -> None:
        if change.routes is not None:
            self._routes = change.routes
        if change.cloud_fallback is not None:
            self._cloud_fallback = change.cloud_fallback
        delta.queues |= self._route_queues()
        self.index.table.set_routes(self._routes, cloud_fallback=self._cloud_fallback)
        delta.queues |= self._route_queues()
        delta.renames = True

    def _route_queues(self) -> set[str]:
        return {queue for queue in self.index.table.queues() if queue.startswith(ROUTE_PREFIX)}

    def _put_on(self, candidate: Candidate, before: Candidate | None, now: float) -> None:
        model = candidate.model
        was_ready = before is not None and before.readiness is Readiness.READY and before.key == candidate.key
        if candidate.readiness is Readiness.READY and not was_ready:
            self._ready_since[model] = now
        if candidate.host:
            self._by_host.setdefault(candidate.host, {})[model] = candidate

    def _take_off(self, candidate: Candidate) -> None:
        on_host = self._by_host.get(candidate.host)
        if on_host is not None:
            on_host.pop(candidate.model, None)
            if not on_host:
                del self._by_host[candidate.host]

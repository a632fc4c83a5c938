"""The mesh as the scheduler uses it: the registry's view, corrected by runners' own reports."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, Readiness
from router_svc.policy.endpoints.prefix_affinity import PrefixReport
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings
from weft.kernel.values.names import ROUTE_PREFIX


class RunnerReports:
    """Readiness per model as runners report it, with the registry's view at that time.

    While the registry is unreachable its view is frozen, but models still fall asleep and wake.
    """

    def __init__(self) -> None:
        self._reports: dict[str, tuple[Candidate, Readiness]] = {}

    def note(self, last_status: Candidate | None, readiness: Readiness) -> None:
        """Record a reported readiness; ignored for a model that the registry shows as down or not at all (None)."""
        if last_status is not None and last_status.readiness is not Readiness.DOWN:
            self._reports[last_status.model] = (last_status, readiness)

    def corrected(self, last_status: Candidate) -> Candidate:
        """Return the model with its runner's report applied, unless the registry's view has changed since."""
        report = self._reports.get(last_status.model)
        if report is None:
            return last_status
        if report[0] != last_status:
            del self._reports[last_status.model]
            return last_status
        return replace(last_status, readiness=report[1])

    def forget(self, model: str) -> None:
        """Remove a model that left the mesh."""
        self._reports.pop(model, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChange:
    """Changes of the mesh; unset fields are unchanged."""

    candidates: tuple[Candidate, ...] = ()
    """New or changed models, each with its complete description."""
    gone: tuple[str, ...] = ()
    hosts: Mapping[str, HostMemory] | None = None
    """Memory of all hosts with a VRAM ledger; None: unchanged."""
    routes: Mapping[str, Route] | None = None
    """All routes by name; None: unchanged."""
    cloud_fallback: bool | None = None
    """Whether routes may fall back to remote models; None: unchanged."""
    prefixes: tuple[PrefixReport, ...] = ()
    """What engines report about their caches, in order."""


_WHAT_COUNTS = attrgetter(
    *("readiness", "slots", "operations", "remote", "skills", "thinking_modes", "tools", "labels", "context_tokens"),
    *(
        "runner_max_requests",
        "base_model",
        "key",
        "pool",
        "host",
        "memory_bytes",
        "pinned",
        "max_wake_seconds",
        "runner_wakes",
        "detail",
    ),
)
"""Fields whose changes affect waiting requests. Load and progress are read when needed."""


@dataclass(slots=True)
class ViewDelta:
    """What a mesh change may affect."""

    queues: set[str]
    """Affected queues; some may no longer exist."""
    renames: bool = False
    """Whether targets may now resolve to other queues."""
    memory: bool = False


class ClusterView:
    """Keeps the candidate index up to date with the mesh."""

    def __init__(self, settings: Settings, limits: SchedulerLimits, is_waking: Callable[[str], bool]) -> None:
        self.index = CandidateIndex(settings, limits)
        self._is_waking = is_waking
        self._registry_view: dict[str, Candidate] = {}
        self._runner_reports = RunnerReports()
        self._by_host: dict[str, dict[str, Candidate]] = {}
        self._ready_since: dict[str, float] = {}
        self._routes: Mapping[str, Route] = {}
        self._cloud_fallback = False
        self.hosts: Mapping[str, HostMemory] = {}

    def apply(self, change: MeshChange, now: float) -> ViewDelta:
        """Apply a change of the mesh. Returns the affected queues."""
        delta = ViewDelta(set())
        for model in change.gone:
            self._drop(model, delta)
        for candidate in change.candidates:
            self._registry_view[candidate.model] = candidate
            self._refresh(candidate.model, delta, now)
        for report in change.prefixes:
            known = self.index.table.candidate(report.key[0])
            if known is not None and known.key == report.key:
                self.index.selector.caches.report(report, self.index.table.queues_of(known))
        if change.hosts is not None:
            self.hosts = change.hosts
            delta.memory = True
        if change.routes is not None or change.cloud_fallback is not None:
            self._set_routes(change, delta)
        return delta

    def refresh(self, model: str, now: float) -> ViewDelta:
        """Reassess a model at the beginning or end of its wake, which changes what being down means."""
        delta = ViewDelta(set())
        if model in self._registry_view:
            self._refresh(model, delta, now)
            candidate = self.index.table.candidate(model)
            if candidate is not None:
                delta.queues |= self._queues_of(candidate)
        return delta

    def apply_self_report(self, model: str, readiness: Readiness, now: float) -> ViewDelta:
        """Apply the readiness that a runner reports to a model and all models that share its engine."""
        known = self.index.table.candidate(model)
        sharing = {model, *(each.model for each in self.index.table.sharing(known))} if known is not None else {model}
        delta = ViewDelta(set())
        for name in sorted(sharing):
            self._runner_reports.note(self._registry_view.get(name), readiness)
            if name in self._registry_view:
                self._refresh(name, delta, now)
        delta.queues |= self.refresh(model, now).queues
        return delta

    def is_doubted(self, candidate: Candidate) -> bool:
        """Whether the registry shows a model as ready while its runner reports it as asleep."""
        last_status = self._registry_view.get(candidate.model)
        return (
            candidate.readiness is Readiness.ASLEEP
            and last_status is not None
            and last_status.readiness is Readiness.READY
        )

    def readiness_of(self, model: str) -> Readiness | None:
        """Return the readiness of a model; None: it is not in the mesh."""
        candidate = self.index.table.candidate(model)
        return None if candidate is None else candidate.readiness

    def usual_load_of(self, model: str) -> float | None:
        """Return the usual load time in seconds that a model's runner last reported; None: unknown."""
        candidate = self.index.table.candidate(model)
        return None if candidate is None else candidate.usual_load_seconds

    def larger_than_its_host(self, model: str) -> tuple[Candidate, HostMemory] | None:
        """Return a model and its host's memory if the model exceeds it; None: it fits, or this is unknown."""
        candidate = self.index.table.candidate(model)
        memory = None if candidate is None else self.hosts.get(candidate.host)
        if candidate is None or memory is None or candidate.memory_bytes <= memory.total_bytes:
            return None
        return candidate, memory

    def route_of(self, queue: str) -> Route | None:
        """Return the route of a queue; None: the queue is a pool's."""
        return self._routes.get(queue.removeprefix(ROUTE_PREFIX)) if queue.startswith(ROUTE_PREFIX) else None

    def ready_on(self, host: str) -> Iterator[tuple[Candidate, float]]:
        """Yield the ready models of a host, each with the time it became ready."""
        for model, candidate in self._by_host.get(host, {}).items():
            if candidate.readiness is Readiness.READY:
                yield candidate, self._ready_since[model]

    def _refresh(self, model: str, delta: ViewDelta, now: float) -> None:
        """Update the index with the current description of a model if it changed."""
        before = self.index.table.candidate(model)
        candidate = self._runner_reports.corrected(self._registry_view[model])
        if candidate.readiness is Readiness.DOWN and self._is_waking(model):
            # A waking host may briefly look gone; the end of the wake decides.
            candidate = replace(candidate, readiness=Readiness.ASLEEP)
        if candidate == before:
            return
        if before is not None:
            self._remove_from_host(before)
            if before.key != candidate.key:
                self.index.selector.caches.drop(before)
            elif candidate.readiness is not Readiness.READY:
                self.index.selector.caches.empty(before)
        self._add_to_host(candidate, before, now)
        if before is None or _WHAT_COUNTS(before) != _WHAT_COUNTS(candidate):
            old_queues = set(self.index.table.queues_of(before)) if before is not None else set()
            self.index.table.put(candidate)
            queues = set(self.index.table.queues_of(candidate))
            delta.queues |= old_queues | queues | self._queues_of(candidate)
            delta.renames |= old_queues != queues
        else:
            self.index.table.put(candidate)
        self.index.figures.note(candidate, now)

    def _queues_of(self, candidate: Candidate) -> set[str]:
        """Return the queues of all candidates that share the engine of this one, as a change affects all of them."""
        table = self.index.table
        return {queue for each in table.sharing(candidate) for queue in table.queues_of(each)}

    def _drop(self, model: str, delta: ViewDelta) -> None:
        self._registry_view.pop(model, None)
        self._runner_reports.forget(model)
        self._ready_since.pop(model, None)
        before = self.index.table.candidate(model)
        if before is not None:
            delta.queues |= set(self.index.table.queues_of(before))
            delta.renames = True
            self._remove_from_host(before)
            self.index.table.drop(model)
            self.index.selector.caches.drop(before)

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

    def _add_to_host(self, candidate: Candidate, before: Candidate | None, now: float) -> None:
        model = candidate.model
        was_ready = before is not None and before.readiness is Readiness.READY and before.key == candidate.key
        if candidate.readiness is Readiness.READY and not was_ready:
            self._ready_since[model] = now
        if candidate.host:
            self._by_host.setdefault(candidate.host, {})[model] = candidate

    def _remove_from_host(self, candidate: Candidate) -> None:
        on_host = self._by_host.get(candidate.host)
        if on_host is not None:
            on_host.pop(candidate.model, None)
            if not on_host:
                del self._by_host[candidate.host]

"""The mesh as the scheduler uses it: as told, as runners said themselves, and by host and runner."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from router_svc.policy.arrival import ROUTE_PREFIX
from router_svc.policy.candidate_index import CandidateIndex
from router_svc.policy.candidates import MAX_NAMES_IN_MESSAGE, Candidate, Readiness
from router_svc.policy.first_hand import FirstHand
from router_svc.policy.host_memory import HostMemory
from router_svc.policy.mesh_change import MeshChange
from router_svc.policy.routes import Route
from router_svc.policy.wakes import WakeBook

_WHAT_COUNTS = attrgetter(
    *("readiness", "slots", "operations", "remote", "skills", "tools", "context_tokens", "runner_max_requests"),
    *("key", "pool", "host", "memory_bytes", "pinned", "max_wake_seconds", "runner_wakes", "detail"),
)
"""What makes a difference to who waits. Load and progress are looked up when they are needed."""


@dataclass(slots=True)
class Shift:
    """What a change of the mesh may have changed for those who wait."""

    lines: set[str]
    """By name, some of which may be gone."""
    renames: bool = False
    """Whether targets may stand for other lines than before."""
    memory: bool = False


class MeshBoard:
    """Keeps the candidate index up to date with what is told."""

    def __init__(self, index: CandidateIndex, wakes: WakeBook) -> None:
        self._index = index
        self._wakes = wakes
        self._told: dict[str, Candidate] = {}
        self._first_hand = FirstHand()
        self._by_host: dict[str, dict[str, Candidate]] = {}
        self._ready_since: dict[str, float] = {}
        self._routes: Mapping[str, Route] = {}
        self._cloud_fallback = False
        self.hosts: Mapping[str, HostMemory] = {}

    def apply(self, change: MeshChange, now: float) -> Shift:
        """The mesh is different now."""
        shift = Shift(set())
        for model in change.gone:
            self._drop(model, shift)
        for candidate in change.candidates:
            self._told[candidate.model] = candidate
            self._refresh(candidate.model, shift, now)
        if change.hosts is not None:
            self.hosts = change.hosts
            shift.memory = True
        if change.routes is not None or change.cloud_fallback is not None:
            self._set_routes(change, shift)
        return shift

    def refresh(self, model: str, now: float) -> Shift:
        """A wake of it has begun or ended, which says what its being down means."""
        shift = Shift(set())
        if model in self._told:
            self._refresh(model, shift, now)
            candidate = self._index.candidate(model)
            if candidate is not None:
                shift.lines |= set(self._index.lines_of(candidate))
        return shift

    def believe(self, model: str, readiness: Readiness, now: float) -> Shift:
        """Its runner said that it is so."""
        self._first_hand.note(self._told.get(model), readiness)
        return self.refresh(model, now)

    def is_doubted(self, candidate: Candidate) -> bool:
        """Whether the registry shows it as ready and its runner says that it is not."""
        told = self._told.get(candidate.model)
        return candidate.readiness is Readiness.ASLEEP and told is not None and told.readiness is Readiness.READY

    def readiness_of(self, model: str) -> Readiness | None:
        """What it does now; None: it is not in the mesh."""
        candidate = self._index.candidate(model)
        return None if candidate is None else candidate.readiness

    def usual_load_of(self, model: str) -> float | None:
        """How long a load of it takes in seconds, by its runner's newest word; None: unknown."""
        candidate = self._index.candidate(model)
        return None if candidate is None else candidate.usual_load_seconds

    def larger_than_its_host(self, model: str) -> tuple[Candidate, HostMemory] | None:
        """The model and the memory of its host, if it would not even fit into all of that; else, or unknown: None."""
        candidate = self._index.candidate(model)
        memory = None if candidate is None else self.hosts.get(candidate.host)
        if candidate is None or memory is None or candidate.memory_bytes <= memory.total_bytes:
            return None
        return candidate, memory

    def route_of(self, line: str) -> Route | None:
        """The route whose line this is; None: it is a pool's."""
        return self._routes.get(line.removeprefix(ROUTE_PREFIX)) if line.startswith(ROUTE_PREFIX) else None

    def ready_on(self, host: str) -> Iterator[tuple[Candidate, float]]:
        """What takes requests on a host, and since when."""
        for model, candidate in self._by_host.get(host, {}).items():
            if candidate.readiness is Readiness.READY:
                yield candidate, self._ready_since[model]

    def some_names(self) -> str:
        """A few of the names that requests can be for, to put into an error message."""
        names = self._index.some_names(MAX_NAMES_IN_MESSAGE + 1)
        more = ", ..." if len(names) > MAX_NAMES_IN_MESSAGE else ""
        return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + more if names else "none"

    def _refresh(self, model: str, shift: Shift, now: float) -> None:
        """Put what is known of a model into the index, if it is new."""
        before = self._index.candidate(model)
        candidate = self._first_hand.corrected(self._told[model])
        if candidate.readiness is Readiness.DOWN and self._wakes.is_under_way(model):
            # A host that wakes may look gone for a moment; its wake tells how it ends.
            candidate = replace(candidate, readiness=Readiness.ASLEEP)
        if candidate == before:
            return
        if before is not None:
            self._take_off(before)
        self._put_on(candidate, before, now)
        if before is None or _WHAT_COUNTS(before) != _WHAT_COUNTS(candidate):
            old_lines = set(self._index.lines_of(before)) if before is not None else set()
            self._index.put(candidate)
            lines = set(self._index.lines_of(candidate))
            shift.lines |= old_lines | lines
            shift.renames |= old_lines != lines
        else:
            self._index.put(candidate)

    def _drop(self, model: str, shift: Shift) -> None:
        self._told.pop(model, None)
        self._first_hand.forget(model)
        self._wakes.forget(model)
        self._ready_since.pop(model, None)
        before = self._index.candidate(model)
        if before is not None:
            shift.lines |= set(self._index.lines_of(before))
            shift.renames = True
            self._take_off(before)
            self._index.drop(model)

    def _set_routes(self, change: MeshChange, shift: Shift) -> None:
        if change.routes is not None:
            self._routes = change.routes
        if change.cloud_fallback is not None:
            self._cloud_fallback = change.cloud_fallback
        shift.lines |= self._route_lines()
        self._index.set_ladders(self._routes, cloud_fallback=self._cloud_fallback)
        shift.lines |= self._route_lines()
        shift.renames = True

    def _route_lines(self) -> set[str]:
        return {line for line in self._index.lines() if line.startswith(ROUTE_PREFIX)}

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

"""Hosts with models, in stepped time: carries out what the load planner decides, and checks it while it does."""

import itertools
from collections import deque
from dataclasses import dataclass, field

from router_svc.policy.decisions import Served
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder, Readiness
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import Demand, LoadPlan, Resident
from router_svc.policy.loading.cold_start_planner import LoadPlanner
from weft.kernel.requests.request_values import Operation, Priority

GIB = 1024**3
STEP_SECONDS = 0.25
TOKENS_PER_SECOND = 50.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    name: str
    host: str = "host-a"
    gib: float = 4.0
    load_seconds: float = 2.0
    service_seconds: float = 1.0
    slots: int = 1
    pinned: bool = False


@dataclass(kw_only=True)
class Waiting:
    arrived_at: float
    tenant: str = "t"
    priority: Priority = Priority.NORMAL


class Queue:
    """Who waits for a model, in the order of arrival: by priority and tenant, so that the first are found at once."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Priority, str], deque[tuple[int, Waiting]]] = {}
        self._numbers = itertools.count()
        self._arrived_at = 0.0
        """The sum of all."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def append(self, waiting: Waiting) -> None:
        line = self._lines.setdefault((waiting.priority, waiting.tenant), deque())
        line.append((next(self._numbers), waiting))
        self._arrived_at += waiting.arrived_at

    def first(self, accounts: dict[str, float]) -> Waiting:
        """The next one: by what its tenant had, by priority, by arrival."""
        heads = [line[0] for line in self._lines.values() if line]
        _, first = min(
            heads, key=lambda head: (accounts.get(head[1].tenant, 0.0), head[1].priority, head[1].arrived_at, head[0])
        )
        return first

    def pop(self, first: Waiting) -> None:
        """Take out one that is the first of its tenant and priority."""
        _, taken = self._lines[first.priority, first.tenant].popleft()
        assert taken is first
        self._arrived_at -= first.arrived_at

    def oldest_arrived_at(self) -> float:
        return min(line[0][1].arrived_at for line in self._lines.values() if line)

    def waited_seconds(self, now: float) -> float:
        return len(self) * now - self._arrived_at

    def clear(self) -> None:
        self._lines.clear()
        self._arrived_at = 0.0


@dataclass
class ModelState:
    spec: ModelSpec
    queue: Queue = field(default_factory=Queue)
    running: list[tuple[float, Waiting]] = field(default_factory=list)
    ready_since: float | None = None
    loading_until: float | None = None
    last_granted_at: float = float("-inf")
    unloaded_at: float = float("-inf")
    begun_at: list[float] = field(default_factory=list)
    held: bool = False

    @property
    def holds_memory(self) -> bool:
        return self.ready_since is not None or self.loading_until is not None


def candidate(
    model: str, *, host: str = "host-a", gib: float = 4.0, slots: int = 1, pinned: bool = False, **other: object
) -> Candidate:
    fields: dict[str, object] = {
        "model": model,
        "pool": model,
        "runner": f"runner-{host}",
        "incarnation": "1",
        "readiness": Readiness.ASLEEP,
        "slots": slots,
        "operations": frozenset({Operation.CHAT}),
        "host": host,
        "memory_bytes": int(gib * GIB),
        "pinned": pinned,
        "max_wake_seconds": 60.0,
    }
    return Candidate(**{**fields, **other})  # type: ignore[arg-type]


class LoadWorld:
    """One queue per model. `book_steps`: the number of steps between two reads of the VRAM ledger."""

    def __init__(
        self,
        specs: list[ModelSpec],
        totals: dict[str, float],
        *,
        limits: SchedulerLimits | None = None,
        programs: dict[str, float] | None = None,
        book_steps: int = 1,
        loads_are_known: bool = True,
    ) -> None:
        self.limits = limits or SchedulerLimits()
        self.estimates = Estimates()
        self.planner = LoadPlanner(self.limits, self.estimates)
        self.models = {spec.name: ModelState(spec) for spec in specs}
        self.totals = {host: int(gib * GIB) for host, gib in totals.items()}
        self.programs = programs or {}
        self.now = 0.0
        self.accounts: dict[str, float] = {}
        self.served: list[tuple[str, float]] = []
        self.swaps = 0
        self.plan = LoadPlan()
        self.words: dict[str, list[str]] = {}
        self._book_steps = book_steps
        self._steps = 0
        self._book: dict[str, HostMemory] = {}
        if loads_are_known:
            for spec in specs:
                self.estimates.note_load(self.candidate_of(spec), spec.load_seconds)

    def candidate_of(self, spec: ModelSpec) -> Candidate:
        ready = self.models[spec.name].ready_since is not None
        return candidate(
            spec.name,
            host=spec.host,
            gib=spec.gib,
            slots=spec.slots,
            pinned=spec.pinned,
            readiness=Readiness.READY if ready else Readiness.ASLEEP,
        )

    def arrive(self, model: str, tenant: str = "t", priority: Priority = Priority.NORMAL) -> None:
        self.models[model].queue.append(Waiting(arrived_at=self.now, tenant=tenant, priority=priority))

    def make_ready(self, model: str) -> None:
        self.models[model].ready_since = self.now

    def step(self) -> None:
        """One step of time: what ends ends, what waits is placed, the planner decides, that is carried out."""
        self._end_what_is_over()
        self._place()
        if self._steps % self._book_steps == 0:
            self._book = {host: self._memory_of(host) for host in self.totals}
        self._steps += 1
        self.plan = self.planner.review(self._demands(), self._residents(), self._book, self._waking(), self.now)
        for line, word in self.plan.gates.items():
            heard = self.words.setdefault(line, [])
            if heard[-1:] != [word.reason]:
                heard.append(word.reason)
        for state in self.models.values():
            state.held = self.candidate_of(state.spec).key in self.plan.hold
        self._check_the_hold()
        self._check_that_it_fits()
        for start in self.plan.begin:
            self._load(self.models[start.candidate.model])
        self.now += STEP_SECONDS

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP_SECONDS)):
            self.step()

    def _end_what_is_over(self) -> None:
        for state in self.models.values():
            if state.loading_until is not None and state.loading_until <= self.now:
                state.loading_until, state.ready_since = None, self.now
            for ends_at, waiting in tuple(state.running):
                if ends_at <= self.now:
                    state.running.remove((ends_at, waiting))
                    tokens = int(state.spec.service_seconds * TOKENS_PER_SECOND)
                    taken = Served(prompt_tokens=0, cached_tokens=0, output_tokens=tokens)
                    self.estimates.note_served(
                        self.candidate_of(state.spec), waiting.tenant, taken, state.spec.service_seconds, 0.0
                    )
                    self.served.append((waiting.tenant, tokens))

    def _place(self) -> None:
        for state in self.models.values():
            while (
                state.queue
                and state.ready_since is not None
                and not state.held
                and len(state.running) < state.spec.slots
            ):
                waiting = state.queue.first(self.accounts)
                state.queue.pop(waiting)
                state.running.append((self.now + state.spec.service_seconds, waiting))
                state.last_granted_at = self.now
                cost = state.spec.service_seconds * TOKENS_PER_SECOND
                self.accounts[waiting.tenant] = self._account(waiting.tenant) + cost

    def _account(self, tenant: str) -> float:
        return self.accounts.get(tenant, 0.0)

    def _demands(self) -> list[Demand]:
        return [self._demand(state) for state in self.models.values() if state.queue and state.ready_since is None]

    def _demand(self, state: ModelState) -> Demand:
        first = state.queue.first(self.accounts)
        return Demand(
            queue=state.spec.name,
            asleep=(self.candidate_of(state.spec),),
            waiting=len(state.queue),
            priority=first.priority,
            oldest_arrived_at=state.queue.oldest_arrived_at(),
            waited_seconds=state.queue.waited_seconds(self.now),
            queued_tokens=len(state.queue) * state.spec.service_seconds * TOKENS_PER_SECOND,
            tenant=first.tenant,
            account=self._account(first.tenant),
        )

    def _residents(self) -> dict[str, list[Resident]]:
        found: dict[str, list[Resident]] = {}
        for state in self.models.values():
            if state.ready_since is None:
                continue
            first = state.queue.first(self.accounts) if state.queue else None
            found.setdefault(state.spec.host, []).append(
                Resident(
                    candidate=self.candidate_of(state.spec),
                    active=len(state.running),
                    queued_tokens=len(state.queue) * state.spec.service_seconds * TOKENS_PER_SECOND,
                    tenant="" if first is None else first.tenant,
                    account=float("inf") if first is None else self._account(first.tenant),
                    priority=None if first is None else first.priority,
                    last_granted_at=state.last_granted_at,
                    since=state.ready_since,
                )
            )
        return found

    def _waking(self) -> dict[str, Candidate]:
        loading = (state.spec for state in self.models.values() if state.loading_until is not None)
        return {spec.name: self.candidate_of(spec) for spec in loading}

    def _memory_of(self, host: str) -> HostMemory:
        here = [state.spec for state in self.models.values() if state.spec.host == host and state.holds_memory]
        holders = [
            MemoryHolder(name=spec.name, is_model=True, held_bytes=int(spec.gib * GIB), pinned=spec.pinned)
            for spec in here
        ]
        holders += [
            MemoryHolder(name=name, is_model=False, held_bytes=int(gib * GIB)) for name, gib in self.programs.items()
        ]
        held = sum(holder.held_bytes for holder in holders)
        assert held <= self.totals[host], "more memory is held than there is"
        return HostMemory(
            host=host,
            total_bytes=self.totals[host],
            free_bytes=self.totals[host] - held,
            holders=tuple(holders),
        )

    def _check_the_hold(self) -> None:
        """A hold belongs to a load that is under way or wanted, on the host of what is held."""
        held_on = {state.spec.host for state in self.models.values() if state.held}
        loading_on = {state.spec.host for state in self.models.values() if state.loading_until is not None}
        wanted_on = {state.spec.host for state in self.models.values() if state.queue and state.ready_since is None}
        begun_on = {start.candidate.host for start in self.plan.begin}
        assert held_on <= loading_on | wanted_on | begun_on, "a model is held for nothing"

    def _check_that_it_fits(self) -> None:
        """What begins fits into free memory and what those hold that are held, idle and not pinned."""
        for host in self.totals:
            wanted = sum(start.candidate.memory_bytes for start in self.plan.begin if start.candidate.host == host)
            given = sum(
                int(state.spec.gib * GIB)
                for state in self.models.values()
                if state.spec.host == host and state.held and not state.running and not state.spec.pinned
            )
            free = self._memory_of(host).free_bytes
            assert not wanted or wanted <= free + given, f"{host}: {wanted / GIB} of {free / GIB} + {given / GIB} GiB"
        assert not any(state.held and state.spec.pinned for state in self.models.values()), "a pinned model is held"

    def _load(self, state: ModelState) -> None:
        """As the ledger does: the idle model that was not used for the longest time goes first, never a pinned one."""
        state.begun_at.append(self.now)
        host, needed = state.spec.host, int(state.spec.gib * GIB)
        idle = [
            each
            for each in self.models.values()
            if each.spec.host == host and each.ready_since is not None and not each.running and not each.spec.pinned
        ]
        for each in sorted(idle, key=lambda each: (not each.held, each.last_granted_at)):
            if self._memory_of(host).free_bytes >= needed:
                break
            each.ready_since, each.unloaded_at, each.held = None, self.now, False
            self.swaps += 1
        state.loading_until = self.now + state.spec.load_seconds
        assert self._memory_of(host).free_bytes >= 0

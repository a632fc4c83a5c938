"""Actual state of simulated hosts, their model instances, and targets. The router gets delayed reports of it."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from math import inf

from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder, Needs, Readiness
from router_svc.policy.endpoints.engine_load import EngineFigures
from router_svc.policy.endpoints.routes import Route
from weft.kernel.requests.capabilities import takes_mode
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.names import ROUTE_PREFIX
from weft_extensions.simulate.scenario import BLOCK_TOKENS, GIBIBYTE, HostGroup, ModelKind, Scenario, seeded_random

PROGRAM = "a program"
UNOWNED = "a model that is gone"
LONGEST_WAKE_SECONDS = 300.0
SESSIONS_IN_CACHE_PER_SLOT = 2


class Phase(Enum):
    """The state of an instance."""

    ASLEEP = "asleep"
    CLAIMING = "claiming"
    """Waits for memory that is being freed."""
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


_READINESS = {
    Phase.ASLEEP: Readiness.ASLEEP,
    Phase.CLAIMING: Readiness.LOADING,
    Phase.LOADING: Readiness.LOADING,
    Phase.READY: Readiness.READY,
    Phase.STOPPING: Readiness.LOADING,
}
HOLDS_MEMORY = frozenset({Phase.LOADING, Phase.READY, Phase.STOPPING})


@dataclass(slots=True, kw_only=True, eq=False)
class Instance:
    """A model on a host."""

    name: str
    kind: ModelKind
    host: "Host"
    phase: Phase = Phase.ASLEEP
    active: int = 0
    """Attempts in progress."""
    last_used_at: float = 0.0
    last_band: Priority = Priority.LOW
    last_load_seconds: float | None = None
    loads: int = 0
    version: int = 0
    """Counts its changes, so that a late report is recognized."""
    life: int = 0
    """Counts its phase changes, so that an action planned for an earlier phase is dropped."""
    keep_alive_seconds: float | None = None
    sessions: dict[int, None] = field(default_factory=dict)
    """Conversations in its cache, least recently used first."""
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Blocks of prompts in its cache, least recently used first."""
    prefilled_at: float = 0.0
    """When its engine has processed all its prompts, one after the other."""
    figures: EngineFigures | None = None
    """The last sample of its engine's figures; None: none was taken, or it had no request."""

    def holds(self) -> int:
        """Returns the bytes of accelerator memory that it holds now."""
        return self.kind.memory_bytes if self.phase in HOLDS_MEMORY else 0

    def candidate(self) -> Candidate:
        """Returns the instance as its runner reports it."""
        kind, host = self.kind, self.host
        return Candidate(
            model=self.name,
            pool=kind.name,
            runner=host.name,
            incarnation=str(host.incarnation),
            readiness=_READINESS[self.phase] if host.is_up else Readiness.DOWN,
            slots=kind.slots,
            engine=self.figures if self.phase is Phase.READY and host.is_up else None,
            operations=frozenset({kind.operation}),
            remote=kind.remote,
            runner_max_requests=host.max_requests,
            runner_wakes=True,
            max_wake_seconds=LONGEST_WAKE_SECONDS,
            usual_load_seconds=self.last_load_seconds,
            detail="" if host.is_up else "no heartbeat",
            host="" if kind.remote else host.name,
            memory_bytes=kind.memory_bytes,
            pinned=kind.pinned,
            skills=kind.skills,
            context_tokens=kind.context_tokens,
        )

    def draw_load_seconds(self, seed: int) -> float:
        """Returns the duration of its next load."""
        return self.kind.load_seconds.draw(seeded_random(seed, f"loads/{self.name}/{self.loads}"))

    def cached_tokens(self, blocks: Iterable[int]) -> int:
        """Returns the tokens of a prompt's longest cached prefix."""
        return BLOCK_TOKENS * sum(1 for _ in takewhile(self.blocks.__contains__, blocks))

    def store(self, blocks: Sequence[int]) -> None:
        """Adds a prompt to its cache. The ends of prompts are evicted before their beginnings."""
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) * BLOCK_TOKENS > self.kind.cache_tokens:
            self.blocks.popitem(last=False)

    def forget(self) -> None:
        """Clears its cache, as its engine ended."""
        self.sessions.clear()
        self.blocks.clear()
        self.prefilled_at = 0.0

    def remember(self, session: int) -> None:
        """Adds a conversation to its cache."""
        self.sessions.pop(session, None)
        self.sessions[session] = None
        if len(self.sessions) > self.kind.slots * SESSIONS_IN_CACHE_PER_SLOT:
            del self.sessions[next(iter(self.sessions))]


@dataclass(slots=True, kw_only=True, eq=False)
class Host:
    """One host with one runner."""

    name: str
    total_bytes: int = 0
    program_bytes: int = 0
    unowned_bytes: int = 0
    max_requests: int = 0
    engine_requests: int = 0
    """Requests that each engine computes concurrently; 0: as many as it has slots."""
    figures_until: float = inf
    """When the figures of its engines cease to arrive."""
    remote: bool = False
    instances: list[Instance] = field(default_factory=list)
    is_up: bool = True
    incarnation: int = 1
    slowness: float = 1.0
    break_share: float = 0.0
    claims: list[Instance] = field(default_factory=list)
    """Instances that wait for memory, in order."""
    active: int = 0
    loading: int = 0
    noted_at: float = 0.0
    busy_seconds: float = 0.0
    """Seconds with at least one request in progress."""
    load_seconds: float = 0.0
    """Seconds in which it only loaded or evicted models."""
    down_seconds: float = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether some or all attempts on it fail."""
        return not self.is_up or self.break_share > 0

    @property
    def has_ledger(self) -> bool:
        """Whether its memory is in the ledger."""
        return self.total_bytes > 0

    def booked_bytes(self) -> int:
        """Returns the bytes that all its models hold."""
        return sum(instance.holds() for instance in self.instances)

    def free_bytes(self) -> int:
        """Returns the bytes that a load could get now."""
        return self.total_bytes - self.program_bytes - self.unowned_bytes - self.booked_bytes()

    def note(self, now: float) -> None:
        """Accounts for the time since the last call; called before every change."""
        passed, self.noted_at = now - self.noted_at, now
        if not self.is_up:
            self.down_seconds += passed
        elif self.active:
            self.busy_seconds += passed
        elif self.loading:
            self.load_seconds += passed

    def memory(self) -> HostMemory:
        """Returns the memory as the registry's ledger has it."""
        holders = [
            MemoryHolder(
                name=instance.name,
                is_model=True,
                held_bytes=instance.kind.memory_bytes,
                pinned=instance.kind.pinned,
                is_leaving=instance.phase is Phase.STOPPING,
                priority=instance.last_band,
                last_used_at=instance.last_used_at,
            )
            for instance in self.instances
            if instance.kind.memory_bytes and instance.phase in HOLDS_MEMORY
        ]
        if self.program_bytes:
            holders.append(MemoryHolder(name=PROGRAM, is_model=False, held_bytes=self.program_bytes))
        if self.unowned_bytes:
            holders.append(MemoryHolder(name=UNOWNED, is_model=True, held_bytes=self.unowned_bytes, unowned=True))
        return HostMemory(
            host=self.name,
            total_bytes=self.total_bytes,
            free_bytes=max(0, self.free_bytes()),
            holders=tuple(holders),
        )


class World:
    """All hosts and instances by name."""

    def __init__(self, scenario: Scenario) -> None:
        self.hosts: dict[str, Host] = {}
        self.instances: dict[str, Instance] = {}
        self._groups: dict[str, tuple[str, ...]] = {}
        for group in scenario.hosts:
            self._add_hosts(group)
        for kind in scenario.models:
            self._add_model(kind)

    def named(self, names: tuple[str, ...]) -> list[Host]:
        """Returns the hosts, or groups of hosts, with these names; all if none are named."""
        if not names:
            return list(self.hosts.values())
        return [self.hosts[host] for name in names for host in self._groups.get(name, (name,))]

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances.values())

    def _add_hosts(self, group: HostGroup) -> None:
        names = self._groups[group.name] = group.host_names()
        for name in names:
            self.hosts[name] = Host(
                name=name,
                total_bytes=round(group.memory_gib * GIBIBYTE),
                program_bytes=round(group.program_gib * GIBIBYTE),
                unowned_bytes=round(group.unowned_gib * GIBIBYTE),
                max_requests=group.max_requests,
                engine_requests=group.engine_requests,
                figures_until=inf if group.figures_until_seconds is None else group.figures_until_seconds,
            )

    def _add_model(self, kind: ModelKind) -> None:
        if kind.remote:
            self.hosts[kind.name] = Host(name=kind.name, remote=True)
            self._groups[kind.name] = (kind.name,)
            hosts = [self.hosts[kind.name]]
        else:
            hosts = [host for host in self.named(kind.hosts) if not host.remote]
        for number, host in enumerate(hosts, start=1):
            name = kind.name if len(hosts) == 1 else f"{kind.name}-{number}"
            instance = Instance(name=name, kind=kind, host=host)
            fits = not kind.memory_bytes or not host.has_ledger or host.free_bytes() >= kind.memory_bytes
            if kind.remote or (kind.loaded and fits):
                instance.phase = Phase.READY
            host.instances.append(instance)
            self.instances[name] = instance


class Targets:
    """Resolves a target to its instances, by the scenario and not by the scheduler's view."""

    def __init__(self, instances: Iterable[Instance], routes: Mapping[str, Route], *, cloud_fallback: bool) -> None:
        self._by_pool: dict[str, list[Instance]] = {}
        self._pool_of: dict[str, str] = {}
        for instance in instances:
            self._by_pool.setdefault(instance.kind.name, []).append(instance)
            self._pool_of[instance.name] = instance.kind.name
        self._routes = routes
        self._cloud_fallback = cloud_fallback
        self._known: dict[str, tuple[Instance, ...]] = {}

    def members(self, target: str) -> tuple[Instance, ...]:
        """Returns the instances of a target, in route order, with the guard for remote models applied."""
        known = self._known.get(target)
        if known is None:
            known = self._known[target] = self._resolve(target)
        return known

    def _resolve(self, target: str) -> tuple[Instance, ...]:
        if not target.startswith(ROUTE_PREFIX):
            return tuple(self._named(target))
        route = self._routes.get(target.removeprefix(ROUTE_PREFIX))
        found: dict[str, Instance] = {}
        for position, name in enumerate(route.candidates if route is not None else ()):
            for instance in self._entry_members(name):
                if not instance.kind.remote or position == 0 or self._cloud_fallback:
                    found.setdefault(instance.name, instance)
        return tuple(found.values())

    def _entry_members(self, name: str) -> list[Instance]:
        """Returns the instances that a route entry names: a pool, or one model of it."""
        if name in self._by_pool:
            return self._by_pool[name]
        return [instance for instance in self._by_pool.get(self._pool_of.get(name, ""), ()) if instance.name == name]

    def _named(self, target: str) -> list[Instance]:
        """Returns the instances that a request names: a pool, or any model of it, which stands for the pool."""
        return self._by_pool.get(target) or self._by_pool.get(self._pool_of.get(target, ""), [])


def lacks(candidate: Candidate, needs: Needs) -> str:
    """Returns why a candidate can never serve such a request; empty: it can."""
    if needs.operation not in candidate.operations:
        return "it does not offer the operation"
    if candidate.remote and not needs.allow_remote:
        return "it is remote, and the request does not allow remote models"
    if candidate.skills is not None and not needs.skills <= candidate.skills:
        return "it lacks a skill"
    if not takes_mode(candidate.thinking_modes, needs.thinking):
        return "it lacks a thinking mode"
    if candidate.context_tokens and needs.context_tokens > candidate.context_tokens:
        return "its context is too short"
    return ""

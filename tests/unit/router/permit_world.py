"""A mesh of local and remote models that changes at random, and a watcher who looks at every placement in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hypothesis import strategies as st

from router_svc.policy.arrival import ROUTE_PREFIX, Arrival, Needs
from router_svc.policy.decisions import Decision, Placed, Rejects, Served, WakeFailure, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.settings import ChoicePolicy, PoolSettings, RemotePermission, Settings, TenantSettings
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation, Priority

MODELS = tuple(f"m{number}" for number in range(6))
POOLS = ("p0", "p1", *MODELS[:2])
ROUTES = ("r0", "r1")
TENANTS = {permission.value: TenantSettings(allow_remote=permission) for permission in RemotePermission}
FAILURES = (
    Reason.CONNECT_FAILED,
    Reason.BACKEND_NOT_READY,
    Reason.NO_SLOT_AVAILABLE,
    Reason.WORKER_LOST,
    Reason.TICKET_INVALID,
    Reason.TOOL_UNAVAILABLE,
    Reason.INVALID_ARGUMENT,
)


class PermitViolation(Exception):  # noqa: N818 - what it says
    """Bytes would have left the premises without a permit."""


class PlacingScheduler(Protocol):
    """What the world asks of a scheduler."""

    def apply(self, change: MeshChange, now: float) -> list[Decision]: ...
    def submit(self, arrival: Arrival, now: float) -> list[Decision]: ...
    def report_first_content(self, key: int, now: float) -> None: ...
    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]: ...
    def finish(self, key: int, now: float, served: Served | None = None) -> list[Decision]: ...
    def wake_finished(self, model: str, failure: WakeFailure | None, now: float) -> list[Decision]: ...
    def tick(self, now: float) -> list[Decision]: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """A request arrives."""

    target: str
    asks_remote: bool
    tenant: str
    priority: Priority
    session: bytes


@dataclass(frozen=True, slots=True)
class Fail:
    """An attempt ends badly before any content."""

    which: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Finish:
    """A request ends."""

    which: int
    after_content: bool


@dataclass(frozen=True, slots=True)
class Change:
    """A model appears, changes or goes."""

    candidate: Candidate
    goes: bool


@dataclass(frozen=True, slots=True)
class Guard:
    """The cloud guard is set."""

    allows_fallback: bool


@dataclass(frozen=True, slots=True)
class Reroute:
    """A route is declared again."""

    route: Route


@dataclass(frozen=True, slots=True)
class Pass:
    """Time passes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WakeEnds:
    """A wake that was begun ends."""

    which: int
    succeeds: bool


Step = Ask | Fail | Finish | Change | Guard | Reroute | Pass | WakeEnds


def mesh_settings() -> Settings:
    """A choice policy of each kind, and a tenant of each kind of permission."""
    policies = zip(POOLS, ChoicePolicy, strict=False)
    return Settings(pools={pool: PoolSettings(policy=policy) for pool, policy in policies}, tenants=TENANTS)


@dataclass
class PermitWorld:
    """Runs steps on a scheduler; raises PermitViolation for a request off the premises without a permit."""

    scheduler: PlacingScheduler
    now: float = 0.0
    allows_fallback: bool = False
    fleet: dict[str, Candidate] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    remote_placements: int = 0
    """How many were looked at and found permitted."""
    _arrivals: dict[int, Arrival] = field(default_factory=dict)
    _running: dict[int, int] = field(default_factory=dict)
    """The attempt of each request that runs."""
    _wakes: list[str] = field(default_factory=list)

    def begin(self, candidates: Iterable[Candidate], routes: Iterable[Route], *, allows_fallback: bool) -> None:
        """The mesh as it is first heard of."""
        self.fleet = {candidate.model: candidate for candidate in candidates}
        self.routes = {route.name: route for route in routes}
        self.allows_fallback = allows_fallback
        whole = MeshChange(
            candidates=tuple(self.fleet.values()), hosts={}, routes=self.routes, cloud_fallback=allows_fallback
        )
        self._look(self.scheduler.apply(whole, self.now))

    def do(self, step: Step) -> None:
        """One step, and a look at what is decided."""
        self._look(self._decisions(step))

    def _decisions(self, step: Step) -> list[Decision]:
        decisions: list[Decision] = []
        match step:
            case Ask():
                decisions = self._ask(step)
            case Fail() if (key := self._pick(step.which)) is not None:
                decisions = self.scheduler.report_failed(key, self._running.pop(key), step.reason, self.now)
            case Finish() if (key := self._pick(step.which)) is not None:
                if step.after_content:
                    self.scheduler.report_first_content(key, self.now)
                del self._running[key]
                decisions = self.scheduler.finish(key, self.now)
            case Change():
                decisions = self._change(step)
            case Guard():
                self.allows_fallback = step.allows_fallback
                decisions = self.scheduler.apply(MeshChange(cloud_fallback=step.allows_fallback), self.now)
            case Reroute():
                self.routes = {**self.routes, step.route.name: step.route}
                decisions = self.scheduler.apply(MeshChange(routes=self.routes), self.now)
            case Pass():
                self.now += step.seconds
                decisions = self.scheduler.tick(self.now)
            case WakeEnds() if self._wakes:
                decisions = self._end_wake(step)
        return decisions

    def _ask(self, ask: Ask) -> list[Decision]:
        key = len(self._arrivals) + 1
        permit = TENANTS[ask.tenant].permits_remote(requested=ask.asks_remote)
        arrival = self._arrivals[key] = Arrival(
            key=key,
            target=ask.target,
            needs=Needs(Operation.CHAT, allow_remote=permit),
            tenant=ask.tenant,
            priority=ask.priority,
            arrived_at=self.now,
            affinity_key=ask.session,
            prefix_digests=(1, 2) if ask.session else (),
        )
        return self.scheduler.submit(arrival, self.now)

    def _change(self, step: Change) -> list[Decision]:
        model = step.candidate.model
        if step.goes:
            self.fleet.pop(model, None)
            return self.scheduler.apply(MeshChange(gone=(model,)), self.now)
        self.fleet[model] = step.candidate
        return self.scheduler.apply(MeshChange(candidates=(step.candidate,)), self.now)

    def _end_wake(self, step: WakeEnds) -> list[Decision]:
        model = self._wakes.pop(step.which % len(self._wakes))
        if not step.succeeds:
            return self.scheduler.wake_finished(model, WakeFailure(reason=Reason.WAKE_FAILED, message="no"), self.now)
        decisions: list[Decision] = []
        if (sleeper := self.fleet.get(model)) is not None:
            self.fleet[model] = replace(sleeper, readiness=Readiness.READY)
            decisions = self.scheduler.apply(MeshChange(candidates=(self.fleet[model],)), self.now)
        return decisions + self.scheduler.wake_finished(model, None, self.now)

    def _pick(self, which: int) -> int | None:
        keys = sorted(self._running)
        return keys[which % len(keys)] if keys else None

    def _look(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Placed):
                self._running[decision.key] = decision.attempt
                self._judge(self._arrivals[decision.key], decision.candidate.model)
            elif isinstance(decision, Rejects):
                self._running.pop(decision.key, None)
            elif isinstance(decision, Wakes):
                self._wakes.append(decision.model)

    def _judge(self, arrival: Arrival, model: str) -> None:
        candidate = self.fleet[model]
        if not candidate.remote:
            return
        if not TENANTS[arrival.tenant].permits_remote(requested=arrival.needs.allow_remote):
            raise PermitViolation(f"{arrival.tenant} never allows {model}")
        if not arrival.needs.allow_remote:
            raise PermitViolation(f"request {arrival.key} does not allow {model}")
        if arrival.target.startswith(ROUTE_PREFIX) and not self.allows_fallback:
            primary = self.routes[arrival.target.removeprefix(ROUTE_PREFIX)].candidates[0]
            # A name that is both a pool's and a model's is the pool's.
            is_pool = any(other.pool == primary for other in self.fleet.values())
            if primary != (candidate.pool if is_pool else model):
                raise PermitViolation(f"{model} is a fallback off the premises, and the guard is up")
        self.remote_placements += 1


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """One model of the mesh, in any state."""
    model = draw(st.sampled_from(MODELS))
    return Candidate(
        model=model,
        pool=draw(st.sampled_from(("p0", "p0", "p1", model))),
        runner=f"on-{model}",
        incarnation=draw(st.sampled_from(("a", "b"))),
        readiness=draw(st.sampled_from((*[Readiness.READY] * 4, *Readiness))),
        slots=draw(st.integers(1, 2)),
        operations=frozenset(Operation),
        remote=draw(st.booleans()),
        runner_wakes=True,
        max_wake_seconds=60.0,
        host=f"host-{model}",
    )


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """A route over pools and models."""
    names = st.sampled_from((*POOLS[:2], *MODELS))
    return Route(
        name=draw(st.sampled_from(ROUTES)),
        candidates=tuple(draw(st.lists(names, min_size=2, max_size=5, unique=True))),
        pin_primary=draw(st.booleans()),
    )


def _asks() -> st.SearchStrategy[Ask]:
    targets = ("p0", "p1", *MODELS[:2], *(f"{ROUTE_PREFIX}{name}" for name in ROUTES * 3))
    return st.builds(
        Ask,
        target=st.sampled_from(targets),
        asks_remote=st.booleans(),
        tenant=st.sampled_from(sorted(TENANTS)),
        priority=st.sampled_from(list(Priority)),
        session=st.sampled_from((b"", b"one", b"two")),
    )


def steps() -> st.SearchStrategy[list[Step]]:
    """What happens to a mesh; requests most of all."""
    which = st.integers(0, 100)
    return st.lists(
        st.one_of(
            _asks(),
            _asks(),
            st.builds(Fail, which, st.sampled_from(FAILURES)),
            st.builds(Fail, which, st.sampled_from(FAILURES)),
            st.builds(Finish, which, st.booleans()),
            st.builds(Change, candidates(), st.booleans()),
            st.builds(Guard, st.booleans()),
            st.builds(Reroute, routes()),
            st.builds(Pass, st.sampled_from((0.1, 1.0, 5.0, 31.0))),
            st.builds(WakeEnds, which, st.booleans()),
        ),
        min_size=5,
        max_size=40,
    )

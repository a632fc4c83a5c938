"""What a run does, decided by its seed: which tasks are sent, and what is killed when."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

STEADY_MODEL, RARE_MODEL = "m-steady", "m-rare"
"""The runner of the first is started again at once, that of the second after a while: its tasks wait meanwhile."""
TOKENS_PER_SECOND = 50.0
MAX_TOKENS = 150
RARE_SHARE = 0.15
DUPLICATE_SHARE = 0.1
CONFLICT_SHARE = 0.02
CANCEL_SHARE = 0.15
MISSES = 1.5
"""So many kills are tried for one that hits somebody, about."""
WAKE_SECONDS = 2.0
"""How long a stale router goes on after its sleep until it is killed."""
MAX_CANCEL_DELAY_SECONDS = 0.6
MAX_ATTEMPTS = 100
"""Of each task, the most that may be: more than any one of them meets kills."""


class Target(StrEnum):
    """What is killed."""

    SUBMITTER = "submitter"
    BACKEND = "backend"
    RUNNER = "runner"
    ROUTER = "router"
    REGISTRY = "registry"
    STALE_ROUTER = "stale router"
    """A router is stopped for longer than its leases while another one takes its place, goes on, and is killed then."""


USUAL_WEIGHTS: Mapping[Target, int] = {
    Target.SUBMITTER: 25,
    Target.BACKEND: 28,
    Target.RUNNER: 18,
    Target.ROUTER: 18,
    Target.REGISTRY: 8,
    Target.STALE_ROUTER: 3,
}
STALE_ROUTERS: Mapping[Target, int] = {Target.STALE_ROUTER: 1}
"""Only a router that has lost its leases without knowing it can show what a fence is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    seed: int
    kills: int
    """So many happen at least."""
    tasks: int
    """So many are acknowledged at least."""
    submitters: int = 2
    kill_interval_seconds: float = 0.7
    """On average."""
    lease_seconds: float = 1.5
    max_minutes: float = 60.0
    """The run fails where it has not done all of it by then."""
    database_url: str = ""
    """Of an empty database; empty: an SQLite file."""
    is_fenced: bool = True
    weights: Mapping[Target, int] = field(default_factory=lambda: USUAL_WEIGHTS)

    @property
    def tasks_per_submitter(self) -> int:
        """Each sends so many."""
        return -(-self.tasks // self.submitters)

    @property
    def sleep_seconds(self) -> float:
        """How long a stale router sleeps: longer than any of its leases."""
        return 2.0 * self.lease_seconds + 1.0

    @property
    def tasks_per_second(self) -> float:
        """What each sends, so that there is work as long as there are kills."""
        stale_share = self.weights.get(Target.STALE_ROUTER, 0) / sum(self.weights.values())
        # Only one router sleeps at a time: the next one waits for it.
        seconds = MISSES * self.kill_interval_seconds + stale_share * (self.sleep_seconds + WAKE_SECONDS)
        return self.tasks_per_submitter / max(1.0, self.kills * seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A task that is sent."""

    key: str
    model: str
    tokens: int
    is_durable_work: bool
    """Whether it says no priority."""
    is_sent_twice: bool
    is_contradicted: bool
    """Whether the same key is sent with another body afterwards."""
    cancel_after_seconds: float | None
    """None: it is not cancelled."""


def submission(seed: int, submitter: str, number: int) -> Submission:
    """The same for the same arguments, in whatever life of the submitter."""
    random = Random(f"{seed}/{submitter}/{number}")  # noqa: S311 - the seed must decide it
    return Submission(
        key=f"{seed}-{submitter}-{number}",
        model=RARE_MODEL if random.random() < RARE_SHARE else STEADY_MODEL,
        # Most are short, a few outlast a lease.
        tokens=random.randint(1, 12) if random.random() < 0.8 else random.randint(12, MAX_TOKENS),
        is_durable_work=random.random() < 0.7,
        is_sent_twice=random.random() < DUPLICATE_SHARE,
        is_contradicted=random.random() < CONFLICT_SHARE,
        cancel_after_seconds=random.uniform(0.0, MAX_CANCEL_DELAY_SECONDS) if random.random() < CANCEL_SHARE else None,
    )


def kills(plan: Plan) -> Iterator[tuple[float, Target]]:
    """Without end: how long to wait, and what to kill then."""
    random = Random(f"{plan.seed}/kills")  # noqa: S311 - the seed must decide it
    targets, weights = list(plan.weights), list(plan.weights.values())
    while True:
        yield random.expovariate(1.0 / plan.kill_interval_seconds), random.choices(targets, weights)[0]

"""The mesh as the scheduler sees it: models on runners, grouped into pools."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from weft.kernel.request import Operation, Skill

CandidateKey = tuple[str, str, str]
"""Model, runner and incarnation of a candidate; see `Candidate.key`."""
RunnerKey = tuple[str, str]
"""A runner and its incarnation."""


MAX_NAMES_IN_MESSAGE = 8


class Readiness(Enum):
    """Whether a candidate takes requests."""

    READY = "ready"
    LOADING = "loading"
    """It will be ready without anybody's doing."""
    ASLEEP = "asleep"
    """It will be ready once it has been woken."""
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One model on one runner incarnation."""

    model: str
    pool: str
    """The effective pool; never empty."""
    runner: str
    """Empty: none serves it yet."""
    incarnation: str
    """Empty: no runner is known."""
    readiness: Readiness
    slots: int
    slots_reported_used: int = 0
    """Slots in use by the runner's last report, whoever uses them; seconds old."""
    operations: frozenset[Operation]
    remote: bool = False
    """Whether serving it sends bytes off the premises."""
    runner_max_requests: int = 0
    """Requests its runner works on at once over all its models; 0: as many as its slots."""
    runner_wakes: bool = False
    """Whether its runner wakes it when asked."""
    max_wake_seconds: float = 0.0
    """Longest time that waking it takes; only of interest while it is asleep."""
    load_progress: float | None = None
    load_eta_seconds: float | None = None
    """How long its load still takes, by its runner's word; None: unknown, or it does not load."""
    usual_load_seconds: float | None = None
    """How long a load from nothing takes, by its runner's word; None: unknown."""
    detail: str = ""
    host: str = ""
    """Where it runs; empty: nobody knows, or no runner serves it."""
    memory_bytes: int = 0
    """Accelerator memory that it takes while it is loaded; 0: none, or unknown."""
    pinned: bool = False
    """Whether it is never evicted for another model."""
    skills: frozenset[Skill] | None = None
    """What it can do beyond text; None: unknown, and it is asked for everything."""
    clock_refused: bool = False
    """Whether its runner takes no requests because of its clock; it is down then, and `detail` says how far off."""
    tools: frozenset[str] = frozenset()
    """Tools of the mesh that its runner has."""
    context_tokens: int = 0
    """Context of one slot; 0: unknown."""
    key: tuple[str, str, str] = field(init=False, repr=False, compare=False)
    """Identifies it for as long as the runner process lives."""

    def __post_init__(self) -> None:
        # Asked for several times per request.
        object.__setattr__(self, "key", (self.model, self.runner, self.incarnation))


@dataclass(frozen=True, slots=True)
class Fleet:
    """All candidates by pool, and the pool of every model."""

    pools: Mapping[str, tuple[Candidate, ...]] = field(default_factory=dict)
    pool_of_model: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(candidates: Iterable[Candidate]) -> "Fleet":
        """Group candidates by their effective pools."""
        pools: dict[str, list[Candidate]] = {}
        pool_of_model: dict[str, str] = {}
        for candidate in candidates:
            pools.setdefault(candidate.pool, []).append(candidate)
            pool_of_model[candidate.model] = candidate.pool
        return Fleet({name: tuple(members) for name, members in pools.items()}, pool_of_model)

    def pool_of(self, name: str) -> str:
        """The pool that a name stands for: the one so called, or the one that the model so called is in.

        A name that nothing has stands for itself.
        """
        return name if name in self.pools else self.pool_of_model.get(name, name)

    def members(self, name: str) -> tuple[Candidate, ...]:
        """Who answers for a pool or model of this name; empty when there is none."""
        return self.pools.get(self.pool_of(name), ())

    def __iter__(self) -> Iterator[Candidate]:
        return itertools.chain.from_iterable(self.pools.values())

    def some_names(self) -> str:
        """A few names to put into an error message."""
        names = sorted({*self.pools, *self.pool_of_model})
        more = ", ..." if len(names) > MAX_NAMES_IN_MESSAGE else ""
        return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + more if names else "none"

"""The mesh as the scheduler sees it: models on runners, grouped into pools."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from weft.kernel.request import Operation

MAX_NAMES_IN_MESSAGE = 8


class Readiness(Enum):
    """Whether a candidate takes requests."""

    READY = "ready"
    LOADING = "loading"
    """It will be ready without anybody's doing."""
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One model on one runner incarnation."""

    model: str
    pool: str
    runner: str
    incarnation: str
    readiness: Readiness
    slots: int
    slots_reported_used: int = 0
    """Slots in use by the runner's last report, whoever uses them; seconds old."""
    operations: frozenset[Operation]
    remote: bool = False
    """Whether serving it sends bytes off the premises."""
    load_progress: float | None = None
    detail: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies it for as long as the runner process lives."""
        return (self.model, self.runner, self.incarnation)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All candidates, found by the name of their pool or model."""

    by_name: Mapping[str, tuple[Candidate, ...]]

    @staticmethod
    def of(candidates: Iterable[Candidate]) -> "Fleet":
        """Group candidates. A pool's name wins over the name of a single model."""
        pools: dict[str, list[Candidate]] = {}
        singles: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            pools.setdefault(candidate.pool, []).append(candidate)
            singles.setdefault(candidate.model, []).append(candidate)
        return Fleet({name: tuple(found) for name, found in (singles | pools).items()})

    def members(self, name: str) -> tuple[Candidate, ...]:
        """Who answers for a pool or model of this name; empty when there is none."""
        return self.by_name.get(name, ())

    def some_names(self) -> str:
        """A few names to put into an error message."""
        names = sorted(self.by_name)
        more = ", ..." if len(names) > MAX_NAMES_IN_MESSAGE else ""
        return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + more if names else "none"

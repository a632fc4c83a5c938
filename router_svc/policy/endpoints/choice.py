"""What is chosen among, and what was chosen: the words of every choice policy."""

from dataclasses import dataclass
from typing import NamedTuple

from router_svc.policy.arrival import Needs
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey

MAX_CONSIDERED = 16
"""Candidates that a choice remembers by name; it counts the rest."""
SHOWN_OF_MANY = 4
"""Candidates that a choice among more than MAX_CONSIDERED names: it is made too often to describe them all."""


class PickRequest(NamedTuple):
    """What a request wants of the candidate that is chosen for it. A tuple, because one is made for every try."""

    needs: Needs
    excluded: frozenset[CandidateKey] = frozenset()
    """Where it was tried in vain."""
    affinity_key: bytes = b""
    prefix_digests: tuple[int, ...] = ()
    seed: int = 0
    """Stands in for chance: the same seed chooses the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One candidate as a decision saw it."""

    model: str
    runner: str
    score: float
    """Of two the higher one is preferred."""
    gate: str = ""
    """What kept it from being chosen, in words; empty: nothing."""
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who was chosen, by which policy, and among whom."""

    candidate: Candidate
    policy: str
    score: float
    """Of the one that was chosen, against those of the others."""
    others: tuple[Considered, ...] = ()
    """In order of preference. Of many, as they were seen a moment ago; then the chosen one may be among them."""
    count: int = 1
    """How many there were."""

    @property
    def considered(self) -> tuple[Considered, ...]:
        """The chosen one and others, in order of preference, at most MAX_CONSIDERED. Put together for who reads it."""
        where = self.candidate
        chosen = Considered(model=where.model, runner=where.runner, score=self.score, chosen=True)
        others = [each for each in self.others if each.model != where.model]
        shown = SHOWN_OF_MANY if self.count > MAX_CONSIDERED else MAX_CONSIDERED
        return (chosen, *others[: shown - 1])

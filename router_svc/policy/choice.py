"""What is chosen among, and what was chosen: the words of every choice policy."""

from dataclasses import dataclass

from router_svc.policy.arrival import Needs
from router_svc.policy.candidates import Candidate
from router_svc.policy.grants import CandidateKey

MAX_CONSIDERED = 16
"""Candidates that a choice remembers by name; it counts the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request wants of the candidate that is chosen for it."""

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
    considered: tuple[Considered, ...] = ()
    """In order of preference, at most MAX_CONSIDERED."""
    count: int = 1
    """How many there were."""

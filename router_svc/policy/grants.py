"""Who holds how much of what: the requests in flight, by candidate and by runner."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from router_svc.policy.candidates import Candidate

CandidateKey = tuple[str, str, str]
RunnerKey = tuple[str, str]
_Key = TypeVar("_Key", CandidateKey, RunnerKey)


class GrantBook:
    """Counts what this router granted; a grant on an incarnation that is gone counts until its request ends."""

    def __init__(self) -> None:
        self._in_flight: Counter[CandidateKey] = Counter()
        self._on_runner: Counter[RunnerKey] = Counter()
        self._last_granted: dict[CandidateKey, float] = {}

    @property
    def total(self) -> int:
        """All requests in flight."""
        return self._in_flight.total()

    def take(self, candidate: Candidate, now: float) -> None:
        """A request goes there."""
        self._in_flight[candidate.key] += 1
        self._on_runner[_runner_key(candidate)] += 1
        self._last_granted[candidate.key] = now

    def release(self, candidate: Candidate) -> None:
        """A request that went there is over."""
        _count_down(self._in_flight, candidate.key)
        _count_down(self._on_runner, _runner_key(candidate))

    def in_flight(self, candidate: Candidate) -> int:
        """Requests on this candidate."""
        return self._in_flight[candidate.key]

    def on_runner(self, candidate: Candidate) -> int:
        """Requests on all models of its runner incarnation."""
        return self._on_runner[_runner_key(candidate)]

    def runner_has_room(self, candidate: Candidate) -> bool:
        """Whether its runner works on fewer requests than it takes over all its models."""
        return not candidate.runner_max_requests or self.on_runner(candidate) < candidate.runner_max_requests

    def last_granted(self, candidate: Candidate) -> float:
        """When a request last went there; minus infinity: never."""
        return self._last_granted.get(candidate.key, float("-inf"))

    def forget_others(self, alive: Iterable[CandidateKey]) -> None:
        """Drop the history of candidates that are gone; what is in flight stays counted."""
        known = self._last_granted
        self._last_granted = {key: known[key] for key in alive if key in known}


def _runner_key(candidate: Candidate) -> RunnerKey:
    return (candidate.runner, candidate.incarnation)


def _count_down(counter: Counter[_Key], key: _Key) -> None:
    assert counter[key] > 0, "only a granted slot can be given back"
    counter[key] -= 1
    if not counter[key]:
        del counter[key]

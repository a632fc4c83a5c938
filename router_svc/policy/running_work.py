"""What runs on each candidate, and when its slots come free as far as lengths and speeds are known."""

import heapq
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from router_svc.policy.candidates import Candidate
from router_svc.policy.estimates import Estimates
from router_svc.policy.waiting import LiveRequest

if TYPE_CHECKING:
    from router_svc.policy.grants import CandidateKey

MAX_SLOTS_LOOKED_AT = 64
"""Requests that run of which the end is estimated one by one; of more the others end like these."""
MAX_TURNS_STEPPED = 64
"""Requests ahead in the queue that are given the slot that comes free first; further ones are spread over all slots."""
OVERDUE_SHARE = 0.25
"""Of its estimated length: how much longer a request takes that took longer than that already."""


class RunningWork:
    """The requests that hold slots, by candidate."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self._running: dict[CandidateKey, dict[int, LiveRequest]] = {}

    def add(self, request: LiveRequest, candidate: Candidate) -> None:
        """The request runs there from now on."""
        self._running.setdefault(candidate.key, {})[request.key] = request

    def remove(self, request: LiveRequest, candidate: Candidate) -> None:
        """The request does not run there any more."""
        running = self._running[candidate.key]
        del running[request.key]
        if not running:
            del self._running[candidate.key]

    def wait_seconds(
        self, members: Collection[Candidate], all_slots: int, ahead: int, mean_tokens: float, now: float
    ) -> float | None:
        """How long until one of `all_slots`, which are busy, is free for a request with so many ahead of it.

        `members` have some of those slots and stand for all. `mean_tokens`: of the answers of those ahead. None: not
        known, because no answer of any member was measured.
        """
        speeds = [speed for member in members if (speed := self._estimates.speed(member)) is not None]
        if not speeds:
            return None
        service = sum(speed.seconds_of(mean_tokens) for speed in speeds) / len(speeds)
        slots = max(1, all_slots)
        ends = sorted(self._ends(members, now))
        if not ends:
            return ahead * service / slots
        stepped = min(ahead * len(ends) // max(slots, len(ends)), MAX_TURNS_STEPPED)
        for _ in range(stepped):
            heapq.heapreplace(ends, ends[0] + service)
        rest = max(0, ahead - stepped * max(1, slots // len(ends)))
        return ends[0] + rest * service / slots

    def _ends(self, members: Iterable[Candidate], now: float) -> Iterator[float]:
        """In how many seconds each running request ends."""
        seen = 0
        for member in members:
            speed = self._estimates.speed(member)
            for request in self._running.get(member.key, {}).values():
                if speed is None or seen == MAX_SLOTS_LOOKED_AT:
                    continue
                seen += 1
                arrival = request.arrival
                tokens = self._estimates.expected_tokens(member.pool, arrival.tenant, arrival.max_output_tokens)
                if request.content_at is None:
                    expected, elapsed = speed.seconds_of(tokens), now - request.placed_at
                else:
                    expected = speed.token_seconds * tokens
                    elapsed = now - request.content_at
                yield max(expected - elapsed, OVERDUE_SHARE * expected)

"""Failover of everything when one of many dies, and no storm of retries when all do; stepped through."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from index_harness import index, member, pick

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.retry import RetryBudget
from router_svc.policy.limits import SchedulerLimits
from weft.kernel.errors.failover import FailureKind

LINE = "p"
MAX_ATTEMPTS = SchedulerLimits().max_attempts
PER_SECOND = 10
ALLOWED = 1.2
"""Attempts per request in an outage of everybody."""
NO_PAUSES: dict[str, Any] = {"break_pause_seconds": 0.0, "eject_after_failures": 10**9, "outlier_min_requests": 10**9}
"""Nothing but the budget holds retries back."""


class NoBudget(RetryBudget):
    """Allows everything: what happens without one."""

    def allow(self, queue: str, candidate_is_clean: bool, now: float) -> bool:
        return True


@dataclass
class Told:
    """What became of the requests so far."""

    requests: int = 0
    attempts: int = 0
    served: int = 0
    refused: int = 0


@dataclass
class Steps:
    """Requests that arrive at a steady pace; each attempt ends at once, well or badly."""

    mesh: CandidateIndex
    budget: RetryBudget
    dead: set[str] = field(default_factory=set)
    now: float = 0.0

    def run(self, seconds: float, per_second: int) -> Told:
        told = Told()
        for _ in range(int(seconds * per_second)):
            self.now += 1 / per_second
            told.requests += 1
            self._serve(told)
        return told

    def _serve(self, told: Told) -> None:
        excluded: set[tuple[str, str, str]] = set()
        for attempt in range(MAX_ATTEMPTS):
            choice = self.mesh.choose(LINE, pick(excluded=frozenset(excluded)), self.now)
            if choice is None:
                break
            candidate = choice.candidate
            if attempt == 0:
                self.budget.note_first_attempt(LINE, self.now)
            elif not self.budget.allow(LINE, self.mesh.health.is_clean(candidate, self.now), self.now):
                break
            told.attempts += 1
            self.mesh.take(candidate)
            self.mesh.release(candidate)
            if candidate.model not in self.dead:
                self.mesh.health.note_content(candidate, self.now)
                told.served += 1
                return
            self.mesh.health.note_failure(candidate, FailureKind.BROKE, self.now)
            excluded.add(candidate.key)
        told.refused += 1


def steps(names: str, budget: type[RetryBudget] = RetryBudget, **limits: Any) -> Steps:
    mesh = index(*(member(name) for name in names), limits=limits)
    return Steps(mesh, budget(SchedulerLimits(**limits)))


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefgh"])
@pytest.mark.parametrize("pauses", [{}, NO_PAUSES])
def test_all_requests_fail_over_if_one_of_many_endpoints_dies(names: str, pauses: dict[str, Any]) -> None:
    run = steps(names, **pauses)
    run.run(20.0, PER_SECOND)
    run.dead = {"a"}
    told = run.run(60.0, PER_SECOND)
    assert told.served == told.requests == 60 * PER_SECOND
    if pauses:
        assert told.attempts >= told.requests * (1 + 0.9 / len(names)), "the dead one was not even tried"


@pytest.mark.parametrize("names", ["ab", "abcd", "abcdefghij"])
@pytest.mark.parametrize("pauses", [{}, NO_PAUSES])
def test_total_outage_is_not_amplified_by_retries(names: str, pauses: dict[str, Any]) -> None:
    run = steps(names, **pauses)
    before = run.run(20.0, PER_SECOND)
    assert before.attempts == before.served == before.requests
    run.dead = set(names)
    told = run.run(60.0, PER_SECOND)
    assert told.served == 0
    assert before.attempts + told.attempts <= ALLOWED * (before.requests + told.requests)
    saved_up = SchedulerLimits().max_retry_balance
    assert told.attempts <= ALLOWED * told.requests + saved_up
    assert told.attempts >= 60, "an outage in which nothing is tried would show nothing"


def test_outage_multiplies_attempts_without_the_budget() -> None:
    run = steps("abcd", NoBudget, **NO_PAUSES)
    run.dead = set("abcd")
    told = run.run(60.0, PER_SECOND)
    assert told.attempts > 2.9 * told.requests


def test_retries_allowed_for_free_are_charged_later() -> None:
    budget = RetryBudget(SchedulerLimits())
    for _ in range(30):
        assert budget.allow(LINE, True, 0.0)
    for _ in range(135):
        budget.note_first_attempt(LINE, 0.0)
        assert not budget.allow(LINE, False, 0.0)
    for _ in range(6):
        budget.note_first_attempt(LINE, 0.0)
    assert budget.allow(LINE, False, 0.0)
    assert not budget.allow(LINE, False, 0.0)


def test_retry_debt_is_bounded() -> None:
    budget = RetryBudget(SchedulerLimits(max_retry_debt=1.0))
    for _ in range(100):
        assert budget.allow(LINE, True, 0.0)
    for _ in range(11):
        budget.note_first_attempt(LINE, 0.0)
    assert budget.allow(LINE, False, 0.0)


def test_quiet_queue_has_a_replenished_reserve() -> None:
    budget = RetryBudget(SchedulerLimits())
    assert [budget.allow(LINE, False, 0.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.allow(LINE, False, 9.0)
    assert budget.allow(LINE, False, 10.0)
    assert [budget.allow(LINE, False, 1_000.0) for _ in range(4)] == [True, True, True, False]


def test_saved_budget_is_bounded() -> None:
    budget = RetryBudget(SchedulerLimits(max_retry_balance=5.0))
    for _ in range(1_000):
        budget.note_first_attempt(LINE, 0.0)
    assert [budget.allow(LINE, False, 0.0) for _ in range(6)] == [True] * 5 + [False]


def test_queues_do_not_share_their_budgets() -> None:
    budget = RetryBudget(SchedulerLimits())
    for _ in range(3):
        assert budget.allow("one", False, 0.0)
    assert not budget.allow("one", False, 0.0)
    assert budget.allow("other", False, 0.0)
    budget.forget("one")
    assert budget.allow("one", False, 0.0), "a line that is new has all of its reserve"

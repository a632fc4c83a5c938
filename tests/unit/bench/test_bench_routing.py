"""first_token beside a router that sees all caches and queues, in virtual time."""

import pytest

from bench.routing import Workload, outcome
from router_svc.policy.settings import ChoicePolicy

WORKLOADS = {
    "idle": (Workload(prefill_ms=0.1), 2),
    "loaded": (Workload(prefill_ms=0.4), 3),
    "unequal engines": (Workload(prefill_ms=0.4, unequal=True), 2),
    "full": (Workload(prefill_ms=0.4, sessions=160), 1),
}
"""Each with the number of seeds over which figures are averaged."""


@pytest.mark.slow("up to 1,280 requests, placed twice")
@pytest.mark.parametrize("name", WORKLOADS)
def test_time_to_first_token_is_close_to_that_of_an_omniscient_router(name: str) -> None:
    workload, seeds = WORKLOADS[name]
    sighted, found = (outcome(workload, policy, seeds) for policy in (None, ChoicePolicy.FIRST_TOKEN))
    assert found.p50 <= 1.3 * sighted.p50
    assert found.p95 <= 1.3 * sighted.p95
    assert found.cached_share >= 0.97 * sighted.cached_share


def test_comparison_detects_a_policy_that_ignores_caches() -> None:
    sighted, found = (
        outcome(Workload(prefill_ms=0.4, sessions=32, turns=4), policy, 1)
        for policy in (None, ChoicePolicy.LEAST_LOADED)
    )
    assert found.average > 2 * sighted.average
    assert found.cached_share < 0.97 * sighted.cached_share

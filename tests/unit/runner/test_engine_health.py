"""What the phases of a runner's engines mean for its health."""

import pytest

from runner_svc.policy.engine_health import engine_health
from runner_svc.policy.lifecycle import Phase
from weft.kernel.health import HealthState


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        ({}, ""),
        ({"a": Phase.READY}, ""),
        ({"a": Phase.HIBERNATING}, ""),
        ({"a": Phase.READY, "b": Phase.LOADING}, ""),
        ({"a": Phase.LOADING}, "no_engine_ready"),
        ({"a": Phase.CRASH_LOOP, "b": Phase.FAILED}, "no_engine_ready"),
        ({"a": Phase.READY, "b": Phase.FAILED}, "engine_failed"),
    ],
)
def test_runner_without_a_ready_or_hibernating_engine_is_degraded(phases: dict[str, Phase], reason: str) -> None:
    seen = engine_health(phases)
    assert seen.reason == reason
    assert seen.state is (HealthState.DEGRADED if reason else HealthState.OK)


def test_health_reason_lists_at_most_five_models() -> None:
    phases = {f"m{number}": Phase.FAILED for number in range(8)}
    assert engine_health(phases).message == "no engine runs: m0, m1, m2, m3, m4 and 3 more failed"

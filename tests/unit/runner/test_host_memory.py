"""The limit of the host's memory for an engine."""

import pytest

from runner_svc.policy.host_memory import BYTES_PER_PROCESSOR, MARGIN_BYTES, configured_limit, host_memory_limit
from runner_svc.policy.memory_estimate import GIBIBYTE, MEBIBYTE, EstimateSource, MemoryEstimate


def _estimate(size: int) -> MemoryEstimate:
    return MemoryEstimate(bytes=size, source=EstimateSource.HEADER)


@pytest.mark.parametrize(
    ("expected", "machine", "limit"),
    [
        (_estimate(GIBIBYTE), 24 * GIBIBYTE, 2 * GIBIBYTE + MARGIN_BYTES + 2 * BYTES_PER_PROCESSOR),
        (_estimate(GIBIBYTE), 3 * GIBIBYTE, 3 * GIBIBYTE),
        (_estimate(0), 3 * GIBIBYTE, 3 * GIBIBYTE),
        (None, 3 * GIBIBYTE, 3 * GIBIBYTE),
        (None, None, None),
    ],
)
def test_engine_memory_limit_is_its_estimate_plus_a_margin_and_below_the_machine_total(
    expected: MemoryEstimate | None, machine: int | None, limit: int | None
) -> None:
    assert host_memory_limit(expected, machine, processors=2) == limit


def test_model_setting_overrides_the_memory_limit_and_0_removes_it() -> None:
    assert configured_limit(None, GIBIBYTE) == GIBIBYTE
    assert configured_limit(10, GIBIBYTE) == 10 * MEBIBYTE
    assert configured_limit(0, GIBIBYTE) is None

"""When a runner that was taken out of the configuration is forgotten."""

import pytest

from registry_svc.mesh.domain import Standing
from registry_svc.mesh.policy.heartbeat import Retirement, decide_retirement


@pytest.mark.parametrize(
    ("standing", "reported", "process_ended", "lease_count", "outcome"),
    [
        (Standing.CLOSED, True, False, 0, Retirement.RETIRED),
        (Standing.SILENT, True, False, 0, Retirement.RETIRED),
        (Standing.ACTIVE, False, True, 0, Retirement.RETIRED),
        (Standing.ACTIVE, False, False, 0, Retirement.LIVES),
        (Standing.ACTIVE, True, True, 0, Retirement.LIVES),
        (Standing.ACTIVE, True, False, 1, Retirement.LIVES),
        (Standing.CLOSED, False, True, 1, Retirement.HOLDS_MEMORY),
        (Standing.ACTIVE, False, True, 1, Retirement.HOLDS_MEMORY),
    ],
    ids=[
        "closed",
        "silent",
        "killed, and its owner knows",
        "perhaps alive",
        "heard, whatever its owner says",
        "alive with memory",
        "closed, its memory still booked",
        "killed, its memory still booked",
    ],
)
def test_only_a_runner_without_process_and_leases_is_retired(
    standing: Standing, *, reported: bool, process_ended: bool, lease_count: int, outcome: Retirement
) -> None:
    decided = decide_retirement(
        standing=standing, reported=reported, process_ended=process_ended, lease_count=lease_count
    )
    assert decided is outcome

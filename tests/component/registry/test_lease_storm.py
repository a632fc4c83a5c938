"""A thousand loads, evictions, kills, freezes and restarts: nothing is booked twice, and nothing is left."""

from collections.abc import Callable
from typing import Any

import pytest
from lease_storm import Storm

from registry_svc.ledger import lease_table, reconciler
from registry_svc.ledger.policy.device_memory import host_account
from registry_svc.ledger.policy.leases import LeaseState
from weft.gpu.snapshot import Source

CYCLES = 1_000

# A few seconds each; many times that where the machine is shared.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.nightly("a storm of processes")
@pytest.mark.parametrize("source", [Source.NVML, Source.DECLARED])
async def test_a_thousand_cycles_never_double_book_and_leave_nothing(source: Source) -> None:
    storm = Storm(seed=3, source=source)
    await storm.run(CYCLES)
    assert storm.checks > CYCLES
    # It was a storm: everything that can happen did, and the book was of use.
    for event in ("kill", "freeze", "disk fails", "released", "cancel", "gave way"):
        assert storm.count[event] >= 10, (event, storm.count)
    for event in ("registry restarts", "registry dies"):
        assert storm.count[event] >= 5, (event, storm.count)
    assert storm.count["lost"] >= 1, storm.count
    assert len(storm.orphans) >= 10
    assert storm.count["granted"] >= 150, storm.count


@pytest.mark.slow("a storm")
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly("a storm of processes")) for seed in range(3, 8))]
)
async def test_shorter_storms_with_other_seeds_pass(seed: int) -> None:
    await Storm(seed=seed, source=Source.NVML if seed % 2 else Source.DECLARED).run(150)


def _over_when_given_up(lease: Any, *_: Any) -> bool:
    return lease.since is not None


def _never_over(*_: Any) -> bool:
    return False


def _without_orphans(snapshot: Any, leases: Any, margin: int) -> Any:
    return host_account(snapshot, [lease for lease in leases if lease.state is LeaseState.HELD], margin)


@pytest.mark.parametrize(
    ("module", "rule", "broken", "found"),
    [
        (reconciler, "is_over", _over_when_given_up, "filled twice"),
        # Found when the storm is over: the whole of it.
        pytest.param(
            reconciler, "is_over", _never_over, "a lease was left", marks=pytest.mark.nightly("a storm of processes")
        ),
        (lease_table, "host_account", _without_orphans, "booked twice"),
    ],
)
async def test_storm_detects_a_broken_rule(
    monkeypatch: pytest.MonkeyPatch, module: Any, rule: str, broken: Callable[..., Any], found: str
) -> None:
    monkeypatch.setattr(module, rule, broken)
    with pytest.raises(AssertionError, match=found):
        await Storm(seed=1, source=Source.DECLARED).run(CYCLES)

"""When a lease is orphaned, and when it is over."""

from typing import Any

import pytest
from ledger_values import GIB, ended, ended_but_listed, holding, lease, process, snapshot, unknown

from registry_svc.ledger.policy.leases import (
    Lease,
    LeaseState,
    is_forgotten,
    is_orphaned,
    is_over,
    orphaned,
    processes_after,
    read_back,
    released,
    renewed,
    watched,
    with_gone,
)
from weft.gpu.snapshot import HostSnapshot, Source

TOTAL = 24 * GIB
INTERVAL = 5.0


def given_up(*pids: int, **known: Any) -> Lease:
    return lease(1, processes=tuple(process(pid) for pid in pids), state=LeaseState.RELEASING, since=100.0, **known)


def silent(*pids: int, **known: Any) -> Lease:
    return lease(1, processes=tuple(process(pid) for pid in pids), state=LeaseState.ORPHANED, since=100.0, **known)


def over(given: Lease, seen: HostSnapshot, at: float = 101.0) -> bool:
    return is_over(with_gone(given, seen.processes), seen, at, INTERVAL)


def test_lease_is_orphaned_if_not_renewed_within_its_ttl() -> None:
    held = lease(1, renewed=100.0)
    assert not is_orphaned(held, 129.9, 30.0, 0.0)
    assert is_orphaned(held, 130.0, 30.0, 0.0)


def test_no_lease_is_orphaned_during_the_startup_grace() -> None:
    held = lease(1, renewed=100.0)
    assert not is_orphaned(held, 189.9, 30.0, 190.0)
    assert is_orphaned(held, 190.0, 30.0, 190.0)


def test_renewed_orphan_is_held_again() -> None:
    again = renewed(orphaned(lease(1), 100.0), 110.0)
    assert (again.state, again.since, again.renewed) == (LeaseState.HELD, None, 110.0)


def test_held_lease_never_ends() -> None:
    assert not is_over(lease(1, processes=(process(7),)), snapshot(TOTAL, processes=[ended(7)]), 1e6, INTERVAL)


@pytest.mark.parametrize("gone", [given_up, silent])
def test_lease_ends_when_its_processes_are_seen_to_have_exited(gone: Any) -> None:
    assert over(gone(7, 8), snapshot(TOTAL, processes=[ended(7), ended(8)]))
    assert not over(gone(7, 8), snapshot(TOTAL, processes=[ended(7), holding(8, (0, 1))]))
    assert not over(gone(7, 8), snapshot(TOTAL, processes=[ended(7)]))


def test_processes_seen_to_have_exited_earlier_stay_exited() -> None:
    once = with_gone(given_up(7, 8), [ended(7)])
    assert is_over(with_gone(once, [ended(8)]), snapshot(TOTAL, processes=[ended(8)]), 101.0, INTERVAL)


def test_lease_ends_when_its_processes_hold_no_memory() -> None:
    assert over(given_up(7), snapshot(TOTAL, processes=[holding(7)]))
    assert over(given_up(7), snapshot(TOTAL, processes=[holding(7, (0, 0))]))
    assert over(silent(7, filled=True), snapshot(TOTAL, processes=[holding(7)]))


@pytest.mark.parametrize("gone", [given_up, silent])
def test_memory_listed_under_an_exited_process_is_not_released_yet(gone: Any) -> None:
    still_listed = snapshot(TOTAL, processes=[ended_but_listed(7, (0, 1))])
    assert with_gone(gone(7), still_listed.processes).remaining == {process(7)}
    assert not over(gone(7), still_listed)
    assert over(gone(7), snapshot(TOTAL, processes=[ended_but_listed(7, (0, 0))]))


def test_process_of_a_silent_holder_may_still_fill_its_share() -> None:
    assert not over(silent(7, filled=False), snapshot(TOTAL, processes=[holding(7)]))


def test_process_with_unknown_memory_must_have_exited() -> None:
    assert not over(given_up(7), snapshot(TOTAL, processes=[unknown(7)]))
    assert over(given_up(7), snapshot(TOTAL, processes=[ended(7)]))


@pytest.mark.parametrize("source", [Source.DECLARED, Source.UNKNOWN])
def test_process_on_unobservable_devices_must_have_exited(source: Source) -> None:
    assert not over(given_up(7), snapshot(TOTAL, processes=[holding(7)], source=source))
    assert over(given_up(7), snapshot(TOTAL, processes=[ended(7)], source=source))


def test_earlier_snapshot_does_not_end_a_lease() -> None:
    seen = snapshot(TOTAL, processes=[ended(7)])
    assert not over(given_up(7), seen, at=99.0)
    assert not over(given_up(7), seen, at=100.0)
    assert over(given_up(7), seen, at=100.001)


def test_lease_without_named_processes_waits_for_one_renewal_interval() -> None:
    assert not over(given_up(), snapshot(TOTAL), at=104.9)
    assert over(given_up(), snapshot(TOTAL), at=105.0)


def test_silent_lease_is_forgotten_only_if_its_host_is_not_observed() -> None:
    assert not is_forgotten(silent(7), 199.0, last_seen=50.0, keep_seconds=100.0)
    assert is_forgotten(silent(7), 200.0, last_seen=50.0, keep_seconds=100.0)
    assert not is_forgotten(silent(7), 200.0, last_seen=150.0, keep_seconds=100.0)
    assert not is_forgotten(lease(1), 1e9, last_seen=0.0, keep_seconds=100.0)


def test_no_longer_listed_processes_count_until_seen_to_have_exited() -> None:
    held = lease(1, processes=(process(7), process(8)))
    assert processes_after(held, frozenset({process(9)})) == (process(7), process(8), process(9))
    seven_gone = with_gone(held, [ended(7)])
    assert processes_after(seven_gone, frozenset({process(9)})) == (process(8), process(9))


def test_next_snapshot_watches_processes_that_must_have_exited() -> None:
    replaced = lease(1, processes=(process(7), process(8)), named=frozenset({process(8)}))
    leases = [replaced, with_gone(given_up(1, 2), [ended(1)]), silent(3)]
    assert watched(leases) == [process(2), process(3), process(7)]


def test_restart_forgets_use_but_not_released_leases() -> None:
    before = released(lease(1, processes=(process(7),)), 10.0)
    after = read_back(before.grant, 500.0)
    assert (after.state, after.since, after.filled) == (LeaseState.RELEASING, 500.0, False)
    assert after.grant.processes == (process(7),)
    assert read_back(lease(2).grant, 500.0).state is LeaseState.HELD

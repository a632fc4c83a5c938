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


def test_a_lease_is_orphaned_when_it_was_not_renewed_for_its_time_to_live() -> None:
    held = lease(1, renewed=100.0)
    assert not is_orphaned(held, 129.9, 30.0, 0.0)
    assert is_orphaned(held, 130.0, 30.0, 0.0)


def test_no_lease_is_orphaned_before_the_grace_after_a_start_is_over() -> None:
    held = lease(1, renewed=100.0)
    assert not is_orphaned(held, 189.9, 30.0, 190.0)
    assert is_orphaned(held, 190.0, 30.0, 190.0)


def test_an_orphan_that_is_renewed_is_held_again() -> None:
    again = renewed(orphaned(lease(1), 100.0), 110.0)
    assert (again.state, again.since, again.renewed) == (LeaseState.HELD, None, 110.0)


def test_a_lease_that_is_held_is_never_over() -> None:
    assert not is_over(lease(1, processes=(process(7),)), snapshot(TOTAL, processes=[ended(7)]), 1e6, INTERVAL)


@pytest.mark.parametrize("gone", [given_up, silent])
def test_it_is_over_when_its_processes_are_seen_to_be_gone(gone: Any) -> None:
    assert over(gone(7, 8), snapshot(TOTAL, processes=[ended(7), ended(8)]))
    assert not over(gone(7, 8), snapshot(TOTAL, processes=[ended(7), holding(8, (0, 1))]))
    assert not over(gone(7, 8), snapshot(TOTAL, processes=[ended(7)]))


def test_processes_that_were_seen_to_be_gone_earlier_stay_gone() -> None:
    once = with_gone(given_up(7, 8), [ended(7)])
    assert is_over(with_gone(once, [ended(8)]), snapshot(TOTAL, processes=[ended(8)]), 101.0, INTERVAL)


def test_it_is_over_when_its_processes_hold_nothing_any_more() -> None:
    assert over(given_up(7), snapshot(TOTAL, processes=[holding(7)]))
    assert over(given_up(7), snapshot(TOTAL, processes=[holding(7, (0, 0))]))
    assert over(silent(7, filled=True), snapshot(TOTAL, processes=[holding(7)]))


@pytest.mark.parametrize("gone", [given_up, silent])
def test_memory_that_is_listed_under_a_process_that_has_ended_is_not_back_yet(gone: Any) -> None:
    still_listed = snapshot(TOTAL, processes=[ended_but_listed(7, (0, 1))])
    assert with_gone(gone(7), still_listed.processes).remaining == {process(7)}
    assert not over(gone(7), still_listed)
    assert over(gone(7), snapshot(TOTAL, processes=[ended_but_listed(7, (0, 0))]))


def test_a_silent_holders_process_that_never_filled_its_share_may_yet() -> None:
    assert not over(silent(7, filled=False), snapshot(TOTAL, processes=[holding(7)]))


def test_a_process_of_which_nobody_can_tell_what_it_holds_must_be_gone() -> None:
    assert not over(given_up(7), snapshot(TOTAL, processes=[unknown(7)]))
    assert over(given_up(7), snapshot(TOTAL, processes=[ended(7)]))


@pytest.mark.parametrize("source", [Source.DECLARED, Source.UNKNOWN])
def test_on_devices_that_cannot_be_looked_into_a_process_must_be_gone(source: Source) -> None:
    assert not over(given_up(7), snapshot(TOTAL, processes=[holding(7)], source=source))
    assert over(given_up(7), snapshot(TOTAL, processes=[ended(7)], source=source))


def test_a_sighting_from_before_says_nothing() -> None:
    seen = snapshot(TOTAL, processes=[ended(7)])
    assert not over(given_up(7), seen, at=99.0)
    assert not over(given_up(7), seen, at=100.0)
    assert over(given_up(7), seen, at=100.001)


def test_a_lease_whose_processes_nobody_named_waits_for_one_renew_interval() -> None:
    assert not over(given_up(), snapshot(TOTAL), at=104.9)
    assert over(given_up(), snapshot(TOTAL), at=105.0)


def test_a_lease_is_forgotten_only_when_nobody_looks_at_its_host() -> None:
    assert not is_forgotten(silent(7), 199.0, last_seen=50.0, keep_seconds=100.0)
    assert is_forgotten(silent(7), 200.0, last_seen=50.0, keep_seconds=100.0)
    assert not is_forgotten(silent(7), 200.0, last_seen=150.0, keep_seconds=100.0)
    assert not is_forgotten(lease(1), 1e9, last_seen=0.0, keep_seconds=100.0)


def test_processes_that_are_named_no_more_stay_until_they_are_seen_to_be_gone() -> None:
    held = lease(1, processes=(process(7), process(8)))
    assert processes_after(held, frozenset({process(9)})) == (process(7), process(8), process(9))
    seven_gone = with_gone(held, [ended(7)])
    assert processes_after(seven_gone, frozenset({process(9)})) == (process(8), process(9))


def test_the_next_sighting_is_asked_about_whoever_must_be_seen_to_be_gone() -> None:
    replaced = lease(1, processes=(process(7), process(8)), named=frozenset({process(8)}))
    leases = [replaced, with_gone(given_up(1, 2), [ended(1)]), silent(3)]
    assert watched(leases) == [process(2), process(3), process(7)]


def test_a_restart_forgets_use_but_not_that_a_lease_was_given_up() -> None:
    before = released(lease(1, processes=(process(7),)), 10.0)
    after = read_back(before.grant, 500.0)
    assert (after.state, after.since, after.filled) == (LeaseState.RELEASING, 500.0, False)
    assert after.grant.processes == (process(7),)
    assert read_back(lease(2).grant, 500.0).state is LeaseState.HELD

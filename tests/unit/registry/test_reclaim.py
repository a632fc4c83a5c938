"""Whom to ask to give way."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_values import GIB, MARGIN, lease, program, runner, snapshot, wish

from registry_svc.ledger.policy import device_memory
from registry_svc.ledger.policy.device_memory import choose, host_account, without
from registry_svc.ledger.policy.leases import Lease, LeaseState, MemoryRequest
from registry_svc.ledger.policy.reclaim import (
    REFUSAL_KEPT_SECONDS,
    EvictionAttempt,
    EvictionState,
    QueuePlan,
    Reclaim,
    next_victim,
    plan_queue,
)
from weft.kernel.requests.request_values import Priority

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def reclaim(*asks: EvictionAttempt, now: float = 100.0, seen: float = 100.0) -> Reclaim:
    by_lease = {ask.lease_id: ask for ask in asks}
    return Reclaim(attempts=by_lease, wait_seconds=2.0, look_seconds=5.0, seen=seen, now=now)


def victim(
    leases: Sequence[Lease], wanted: MemoryRequest, state: Reclaim | None = None, *, gpus: int = 1
) -> str | None:
    """On a host of devices with room for 10 GiB each."""
    account = host_account(snapshot(*[10 * GIB + MARGIN] * gpus), leases, MARGIN)
    usable = {index: account.devices[index] for index in sorted(wanted.devices_among(account.devices))}
    found = next_victim(wanted, usable, account, leases, state or reclaim())
    return None if found is None else found.grant.id


def half(number: int, **known: Any) -> Lease:
    """A model on half of device 0."""
    return lease(number, (0, 5 * GIB), **known)


def test_least_recently_used_model_is_evicted_first() -> None:
    assert victim([half(1, used=20), half(2, used=10)], wish(5 * GIB)) == "lease-2"


def test_lower_priority_is_evicted_before_a_less_recently_used_model() -> None:
    assert victim([half(1, used=0), half(2, used=99, priority=LOW)], wish(5 * GIB)) == "lease-2"


def test_never_used_model_is_evicted_before_a_used_one() -> None:
    assert victim([half(1, used=0), half(2, last_used_at=None)], wish(5 * GIB)) == "lease-2"


@pytest.mark.parametrize(
    "kept",
    [
        {"pinned": True},
        {"active_requests": 1},
        {"filled": False},
        {"priority": HIGH},
        {"state": LeaseState.ORPHANED, "since": 0.0},
        {"holder": program()},
    ],
)
def test_pinned_busy_loading_higher_priority_silent_and_program_leases_are_not_evicted(kept: dict[str, Any]) -> None:
    assert victim([half(1), half(2)], wish(10 * GIB)) == "lease-1"
    assert victim([half(1), half(2, **kept)], wish(10 * GIB)) is None


def test_drained_model_is_evicted_although_the_ledger_still_counts_active_requests() -> None:
    """Its runner says so with its next renewal, and every swap of a busy model took up to 5 s longer for that."""
    swap = wish(10 * GIB, priority=Priority.SYSTEM)
    assert victim([half(1), half(2, active_requests=1)], swap) == "lease-1"
    assert victim([half(2, active_requests=1)], swap) == "lease-2"
    assert victim([half(1, active_requests=1, used=0), half(2, used=99)], wish(5 * GIB, priority=Priority.SYSTEM)) == (
        "lease-2"
    ), "who does nothing by the book goes first"
    assert victim([half(2, active_requests=1)], wish(10 * GIB, priority=HIGH)) is None


def test_equal_priority_is_evicted() -> None:
    assert victim([half(1, priority=LOW), half(2)], wish(10 * GIB, priority=LOW)) is None
    assert victim([half(1, priority=LOW), half(2, priority=LOW)], wish(10 * GIB, priority=LOW)) == "lease-1"


def test_no_lease_is_evicted_if_eviction_would_not_free_enough_memory() -> None:
    assert victim([half(1), half(2, pinned=True)], wish(6 * GIB)) is None


def test_no_lease_is_evicted_if_memory_is_free() -> None:
    assert victim([half(1)], wish(5 * GIB)) is None


def test_lease_that_would_not_help_is_skipped_although_it_is_least_recently_used() -> None:
    small, large = lease(1, (0, GIB), used=0), lease(2, (1, 9 * GIB), used=50)
    assert victim([small, large], wish(10 * GIB, max_devices=1, device_indexes=frozenset({1})), gpus=2) == "lease-2"
    full = [small, lease(3, (0, 9 * GIB), used=99), large]
    assert victim(full, wish(9 * GIB + 1, max_devices=1), gpus=2) == "lease-2"


def test_only_requested_devices_count() -> None:
    leases = [lease(1, (0, 9 * GIB)), lease(2, (1, 9 * GIB), used=50)]
    assert victim(leases, wish(5 * GIB, device_indexes=frozenset({1})), gpus=2) == "lease-2"


def test_split_model_is_evicted_on_all_of_its_devices() -> None:
    leases = [lease(1, (0, 9 * GIB), (1, 9 * GIB))]
    assert victim(leases, wish(18 * GIB), gpus=2) == "lease-1"


def asked(state: EvictionState, at: float, number: int = 1) -> EvictionAttempt:
    return EvictionAttempt(lease_id=f"lease-{number}", state=state, at=at)


def test_leases_are_evicted_one_at_a_time() -> None:
    leases = [half(1), half(2)]
    assert victim(leases, wish(10 * GIB)) == "lease-1"
    assert victim(leases, wish(10 * GIB), reclaim(asked(EvictionState.PENDING, 99.9))) is None
    assert victim(leases, wish(10 * GIB), reclaim(asked(EvictionState.GIVEN_UP, 99.9))) is None


def test_eviction_on_another_device_does_not_block_this_one() -> None:
    leases = [lease(1, (0, 9 * GIB)), lease(2, (1, 9 * GIB))]
    pending = reclaim(asked(EvictionState.PENDING, 99.9))
    assert victim(leases, wish(9 * GIB, device_indexes=frozenset({1})), pending, gpus=2) == "lease-2"


def test_no_further_lease_is_evicted_while_enough_memory_is_being_released() -> None:
    going = half(1, state=LeaseState.RELEASING, since=98.5)
    assert victim([going, half(2)], wish(5 * GIB)) is None


def test_next_lease_is_evicted_if_memory_is_not_released_in_time() -> None:
    late = half(1, state=LeaseState.RELEASING, since=98.0)
    assert victim([late, half(2)], wish(5 * GIB)) == "lease-2"
    nobody_looked = reclaim(seen=97.0)
    assert victim([late, half(2)], wish(5 * GIB), nobody_looked) is None
    assert victim([late, half(2)], wish(5 * GIB), replace(nobody_looked, now=105.0)) == "lease-2"


def test_lease_that_agreed_but_kept_its_memory_is_skipped() -> None:
    leases = [half(1), half(2, used=50)]
    assert victim(leases, wish(5 * GIB), reclaim(asked(EvictionState.GIVEN_UP, 98.0))) == "lease-2"


def test_refused_eviction_moves_on_and_expires() -> None:
    leases = [half(1), half(2, used=50)]
    assert victim(leases, wish(5 * GIB), reclaim(asked(EvictionState.REFUSED, 99.0))) == "lease-2"
    assert (
        victim(leases, wish(5 * GIB), reclaim(asked(EvictionState.REFUSED, 100.0 - REFUSAL_KEPT_SECONDS))) == "lease-1"
    )


IDLE = st.builds(
    lambda number, index, size, used, priority, pinned, active: (number, index, size, used, priority, pinned, active),
    st.integers(1, 10_000),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 50),
    st.sampled_from(Priority),
    st.booleans(),
    st.integers(0, 1),
)


@given(
    st.lists(IDLE, max_size=12, unique_by=lambda each: each[0]),
    st.integers(1, 40),
    st.sampled_from(Priority),
    st.integers(0, 4),
)
def test_sequential_eviction_frees_enough_whenever_evicting_all_candidates_would(
    idle: list[tuple[int, int, int, int, Priority, bool, int]], size: int, priority: Priority, max_devices: int
) -> None:
    leases: list[Lease] = []
    for number, index, gib, used, of, pinned, active in idle:
        taken = sum(size for each in leases for at, size in each.grant.shares if at == index)
        if taken + gib * GIB <= 10 * GIB:
            known: dict[str, Any] = {"used": used, "priority": of, "pinned": pinned, "active_requests": active}
            leases.append(lease(number, (index, gib * GIB), holder=runner(f"r{number}"), **known))
    wanted = wish(size * GIB, priority=priority, max_devices=max_devices)
    account = host_account(snapshot(*[10 * GIB + MARGIN] * 4), leases, MARGIN)
    may = [
        each
        for each in leases
        if not each.pinned and (not each.active_requests or priority is Priority.SYSTEM) and each.priority >= priority
    ]
    emptied = without(account.devices, account, [each.grant.id for each in may])
    possible = choose(tuple(emptied.values()), wanted.size, max_devices) is not None
    remaining = list(leases)
    for _ in range(len(leases) + 1):
        account = host_account(snapshot(*[10 * GIB + MARGIN] * 4), remaining, MARGIN)
        if choose(tuple(account.devices.values()), wanted.size, max_devices) is not None:
            break
        found = next_victim(wanted, account.devices, account, remaining, reclaim())
        if found is None:
            break
        assert found in may
        remaining.remove(found)
    fits = choose(tuple(account.devices.values()), wanted.size, max_devices) is not None
    assert fits == possible
    if not possible:
        assert remaining == leases


def test_thousand_idle_models_are_each_removed_and_restored_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One joined runner may have so many, and while they are judged the registry does nothing else."""
    changes = 0
    change = device_memory.changed

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal changes
        changes += 1
        return change(*args, **kwargs)

    size = 10 * GIB // 1_000
    leases = [lease(number, (0, size), used=number) for number in range(1, 1_001)]
    account = host_account(snapshot(10 * GIB + MARGIN), leases, MARGIN)
    monkeypatch.setattr("registry_svc.ledger.policy.reclaim.changed", counted)
    found = next_victim(wish(10 * GIB), account.devices, account, leases, reclaim())
    assert found is not None
    assert found.grant.id == "lease-1"
    assert 1_000 <= changes <= 2_000


def plan(line: Sequence[MemoryRequest], *leases: Lease, gpus: int = 1) -> QueuePlan:
    """On devices with room for 10 GiB each."""
    account = host_account(snapshot(*[10 * GIB + MARGIN] * gpus), leases, MARGIN)
    reclaim = Reclaim(attempts={}, wait_seconds=2.0, look_seconds=5.0, seen=100.0, now=100.0)
    return plan_queue(account, leases, line, reclaim)


def granted(line: Sequence[MemoryRequest], *leases: Lease, gpus: int = 1) -> Mapping[int, tuple[tuple[int, int], ...]]:
    return {each.arrival: shares for each, shares in plan(line, *leases, gpus=gpus).grants}


def busy(number: int, index: int, size: int) -> Lease:
    return lease(number, (index, size), active_requests=1)


def only(index: int) -> frozenset[int]:
    return frozenset({index})


def test_last_gigabyte_is_granted_to_only_one_of_two_requests() -> None:
    assert set(granted([wish(GIB, 2), wish(GIB, 1)], busy(1, 0, 9 * GIB))) == {1}


def test_requests_are_granted_in_arrival_order_with_higher_priority_first() -> None:
    line = [wish(10 * GIB, 1), wish(10 * GIB, 2, priority=HIGH), wish(10 * GIB, 3, priority=LOW)]
    assert set(granted(line)) == {2}


def test_waiting_request_is_not_overtaken_by_a_smaller_one() -> None:
    assert granted([wish(8 * GIB, 1), wish(GIB, 2)], busy(1, 0, 5 * GIB)) == {}
    assert set(granted([wish(8 * GIB, 1), wish(GIB, 2, priority=HIGH)], busy(1, 0, 5 * GIB))) == {2}


def test_requests_for_other_devices_are_granted() -> None:
    line = [wish(8 * GIB, 1, device_indexes=only(0)), wish(GIB, 2)]
    assert granted(line, busy(1, 0, 5 * GIB), gpus=2) == {2: ((1, GIB),)}


def test_request_for_all_devices_is_overtaken_on_none() -> None:
    line = [wish(18 * GIB, 1), wish(GIB, 2, device_indexes=only(1))]
    assert granted(line, busy(1, 0, 5 * GIB), gpus=2) == {}


def test_several_requests_are_granted_together_if_they_fit() -> None:
    line = [wish(6 * GIB, 1), wish(6 * GIB, 2), wish(4 * GIB, 3), wish(5 * GIB, 4)]
    assert granted(line, gpus=2) == {1: ((0, 6 * GIB),), 2: ((1, 6 * GIB),), 3: ((0, 4 * GIB),)}


def test_only_the_first_request_in_line_triggers_evictions() -> None:
    idle = [lease(1, (0, 5 * GIB)), lease(2, (0, 5 * GIB), holder=runner("r2"))]
    asks = plan([wish(5 * GIB, 1), wish(5 * GIB, 2)], *idle).evictions
    assert [(each.arrival, victim.grant.id) for each, victim in asks] == [(1, "lease-1")]


def test_model_is_evicted_once_for_two_waiting_requests() -> None:
    split = lease(1, (0, 9 * GIB), (1, 9 * GIB))
    line = [wish(5 * GIB, 1, device_indexes=only(0)), wish(5 * GIB, 2, device_indexes=only(1))]
    assert [victim.grant.id for _, victim in plan(line, split, gpus=2).evictions] == ["lease-1"]


WISHES = st.lists(
    st.tuples(
        st.integers(1, 30), st.sampled_from(Priority), st.frozensets(st.integers(0, 3), max_size=3), st.integers(0, 4)
    ),
    max_size=10,
)


@given(WISHES, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10)), max_size=6))
def test_plan_overbooks_no_device_and_allows_no_overtaking(
    wished: list[tuple[int, Priority, frozenset[int], int]], there: list[tuple[int, int]]
) -> None:
    leases: list[Lease] = []
    for number, (index, size) in enumerate(there, start=1):
        taken = sum(share for each in leases for at, share in each.grant.shares if at == index)
        if taken + size * GIB <= 10 * GIB:
            leases.append(busy(number, index, size * GIB))
    line = [
        wish(size * GIB, number, priority=priority, device_indexes=indexes, max_devices=max_devices)
        for number, (size, priority, indexes, max_devices) in enumerate(wished, start=1)
    ]
    plan_ = plan(line, *leases, gpus=4)
    booked = dict.fromkeys(range(4), 0)
    for shares in [*(each.grant.shares for each in leases), *(shares for _, shares in plan_.grants)]:
        for index, size in shares:
            booked[index] += size
    assert all(size <= 10 * GIB for size in booked.values())
    served = {each.key: dict(shares) for each, shares in plan_.grants}
    for each in line:
        assert each.key not in served or sum(served[each.key].values()) == each.size
        assert each.key not in served or not each.device_indexes or served[each.key].keys() <= each.device_indexes
        if each.key in served:
            continue
        for other in line:
            if other.queue_key > each.queue_key and other.key in served:
                assert not (served[other.key].keys() & each.devices_among(range(4)))

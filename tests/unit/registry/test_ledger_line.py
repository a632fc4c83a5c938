"""Who gets memory first."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st
from ledger_values import GIB, MARGIN, lease, runner, snapshot, wish

from registry_svc.ledger.policy.device_memory import host_account
from registry_svc.ledger.policy.eviction import QueuePlan, Reclaim, plan_queue
from registry_svc.ledger.policy.leases import Lease, MemoryRequest
from weft.kernel.request import Priority

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


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
            if other.place > each.place and other.key in served:
                assert not (served[other.key].keys() & each.devices_among(range(4)))

"""What a device has left."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_values import (
    GIB,
    MARGIN,
    device,
    ended,
    ended_but_listed,
    holding,
    lease,
    process,
    snapshot,
    total_of,
    unknown,
)

from registry_svc.ledger.policy.device_memory import DeviceAccount, choose, host_account, largest_lease
from registry_svc.ledger.policy.leases import Lease, LeaseState
from weft.gpu.snapshot import HostSnapshot, Source

TOTAL = 24 * GIB


def first(seen: HostSnapshot, *leases: Lease, margin: int = MARGIN) -> DeviceAccount:
    return host_account(seen, leases, margin).devices[0]


def test_empty_device_has_all_memory_except_the_margin() -> None:
    assert first(snapshot(TOTAL)).free == TOTAL - MARGIN


@pytest.mark.parametrize("state", list(LeaseState))
def test_leased_memory_is_not_free_in_any_state(state: LeaseState) -> None:
    account = first(snapshot(TOTAL), lease(1, (0, 5 * GIB), state=state, since=0.0))
    assert account.booked == 5 * GIB
    assert account.free == TOTAL - MARGIN - 5 * GIB


def test_memory_of_processes_without_a_lease_is_not_free() -> None:
    account = first(snapshot(TOTAL, used=[3 * GIB], processes=[holding(7, (0, 3 * GIB))]))
    assert account.foreign == 3 * GIB
    assert account.free == TOTAL - MARGIN - 3 * GIB


def test_memory_of_a_leases_own_processes_is_not_counted_twice() -> None:
    seen = snapshot(TOTAL, used=[5 * GIB], processes=[holding(7, (0, 5 * GIB))])
    account = first(seen, lease(1, (0, 5 * GIB), processes=(process(7),)))
    assert account.foreign == 0
    assert account.free == TOTAL - MARGIN - 5 * GIB


def test_lease_using_more_than_booked_counts_with_its_actual_use() -> None:
    seen = snapshot(TOTAL, used=[9 * GIB], processes=[holding(7, (0, 6 * GIB)), holding(8, (0, 3 * GIB))])
    account = first(seen, lease(1, (0, 5 * GIB), processes=(process(7), process(8))))
    assert (account.booked, account.held, account.foreign) == (5 * GIB, 9 * GIB, 0)
    assert account.free == TOTAL - MARGIN - 9 * GIB


def test_memory_on_a_device_outside_the_lease_counts_there() -> None:
    seen = snapshot(TOTAL, TOTAL, used=[5 * GIB, GIB], processes=[holding(7, (0, 5 * GIB), (1, GIB))])
    account = host_account(seen, [lease(1, (0, 5 * GIB), processes=(process(7),))], MARGIN)
    assert account.devices[1].booked == 0
    assert account.devices[1].free == TOTAL - MARGIN - GIB


def test_driver_memory_is_taken_from_the_margin() -> None:
    assert first(snapshot(TOTAL, used=[MARGIN])).free == TOTAL - MARGIN
    account = first(snapshot(TOTAL, used=[MARGIN + GIB]))
    assert account.foreign == GIB
    assert account.free == TOTAL - MARGIN - GIB


def test_use_beyond_filled_leases_is_foreign_if_process_figures_are_unknown() -> None:
    seen = snapshot(TOTAL, used=[8 * GIB], processes=[unknown(7), unknown(8)])
    filled = lease(1, (0, 5 * GIB), processes=(process(7),))
    assert first(seen, filled).foreign == 3 * GIB
    loading = lease(1, (0, 5 * GIB), processes=(process(7),), filled=False)
    assert first(seen, loading).foreign == 8 * GIB
    assert first(snapshot(TOTAL, used=[GIB], processes=[unknown(7)]), filled).foreign == 0


def test_filled_lease_with_invisible_processes_accounts_for_its_share() -> None:
    # Inside of containers the library lists no processes, but tells what is in use.
    seen = snapshot(TOTAL, used=[6 * GIB])
    assert first(seen, lease(1, (0, 5 * GIB), processes=(process(7),))).foreign == GIB


def test_device_with_unknown_use_counts_by_booking_only() -> None:
    seen = snapshot(TOTAL, used=[None], processes=[holding(7, (0, 20 * GIB))], source=Source.DECLARED)
    account = host_account(seen, [lease(1, (0, 5 * GIB), processes=(process(7),))], MARGIN)
    assert account.devices[0].foreign is None
    assert account.devices[0].free == TOTAL - MARGIN - 5 * GIB
    assert account.seen == {"lease-1": None}


def test_ended_processes_hold_no_memory() -> None:
    account = host_account(snapshot(TOTAL, processes=[ended(7)]), [lease(1, processes=(process(7),))], MARGIN)
    assert account.seen == {"lease-1": 0}
    assert account.devices[0].held == GIB


def test_memory_listed_under_an_ended_process_is_still_held() -> None:
    seen = snapshot(TOTAL, used=[6 * GIB], processes=[ended_but_listed(7, (0, 5 * GIB)), ended_but_listed(8, (0, GIB))])
    account = host_account(seen, [lease(1, (0, GIB), processes=(process(7),))], MARGIN)
    assert account.seen == {"lease-1": 5 * GIB}
    assert account.devices[0].foreign == GIB
    assert account.devices[0].free == TOTAL - MARGIN - 6 * GIB


def test_device_smaller_than_its_margin_has_no_room() -> None:
    account = first(snapshot(MARGIN // 2))
    assert (account.capacity, account.free) == (0, 0)


def test_lease_on_a_removed_device_takes_nothing_from_the_others() -> None:
    assert first(snapshot(TOTAL), lease(1, (5, 9 * GIB))).free == TOTAL - MARGIN


SIZES = st.integers(0, 30)


@given(
    st.lists(st.tuples(SIZES, SIZES, st.booleans(), st.booleans()), max_size=5),
    st.lists(SIZES, max_size=3),
    st.one_of(st.none(), st.integers(0, 40)),
)
def test_room_never_exceeds_booked_or_observed_free_memory(
    leased: list[tuple[int, int, bool, bool]], strangers: list[int], used: int | None
) -> None:
    leases, processes = [], []
    for number, (booked, held, filled, is_unknown) in enumerate(leased, start=1):
        leases.append(lease(number, (0, booked), processes=(process(number),), filled=filled))
        processes.append(unknown(number) if is_unknown else holding(number, (0, held)))
    processes += [holding(100 + number, (0, held)) for number, held in enumerate(strangers)]
    seen = snapshot(40, used=[used], processes=processes)
    account = first(seen, *leases, margin=2)
    assert 0 <= account.free <= max(0, 38 - sum(booked for booked, *_ in leased))
    if used is not None:
        assert account.foreign is not None
        assert account.foreign >= sum(strangers)
        assert account.free <= max(0, 38 - sum(strangers) - sum(booked for booked, *_ in leased))
        if not any(is_unknown for *_, is_unknown in leased):
            # Even if each lease fills its share: what is in use already and not theirs stays, less the margin.
            own = sum(held for _, held, _, _ in leased)
            still_to_come = sum(max(0, booked - held) for booked, held, _, _ in leased)
            assert account.free <= max(0, 40 - max(used, own + sum(strangers)) - still_to_come)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=6), st.integers(0, 40))
def test_leasing_all_free_memory_never_overbooks(leased: list[tuple[int, bool]], used: int) -> None:
    leases: list[Any] = []
    seen = snapshot(40, used=[used])
    for number, (size, filled) in enumerate(leased, start=1):
        if first(seen, *leases, margin=2).free >= size:
            leases.append(lease(number, (0, size), filled=filled))
    assert sum(size for each in leases for _, size in each.grant.shares) <= 38


ROOMS = st.lists(st.integers(0, 100), min_size=0, max_size=8)


def devices(*rooms: int) -> list[DeviceAccount]:
    return [device(index, room) for index, room in enumerate(rooms)]


def test_fullest_device_that_fits_is_chosen() -> None:
    assert choose(devices(80, 30, 50), 30, 0) == ((1, 30),)
    assert choose(devices(80, 30, 50), 31, 0) == ((2, 31),)


def test_first_of_equally_full_devices_is_chosen() -> None:
    assert choose(devices(50, 50), 10, 0) == ((0, 10),)


def test_model_too_large_for_one_device_is_split_in_proportion_to_free_memory() -> None:
    assert choose(devices(60, 30), 45 + 30, 0) == ((0, 50), (1, 25))


def test_model_is_not_split_further_than_allowed() -> None:
    assert choose(devices(40, 40, 40), 100, 2) is None
    assert choose(devices(40, 40, 40), 80, 2) is not None
    assert choose(devices(40, 40), 41, 1) is None


def test_seventy_billion_model_is_split_over_an_eight_gpu_host_beside_existing_models() -> None:
    # Eight cards of 24 GiB; two of them hold other models.
    host = [
        device(index, 24 * GIB - MARGIN - taken, booked=taken)
        for index, taken in enumerate([0, 20 * GIB, 0, 8 * GIB] + [0] * 4)
    ]
    shares = choose(host, 150 * GIB, 0)
    assert total_of(shares) == 150 * GIB
    assert shares is not None
    assert [index for index, _ in shares] == [0, 2, 3, 4, 5, 6, 7]
    assert dict(shares)[3] < dict(shares)[0]
    assert all(size <= host[index].free for index, size in shares)


def test_host_maximum_excludes_margins_and_uses_the_largest_devices() -> None:
    host = [
        DeviceAccount(index=0, total=10 * GIB, margin=MARGIN, booked=9 * GIB),
        device(1, 20 * GIB),
        device(2, 5 * GIB),
    ]
    assert largest_lease(host, 1) == 20 * GIB
    assert largest_lease(host, 2) == 20 * GIB + 10 * GIB - MARGIN
    assert largest_lease(host, 0) == 20 * GIB + 10 * GIB - MARGIN + 5 * GIB
    assert largest_lease([], 0) == 0


@given(ROOMS, st.integers(1, 800), st.integers(0, 8))
def test_shares_add_up_to_the_request_and_fit(rooms: list[int], size: int, max_devices: int) -> None:
    host = devices(*rooms)
    shares = choose(host, size, max_devices)
    room = sum(sorted(rooms, reverse=True)[: max_devices or len(rooms)])
    assert (shares is not None) == (size <= room)
    if shares is None:
        return
    assert total_of(shares) == size
    assert [index for index, _ in shares] == sorted({index for index, _ in shares})
    assert all(0 < share <= rooms[index] for index, share in shares)
    fewest = next(count for count in range(1, len(rooms) + 1) if sum(sorted(rooms, reverse=True)[:count]) >= size)
    assert len(shares) == fewest


@given(ROOMS, st.integers(1, 800))
def test_shares_are_proportional_up_to_rounding(rooms: list[int], size: int) -> None:
    shares = choose(devices(*rooms), size, 0)
    if shares is None or len(shares) == 1:
        return
    room = sum(rooms[index] for index, _ in shares)
    assert all(abs(share - size * rooms[index] / room) <= 1 for index, share in shares)

"""On which devices a lease goes."""

from hypothesis import given
from hypothesis import strategies as st
from ledger_values import GIB, MARGIN, device, total_of

from registry_svc.ledger.policy.device_memory import DeviceAccount, choose, largest_lease

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

"""Consistent-hash rings: who owns what, and how little changes when members do."""

from collections import Counter

from router_svc.policy.endpoints.hash_ring import POINTS_PER_MEMBER, Ring, mix

NAMES = [f"runner-{number}" for number in range(20)]
KEYS = [mix(number) for number in range(4_000)]


def ring(names: list[str]) -> Ring:
    made = Ring()
    for name in names:
        made.add(name)
    return made


def owner(made: Ring, key: int) -> str:
    return next(made.walk(key, 1))


def test_an_empty_ring_has_no_owners() -> None:
    assert list(Ring().walk(5, 3)) == []


def test_a_walk_yields_each_member_once_and_no_more_than_requested() -> None:
    made = ring(NAMES)
    assert len(set(made.walk(KEYS[0], 7))) == 7
    assert sorted(made.walk(KEYS[0], 100)) == sorted(NAMES)


def test_owners_do_not_depend_on_the_order_in_which_members_came() -> None:
    forward, backward = ring(NAMES), ring(NAMES[::-1])
    assert [owner(forward, key) for key in KEYS] == [owner(backward, key) for key in KEYS]


def test_all_members_own_about_as_much() -> None:
    made = ring(NAMES)
    counts = Counter(owner(made, key) for key in KEYS)
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 2.5 * len(KEYS) / len(NAMES)


def test_one_that_leaves_gives_away_only_what_it_owned_and_gets_it_back() -> None:
    made = ring(NAMES)
    before = [owner(made, key) for key in KEYS]
    made.remove(NAMES[3])
    without = [owner(made, key) for key in KEYS]
    assert NAMES[3] not in without
    assert all(now == was for was, now in zip(before, without, strict=True) if was != NAMES[3])
    made.add(NAMES[3])
    assert [owner(made, key) for key in KEYS] == before


def test_points_of_those_who_left_are_swept_away() -> None:
    made = ring(NAMES)
    for number in range(1_000):
        made.add(f"passing-{number}")
        assert owner(made, KEYS[number])
        made.remove(f"passing-{number}")
    assert len(made._hashes) <= 3 * POINTS_PER_MEMBER * (len(NAMES) + 1)
    assert {owner(made, key) for key in KEYS} == set(NAMES)


def test_a_ring_with_a_history_is_the_same_as_a_new_one() -> None:
    made = ring(NAMES)
    for number in range(100):
        made.add(f"passing-{number}")
    for number in range(100):
        made.remove(f"passing-{number}")
    fresh = ring(NAMES)
    assert [owner(made, key) for key in KEYS] == [owner(fresh, key) for key in KEYS]

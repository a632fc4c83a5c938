"""The order of waiting requests of a class: tenants by account and turn, within a tenant by deadline and arrival."""

import math
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from router_svc.policy.queue.fair_queue import FairQueue, SortedPositions
from router_svc.policy.router_request import QueuePosition


def queue_position(key: int, arrived_at: float, deadline_at: float | None) -> QueuePosition:
    return (inf if deadline_at is None else deadline_at, arrived_at, key)


class Desk:
    """A queue with accounts and caps that can be set by hand."""

    def __init__(self, **accounts: float) -> None:
        self.accounts = {"a": 0.0, "b": 0.0, "c": 0.0, **accounts}
        self.capped: set[str] = set()
        self.turns = {"a": 1, "b": 2, "c": 3}
        self.queue = FairQueue(self.standing, lambda tenant: tenant not in self.capped)

    def standing(self, tenant: str) -> tuple[float, int]:
        return self.accounts[tenant], self.turns[tenant]

    def add(self, key: int, tenant: str, deadline_at: float | None = None, arrived_at: float = 0.0) -> None:
        self.queue.add(tenant, queue_position(key, arrived_at, deadline_at))

    def take(self, cost: float = 1.0) -> int | None:
        turn = self.queue.head()
        if turn is None:
            return None
        self.queue.remove(turn.tenant, turn.queue_key)
        self.accounts[turn.tenant] += cost
        self.turns[turn.tenant] = max(self.turns.values()) + 1
        return turn.key


def test_tenant_at_its_running_cap_is_skipped_and_returns() -> None:
    desk = Desk()
    desk.add(1, "a")
    desk.add(2, "b")
    desk.capped = {"a"}
    assert [desk.take(), desk.take()] == [2, None]
    desk.capped = set()
    assert desk.take() is None, "nobody said so yet"
    desk.queue.reactivate("a")
    assert desk.take() == 1


def test_new_first_request_of_a_skipped_tenant_waits_too() -> None:
    desk = Desk()
    desk.add(1, "a", arrived_at=5.0)
    desk.capped = {"a"}
    assert desk.take() is None
    desk.add(2, "a", arrived_at=1.0)
    assert desk.take() is None
    desk.capped = set()
    desk.queue.reactivate("a")
    assert desk.take() == 2


def test_tenant_whose_newest_request_goes_first_causes_no_extra_lookups() -> None:
    looks: list[str] = []
    desk = Desk()

    def standing_of(tenant: str) -> tuple[float, int]:
        looks.append(tenant)
        return desk.standing(tenant)

    desk.queue.standing_of = standing_of
    for key in range(200):
        desk.add(key, "a", deadline_at=1000.0 - key)
    for _ in range(100):
        desk.take()
    looks.clear()
    desk.take()
    assert len(looks) <= 2, "once as it was entered, once as it is now"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from((None, 5.0, 9.0)), st.floats(0, 20)),
            st.tuples(st.just("take"), st.just(""), st.none(), st.floats(0, 7)),
            st.tuples(st.just("drop"), st.just(""), st.none(), st.floats(0, 1)),
        ),
        max_size=120,
    )
)
def test_next_request_is_of_the_lowest_account_then_the_first_turn_then_the_first_position(
    steps: list[tuple[str, str, float | None, float]],
) -> None:
    desk = Desk()
    waiting: dict[int, tuple[str, tuple[float, float, int]]] = {}
    for key, (step, tenant, deadline, figure) in enumerate(steps):
        if step == "add":
            desk.add(key, tenant, deadline, figure)
            waiting[key] = (tenant, queue_position(key, figure, deadline))
        elif step == "drop" and waiting:
            gone = sorted(waiting)[int(figure * (len(waiting) - 1))]
            desk.queue.remove(*waiting.pop(gone))
        elif step == "take":
            expected = (
                min((*desk.standing(tenant), place) for tenant, place in waiting.values())[2][2] if waiting else None
            )
            first_of = {tenant: min(p for t, p in waiting.values() if t == tenant) for tenant, _ in waiting.values()}
            assert desk.take(figure) == expected
            if expected is not None:
                whose, place = waiting.pop(expected)
                assert place == first_of[whose]
        assert desk.queue.waiting == len(waiting)
        for owner, place in waiting.values():
            own = [other for whose, other in waiting.values() if whose == owner]
            assert desk.queue.ahead_of(owner, place) == sum(other < place for other in own)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=300))
def test_positions_stay_sorted_after_removals_from_the_front(steps: list[tuple[bool, int]]) -> None:
    places = SortedPositions()
    model: list[tuple[float, float, int]] = []
    for key, (is_add, figure) in enumerate(steps):
        if is_add or not model:
            model.append((math.inf, float(figure), key))
            model.sort()
            places.add((math.inf, float(figure), key))
        else:
            gone = model.pop(0 if figure % 3 else figure % len(model))
            places.remove(gone)
        assert len(places) == len(model)
        assert [place[2] for place in model] == places.request_keys()
        assert not model or (places.first, places.last) == (model[0], model[-1])

"""Accounts of fair share over a restart: who was served how much is known, and counts the less the older it is."""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_svc.policy.queue.fair_share import FairShare, KeptAccount, aged

MEMORY = 600.0
TENANTS = ("a", "b", "c", "d")
AMOUNTS = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)
ACCOUNTS = st.dictionaries(st.sampled_from(TENANTS), st.tuples(AMOUNTS, st.booleans()), min_size=1).map(
    lambda found: [KeptAccount(tenant=name, tokens=t, is_active=active) for name, (t, active) in found.items()]
)


def shares(weights: Mapping[str, float] | None = None, *, max_remembered: int = 100) -> FairShare:
    known = weights or {}
    return FairShare(lambda tenant: known.get(tenant, 1.0), max_lag=1e9, max_remembered=max_remembered)


def tokens(accounts: Sequence[KeptAccount]) -> dict[str, float]:
    return {each.tenant: each.tokens for each in accounts}


def next_served(book: FairShare) -> str:
    """Who is served next: the lowest account."""
    return min(sorted(book.active), key=book.account)


def serve(book: FairShare, count: int, cost: float = 100.0) -> list[str]:
    """Serves the lowest account again and again; who it was each time."""
    served = []
    for _ in range(count):
        served.append(next_served(book))
        book.charge(served[-1], cost)
    return served


@given(accounts=ACCOUNTS)
def test_account_differences_are_preserved_immediately_after_a_stop(accounts: Sequence[KeptAccount]) -> None:
    active = [each for each in accounts if each.is_active] or list(accounts)
    lowest = min(each.tokens for each in active)
    assert tokens(aged(accounts, 0.0, MEMORY)) == {each.tenant: max(0.0, each.tokens - lowest) for each in accounts}


@given(accounts=ACCOUNTS, one=st.floats(0.0, 2 * MEMORY), more=st.floats(0.0, 2 * MEMORY))
def test_accounts_shrink_with_age_keep_their_order_and_become_equal(
    accounts: Sequence[KeptAccount], one: float, more: float
) -> None:
    young, old = tokens(aged(accounts, one, MEMORY)), tokens(aged(accounts, one + more, MEMORY))
    assert all(0.0 <= old[name] <= young[name] for name in young)
    for first in young:
        for second in young:
            assert young[first] > young[second] or old[first] <= old[second] + 1e-6
    assert set(tokens(aged(accounts, MEMORY, MEMORY)).values()) == {0.0}


def test_clock_set_back_increases_no_difference() -> None:
    accounts = [KeptAccount(tenant="a", tokens=5.0, is_active=True), KeptAccount(tenant="b", tokens=9.0)]
    assert tokens(aged(accounts, -1e6, MEMORY)) == {"a": 0.0, "b": 4.0}


def test_empty_accounts_age_to_empty() -> None:
    assert aged([], 1.0, MEMORY) == []


@given(seed=st.integers(0, 10**6), order=st.permutations(TENANTS))
def test_restart_does_not_change_who_is_served_next(seed: int, order: Sequence[str]) -> None:
    """The same book with and without a restart in between, in whatever order the tenants come back."""
    chance, weights = random.Random(seed), {"b": 2.0, "c": 0.5}
    book = shares(weights)
    for tenant in TENANTS:
        book.enter(tenant)
    for _ in range(40):
        tenant = chance.choice(TENANTS)
        book.charge(tenant, chance.randrange(1, 5_000))
    again = shares(weights)
    again.restore(aged(book.take_changed(), 0.0, MEMORY))
    for tenant in order:
        again.enter(tenant)
    assert serve(again, 50) == serve(book, 50)


def test_most_served_tenant_is_served_first_again_without_a_restore() -> None:
    """What the property would not see if `restore` did nothing."""
    book = shares()
    for tenant in ("a", "b"):
        book.enter(tenant)
    book.charge("a", 5_000.0)
    forgetful = shares()
    for tenant in ("a", "b"):
        forgetful.enter(tenant)
    assert serve(book, 10) == ["b"] * 10
    assert serve(forgetful, 10).count("a") == 5


def test_tenant_returning_too_late_starts_like_any_other() -> None:
    kept = [
        KeptAccount(tenant="a", tokens=900.0, is_active=True),
        KeptAccount(tenant="b", tokens=0.0, is_active=True),
    ]
    in_time, late = shares(), shares()
    for book in (in_time, late):
        book.restore(kept)
        book.enter("a")
    late.end_return()
    for book in (in_time, late):
        book.enter("b")
    assert (in_time.account("b"), late.account("b")) == (0.0, 900.0)


def test_tenant_without_requests_at_the_stop_is_owed_nothing_afterwards() -> None:
    kept = [KeptAccount(tenant="a", tokens=900.0, is_active=True), KeptAccount(tenant="b", tokens=0.0)]
    book = shares()
    book.restore(aged(kept, 0.0, MEMORY))
    book.enter("a")
    book.enter("b")
    assert book.account("a") == book.account("b")


def test_new_tenant_after_a_restart_is_not_ahead_of_waiting_ones() -> None:
    kept = [
        KeptAccount(tenant="a", tokens=7_000.0, is_active=True),
        KeptAccount(tenant="b", tokens=6_000.0, is_active=True),
    ]
    book = shares()
    book.restore(aged(kept, 0.0, MEMORY))
    for tenant in ("new", "a", "b"):
        book.enter(tenant)
    assert (book.account("new"), book.account("b"), book.account("a")) == (0.0, 0.0, 1_000.0)


def test_only_changed_accounts_are_saved_and_all_of_them_after_a_restore() -> None:
    book = shares({"b": 2.0})
    for tenant in ("a", "b"):
        book.enter(tenant)
    book.charge("b", 100.0)
    first = book.take_changed()
    assert [(each.tenant, each.tokens, each.mean_cost_tokens, each.is_active) for each in first] == [
        ("a", 0.0, None, True),
        ("b", 50.0, 100.0, True),
    ]
    assert not book.take_changed()
    book.leave("a")
    assert [(each.tenant, each.is_active) for each in book.take_changed()] == [("a", False)]
    book.give_back(first)
    assert [each.tenant for each in book.take_changed()] == ["a", "b"]
    again = shares({"b": 2.0})
    again.restore(first)
    assert again.take_changed() == first


def test_lowest_accounts_beyond_the_bound_are_dropped() -> None:
    kept = [KeptAccount(tenant=f"t-{number}", tokens=float(number)) for number in range(5)]
    book = shares(max_remembered=2)
    book.restore(kept)
    assert {each.tenant for each in book.take_changed()} == {"t-3", "t-4"}
    for tenant in ("x", "y"):
        book.enter(tenant)
        book.leave(tenant)
    assert {each.tenant for each in book.take_changed()} == {"x", "y"}


def test_mean_cost_is_stored_in_tokens_independent_of_the_current_weight() -> None:
    book = shares({"a": 4.0})
    book.restore([KeptAccount(tenant="a", tokens=0.0, mean_cost_tokens=100.0)])
    book.enter("a")
    assert book.active["a"].mean_cost == pytest.approx(25.0)

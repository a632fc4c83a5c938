"""Accounts of tenants: bounded credit, bounded debt, corrected estimates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_svc.policy.queue.fair_share import MIN_COST, FairShare


def shares(max_lag: float = 1e9, max_remembered: int = 100, **weights: float) -> FairShare:
    return FairShare(lambda tenant: weights.get(tenant, 1.0), max_lag=max_lag, max_remembered=max_remembered)


def test_tenant_with_twice_the_weight_is_charged_half() -> None:
    book = shares(big=2.0)
    for tenant in ("big", "small"):
        book.enter(tenant)
    for tenant in ("big", "small"):
        book.charge(tenant, 100.0)
    assert (book.account("big"), book.account("small")) == (50.0, 100.0)


def test_overcharge_is_deducted_from_the_next_charges() -> None:
    book = shares()
    book.enter("a")
    charged = book.charge("a", 100.0)
    book.correct("a", charged, 20.0)
    assert book.account("a") == 100.0
    book.charge("a", 100.0)
    assert book.account("a") == 120.0


def test_undercharge_is_added_to_the_next_charges() -> None:
    book = shares()
    book.enter("a")
    charged = book.charge("a", 100.0)
    book.correct("a", charged, 250.0)
    for _ in range(2):
        book.charge("a", 100.0)
    assert book.account("a") == 100.0 + 100.0 + 100.0 + 150.0


def test_unserved_request_costs_nothing() -> None:
    book = shares()
    book.enter("a")
    book.correct("a", book.charge("a", 100.0), 0.0)
    book.charge("a", 100.0)
    assert book.account("a") == 100.0


def test_requests_of_unknown_cost_still_advance_the_account() -> None:
    book = shares()
    book.enter("a")
    book.charge("a", 0.0)
    assert book.account("a") == MIN_COST


def test_number_of_remembered_inactive_tenants_is_bounded() -> None:
    book = shares(max_remembered=2)
    for tenant in ("first", "second", "third"):
        book.enter(tenant)
        book.charge(tenant, 700.0)
        book.leave(tenant)
    for tenant in ("first", "third"):
        book.enter(tenant)
    assert book.account("first") == 0.0
    assert book.account("third") == 700.0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(("enter", "leave", "charge")), st.floats(0, 500))))
def test_active_accounts_only_increase_and_stay_within_the_lag(steps: list[tuple[str, str, float]]) -> None:
    book, live = shares(max_lag=1000.0), dict.fromkeys("abcd", 0)
    known: dict[str, float] = {}
    for tenant, step, tokens in steps:
        if step == "enter":
            book.enter(tenant)
            live[tenant] += 1
        elif live[tenant] and step == "leave":
            book.leave(tenant)
            live[tenant] -= 1
        elif live[tenant]:
            book.correct(tenant, book.charge(tenant, tokens), tokens / 2)
        now = {name: book.account(name) for name, count in live.items() if count}
        assert all(now[name] >= known.get(name, 0.0) for name in now), "an account fell"
        assert not now or min(now.values()) >= max(now.values()) - 1000.0 - 1e-6, "somebody lags too far behind"
        known |= now


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_tenants_are_served_in_proportion_to_their_weights_over_time(weight: float) -> None:
    book = shares(heavy=weight)
    served = {"heavy": 0.0, "light": 0.0}
    for tenant in served:
        book.enter(tenant)
    for _ in range(4000):
        tenant = min(served, key=book.account)
        book.correct(tenant, book.charge(tenant, 100.0), 40.0)
        served[tenant] += 40.0
    assert served["heavy"] / served["light"] == pytest.approx(weight, rel=0.01)


def test_tenant_leaving_after_each_request_pays_for_use_beyond_the_estimate() -> None:
    """Its debt was forgiven with each return, so that a caller with one request at a time paid estimates only."""
    book = shares()
    book.enter("stays")
    for _ in range(10):
        book.charge("stays", 500.0)
        book.enter("comes and goes")
        charged = book.charge("comes and goes", 100.0)
        book.correct("comes and goes", charged, 1000.0)
        book.leave("comes and goes")
    book.enter("comes and goes")
    assert book.account("comes and goes") == 500.0 + 10 * 1000.0


def test_no_tenant_returns_below_the_lowest_active_account() -> None:
    book = shares()
    book.enter("stays")
    book.charge("stays", 700.0)
    book.enter("away")
    charged = book.charge("away", 1000.0)
    book.correct("away", charged, 0.0)
    book.leave("away")
    book.charge("stays", 500.0)
    book.enter("away")
    book.charge("away", 100.0)
    assert book.account("away") - book.account("stays") <= 1000.0 + 100.0 - 500.0
    for _ in range(20):
        book.charge("away", 100.0)
    assert book.account("away") == 1200.0 + 21 * 100.0, "from the lowest account on it pays for all"


def test_debt_of_an_absent_tenant_expires_once_the_others_catch_up() -> None:
    book = shares()
    book.enter("stays")
    book.enter("away")
    book.correct("away", book.charge("away", 100.0), 1000.0)
    book.leave("away")
    book.charge("stays", 5000.0)
    book.enter("away")
    assert book.account("away") == 5000.0

"""Who agreed, when a token is good, and how old it may be: pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry_svc.operations.policy.governance import (
    CLOCK_SET_BACK_SECONDS,
    Marks,
    Quorum,
    Verified,
    agreed,
    fault_in_age,
    fault_in_agreement,
    fault_in_time,
    marks_at_start,
    nonce_kept_until,
)

ROLL = Quorum(counted=frozenset({"alice", "bob", "carol"}), revoked=frozenset({"eve"}), required=2)
NOW = 1_800_000_000.0
LIFETIME, SKEW = 300.0, 30.0
MARGIN = LIFETIME + 2 * SKEW


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _validity(issued: float = 0.0, starts: float | None = None, ends: float = 300.0) -> Verified:
    """Seconds from NOW."""
    begin = issued if starts is None else starts
    return Verified(signers=(), nonce="", issued_at=NOW + issued, not_before=NOW + begin, expires_at=NOW + ends)


def test_sufficient_signers_are_accepted() -> None:
    assert fault_in_agreement(["bob", "alice"], ROLL) is None
    assert agreed(["bob", "alice", "eve", "nobody"], ROLL) == ("alice", "bob")


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ([], "0 of 2 signers agreed"),
        (["alice"], "1 of 2 signers agreed"),
        (["alice", "alice"], "1 of 2 signers agreed"),
        (["alice", "eve"], "1 of 2 signers agreed; revoked: eve"),
        (["alice", "nobody", "x"], "1 of 2 signers agreed; unknown: 2"),
    ],
)
def test_only_eligible_signers_count_and_only_once(named: list[str], why: str) -> None:
    assert fault_in_agreement(named, ROLL) == why


def test_unknown_signers_in_a_token_are_not_echoed() -> None:
    assert "<script>" not in str(fault_in_agreement(["<script>"], ROLL))


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        (_validity(), None),
        (_validity(issued=-299, ends=1), None),
        (_validity(issued=-300, ends=0), "it expired"),
        (_validity(issued=-301, ends=-1), "it expired"),
        (_validity(issued=SKEW, ends=SKEW + 300), None),
        (_validity(issued=SKEW + 1, ends=SKEW + 301), "it was issued in the future"),
        (_validity(starts=SKEW), None),
        (_validity(starts=SKEW + 1), "it is not valid yet"),
        (_validity(ends=301), "it is valid for longer than 300 s"),
        (_validity(ends=0), "it expires before it becomes valid"),
        (_validity(starts=200, ends=100), "it expires before it becomes valid"),
    ],
)
def test_token_is_valid_only_within_its_lifetime(token: Verified, fault: str | None) -> None:
    assert fault_in_time(token, NOW, lifetime=LIFETIME, skew=SKEW) == fault


def test_new_registry_refuses_tokens_from_before_its_start() -> None:
    marks = marks_at_start(None, None, started_at=NOW + 0.7, skew=SKEW)
    assert fault_in_age(NOW - 1, marks, lifetime=LIFETIME, skew=SKEW) is not None
    assert fault_in_age(NOW, marks, lifetime=LIFETIME, skew=SKEW) is None


def test_restart_with_its_witness_keeps_the_marks() -> None:
    witnessed = Marks(newest_microseconds=_us(NOW), floor=NOW - 1000)
    assert marks_at_start(_us(NOW), witnessed, started_at=NOW + 5, skew=SKEW) == witnessed


def test_out_of_order_tokens_are_accepted_within_a_token_lifetime() -> None:
    marks = Marks(newest_microseconds=_us(NOW), floor=0.0)
    assert fault_in_age(NOW - 60, marks, lifetime=LIFETIME, skew=SKEW) is None
    assert fault_in_age(NOW - MARGIN, marks, lifetime=LIFETIME, skew=SKEW) is None
    assert fault_in_age(NOW - MARGIN - 1, marks, lifetime=LIFETIME, skew=SKEW) is not None


@pytest.mark.parametrize("stored", [None, 1_799_999_000_000_000, 1_799_999_999_999_999])
def test_restored_database_refuses_all_tokens_that_may_have_been_used(stored: int | None) -> None:
    marks = marks_at_start(stored, Marks(newest_microseconds=_us(NOW)), started_at=NOW + 5, skew=SKEW)
    assert fault_in_age(NOW, marks, lifetime=LIFETIME, skew=SKEW) is not None
    assert fault_in_age(NOW + 1, marks, lifetime=LIFETIME, skew=SKEW) is None


def test_floor_survives_further_restarts() -> None:
    """Otherwise the first token after a restore would hide that there was one."""
    marks = marks_at_start(
        _us(NOW - 1000), Marks(newest_microseconds=_us(NOW)), started_at=NOW + 5, skew=SKEW
    ).raised_to(NOW + 9)
    again = marks_at_start(_us(NOW + 9), marks, started_at=NOW + 20, skew=SKEW)
    assert again.floor == NOW + 1
    assert fault_in_age(NOW, again, lifetime=LIFETIME, skew=SKEW) is not None


def test_lost_witness_refuses_tokens_possibly_issued_by_fast_clocks() -> None:
    marks = marks_at_start(_us(NOW - 1000), None, started_at=NOW, skew=SKEW)
    assert fault_in_age(NOW + SKEW - 1, marks, lifetime=LIFETIME, skew=SKEW) is not None
    assert fault_in_age(NOW + SKEW, marks, lifetime=LIFETIME, skew=SKEW) is None


def test_marks_increase_with_every_token() -> None:
    """Also with one that is older than the newest: a copy of the database that lacks it is known by that."""
    marks = Marks(newest_microseconds=_us(NOW), floor=3.0)
    assert marks.raised_to(NOW - 1) == Marks(newest_microseconds=_us(NOW) + 1, floor=3.0)
    assert marks.raised_to(NOW + 1) == Marks(newest_microseconds=_us(NOW + 1), floor=3.0)


_USES = st.lists(st.tuples(st.integers(0, 2000), st.integers(-300, 30)), min_size=1, max_size=20)


@given(uses=_USES, cut=st.integers(0, 20))
def test_no_token_is_used_twice_across_restores(uses: list[tuple[int, int]], cut: int) -> None:
    """The database goes back to what it was after `cut` uses: later nonces are gone from it, the witness knows more."""
    witnessed, stored = Marks(floor=NOW - 1000), None
    issued = [NOW + moment + age for moment, age in sorted(uses)]
    for index, token in enumerate(issued):
        witnessed = witnessed.raised_to(token)
        if index < cut:
            stored = witnessed.newest_microseconds
    marks = marks_at_start(stored, witnessed, started_at=NOW + 3000, skew=SKEW)
    for token in issued[cut:]:
        assert fault_in_age(token, marks, lifetime=LIFETIME, skew=SKEW) is not None
    assert (marks.floor == NOW - 1000) == (cut >= len(issued))


def test_nonces_are_kept_longer_than_the_maximum_clock_skew() -> None:
    assert nonce_kept_until(NOW, SKEW) >= NOW + 2 * SKEW
    assert nonce_kept_until(NOW, SKEW) - NOW >= CLOCK_SET_BACK_SECONDS

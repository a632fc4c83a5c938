"""Who agreed, when a token is good, and how old it may be: pure decisions."""

import pytest

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


def _validity(issued: float = 0.0) -> Verified:
    """Seconds from NOW."""
    return Verified(signers=(), nonce="", issued_at=NOW + issued, expires_at=NOW + issued + LIFETIME)


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
        (_validity(issued=-299), None),
        (_validity(issued=-300), "it expired"),
        (_validity(issued=-301), "it expired"),
        (_validity(issued=SKEW), None),
        (_validity(issued=SKEW + 1), "it was issued in the future"),
    ],
)
def test_token_is_valid_only_within_its_lifetime(token: Verified, fault: str | None) -> None:
    assert fault_in_time(token, NOW, skew=SKEW) == fault


@pytest.mark.parametrize("stored", [None, _us(NOW - 1)])
def test_tokens_from_before_a_start_are_refused(stored: int | None) -> None:
    marks = marks_at_start(stored, started_at=NOW + 0.7)
    assert fault_in_age(NOW - 1, marks, lifetime=LIFETIME, skew=SKEW) is not None
    assert fault_in_age(NOW, marks, lifetime=LIFETIME, skew=SKEW) is None


def test_out_of_order_tokens_are_accepted_within_a_token_lifetime() -> None:
    marks = Marks(newest_microseconds=_us(NOW), floor=0.0)
    assert fault_in_age(NOW - 60, marks, lifetime=LIFETIME, skew=SKEW) is None
    assert fault_in_age(NOW - MARGIN, marks, lifetime=LIFETIME, skew=SKEW) is None
    assert fault_in_age(NOW - MARGIN - 1, marks, lifetime=LIFETIME, skew=SKEW) is not None


def test_marks_increase_with_every_token() -> None:
    marks = Marks(newest_microseconds=_us(NOW), floor=3.0)
    assert marks.raised_to(NOW - 1) == Marks(newest_microseconds=_us(NOW) + 1, floor=3.0)
    assert marks.raised_to(NOW + 1) == Marks(newest_microseconds=_us(NOW + 1), floor=3.0)


def test_nonces_are_kept_longer_than_the_maximum_clock_skew() -> None:
    assert nonce_kept_until(NOW, SKEW) >= NOW + 2 * SKEW
    assert nonce_kept_until(NOW, SKEW) - NOW >= CLOCK_SET_BACK_SECONDS

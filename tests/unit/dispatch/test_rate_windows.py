"""Moving windows on a clock that stands still until it is moved."""

import random

import pytest

from weft.dispatch.rate_windows import BUCKETS_PER_WINDOW, Amount, RateWindows, TrackedKeys
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import Rate, RateUnit
from weft_testing.fake_clock import FakeClock

TOKENS = Rate(1000, 60, RateUnit.TOKENS)


def claim(rate: Rate, amount: int = 1, key: str = "a") -> Amount:
    return Amount(key=key, who=f"Tenant {key}", rate=rate, amount=amount)


def allows(windows: RateWindows, *claims: Amount) -> bool:
    try:
        windows.take(claims)
    except WeftError as error:
        if error.reason is Reason.RATE_LIMIT_EXCEEDED:
            return False
        raise
    return True


async def test_window_slides_with_the_given_clock() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    rate = Rate(2, 60)
    assert allows(windows, claim(rate))
    await clock.advance(30)
    assert allows(windows, claim(rate))
    assert not allows(windows, claim(rate))
    await clock.advance(29.9)
    assert not allows(windows, claim(rate)), "the first one was 59.9 s ago"
    await clock.advance(0.1)
    assert allows(windows, claim(rate))
    assert not allows(windows, claim(rate))


async def test_refusal_has_limit_remaining_reset_and_retry_delay() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    windows.take([claim(TOKENS, 600)])
    await clock.advance(20)
    windows.take([claim(TOKENS, 300)])
    with pytest.raises(WeftError, match="Tenant a exceeded 1000 tok/min") as refused:
        windows.take([claim(TOKENS, 500)])
    now = clock.utc_now().timestamp()
    assert refused.value.metadata == {
        "limit": "1000",
        "remaining": "100",
        "resetAt": str(int(now + 40) + 1),
        "unit": "tokens",
        "window": "minute",
        "limit_tokens": "1000",
        "remaining_tokens": "100",
        "reset_seconds_tokens": "60.000",
    }
    assert refused.value.retry_after_seconds == pytest.approx(40), "the 600 tokens leave first, and that is enough"
    with pytest.raises(WeftError) as refused:
        windows.take([claim(TOKENS, 900)])
    assert refused.value.retry_after_seconds == pytest.approx(60), "this one needs the others to leave as well"


async def test_multiple_rates_are_counted_atomically() -> None:
    windows = RateWindows(FakeClock())
    narrow, wide = Rate(1, 1), Rate(100, 60)
    assert allows(windows, claim(wide), claim(narrow))
    assert not allows(windows, claim(wide), claim(narrow))
    with pytest.raises(WeftError) as refused:
        windows.take([claim(wide, 100)])
    assert refused.value.metadata["remaining"] == "99", "the request that the narrow window refused was not counted"


async def test_overestimated_tokens_are_refunded_and_underestimated_ones_are_charged() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    counted_at = windows.take([claim(TOKENS, 900)])
    windows.correct("a", TOKENS, -800, counted_at=counted_at)
    assert allows(windows, claim(TOKENS, 900))
    windows.correct("a", TOKENS, 5_000, counted_at=counted_at)
    assert not allows(windows, claim(TOKENS, 1))
    await clock.advance(61)
    assert allows(windows, claim(TOKENS, 1000))


async def test_claim_above_its_rate_waits_for_an_empty_window_and_owes_the_rest() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    windows.take([claim(TOKENS, 1)])
    assert not allows(windows, claim(TOKENS, 5_000))
    await clock.advance(61)
    assert allows(windows, claim(TOKENS, 5_000))
    assert not allows(windows, claim(TOKENS, 1))


@pytest.mark.parametrize("seed", range(20))
async def test_no_window_exceeds_its_rate(seed: int) -> None:
    """Against a list of everything that was let through. Steps of a 256th may only refuse longer, never let in more."""
    clock = FakeClock()
    windows = RateWindows(clock)
    chance = random.Random(seed)
    rate = Rate(chance.randint(1, 50), chance.choice([1, 60]))
    taken: list[tuple[float, int]] = []
    for _ in range(400):
        await clock.advance(chance.expovariate(rate.amount / rate.window_seconds))
        now, amount = clock.monotonic(), chance.randint(1, max(1, rate.amount // 4))
        exact = sum(one for at, one in taken if at > now - rate.window_seconds)
        lingering = sum(one for at, one in taken if at > now - rate.window_seconds * (1 + 1 / BUCKETS_PER_WINDOW))
        if allows(windows, claim(rate, amount)):
            assert exact + amount <= rate.amount
            taken.append((now, amount))
        else:
            assert lingering + amount > rate.amount
    assert taken


async def test_keys_beyond_the_bound_share_a_window_and_idle_keys_are_evicted() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    keys = TrackedKeys(windows, "t/")
    assert [keys.key_of(name, 2) for name in "abab"] == ["t/a", "t/b", "t/a", "t/b"]
    for key in ("t/a", "t/b"):
        windows.take([claim(Rate(1, 60), 1, key=key)])
    assert keys.key_of("c", 2) == keys.key_of("d", 2)
    assert keys.key_of("c", 2) not in {"t/c", "t/a", "t/b"}
    await clock.advance(61)
    assert keys.key_of("c", 2) == "t/c"
    assert len(keys) == 1


async def test_key_with_a_late_charge_is_not_evicted_for_new_names() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    keys = TrackedKeys(windows, "t/")
    counted_at = windows.take([claim(TOKENS, 1, key=keys.key_of("a", 1))])
    await clock.advance(100)
    windows.correct("t/a", TOKENS, 5_000, counted_at=counted_at)
    assert keys.key_of("b", 1) != "t/b"
    assert not allows(windows, claim(TOKENS, 1, key=keys.key_of("a", 1)))
    await clock.advance(61)
    assert keys.key_of("b", 1) == "t/b"


async def test_evicted_key_is_not_restored_by_a_late_correction() -> None:
    windows = RateWindows(FakeClock())
    windows.correct("gone", TOKENS, 5_000, counted_at=0.0)
    assert allows(windows, claim(TOKENS, 1000, key="gone"))


async def test_refund_after_its_window_does_not_credit_later_requests() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    long_ago = windows.take([claim(TOKENS, 900)])
    await clock.advance(61)
    windows.take([claim(TOKENS, 900)])
    windows.correct("a", TOKENS, -800, counted_at=long_ago)
    assert not allows(windows, claim(TOKENS, 101)), "the estimate of the first request had left the window already"
    assert allows(windows, claim(TOKENS, 100))


async def test_refunded_tokens_free_their_own_place_in_the_window() -> None:
    clock = FakeClock()
    windows = RateWindows(clock)
    early = windows.take([claim(TOKENS, 500)])
    await clock.advance(50)
    windows.take([claim(TOKENS, 500)])
    windows.correct("a", TOKENS, -500, counted_at=early)
    await clock.advance(20)
    assert not allows(windows, claim(TOKENS, 501)), "the later request is still counted whole"
    assert allows(windows, claim(TOKENS, 500))


@pytest.mark.parametrize("seed", range(20))
async def test_no_window_exceeds_its_rate_when_estimates_are_corrected(seed: int) -> None:
    """Against a list of everything that was let through, each set right some time later, down or up."""
    clock = FakeClock()
    windows = RateWindows(clock)
    chance = random.Random(seed)
    rate = Rate(1_000, 60, RateUnit.TOKENS)
    counted: list[list[float]] = []  # when, and how much
    open_ones: list[tuple[float, list[float]]] = []  # when it was counted, and its entry
    for _ in range(400):
        await clock.advance(chance.expovariate(0.3))
        now = clock.monotonic()
        if open_ones and chance.random() < 0.5:
            at, entry = open_ones.pop(chance.randrange(len(open_ones)))
            change = chance.randint(-int(entry[1]), 100)
            windows.correct("a", rate, change, counted_at=at)
            if change > 0:
                counted.append([now, change])
            else:
                entry[1] += change
        amount = chance.randint(1, 300)
        try:
            at = windows.take([claim(rate, amount)])
        except WeftError:
            continue
        in_window = sum(one[1] for one in counted if one[0] > now - rate.window_seconds)
        assert in_window + amount <= rate.amount
        counted.append([now, amount])
        open_ones.append((at, counted[-1]))
    assert len(counted) > 50

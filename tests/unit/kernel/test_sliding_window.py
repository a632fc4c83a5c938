"""A sliding window never holds more than was let in, and tells when there is room."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from weft.dispatch.rate_windows import BUCKETS_PER_WINDOW, SlidingWindow
from weft.kernel.values.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK

LENGTHS = st.sampled_from([SECOND, MINUTE, HOUR, DAY, WEEK, MONTH])
# Gaps as shares of the window: many short ones, some that empty it.
GAPS = st.lists(st.tuples(st.floats(0, 1.2), st.integers(1, 4)), min_size=1, max_size=80)


def most_in_any_window(taken: Sequence[tuple[float, int]], length: float) -> int:
    """The largest sum of amounts within any half-open period of this length."""
    return max(
        (sum(amount for at, amount in taken if end - length < at <= end) for end, _ in taken),
        default=0,
    )


def admitted(window: SlidingWindow, most: int, gaps: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    now, taken = 1_000.0, []
    for gap, amount in gaps:
        now += gap * window.length / 4
        if window.settle(now) + amount <= most:
            window.add(now, amount)
            taken.append((now, amount))
    return taken


@given(length=LENGTHS, most=st.integers(1, 12), gaps=GAPS)
def test_no_window_exceeds_the_limit(length: int, most: int, gaps: list[tuple[float, int]]) -> None:
    taken = admitted(SlidingWindow(length), most, gaps)
    assert most_in_any_window(taken, length) <= most


class _FixedWindow(SlidingWindow):
    """Starts anew at each multiple of its length, as a calendar does: what the check above must refuse."""

    def settle(self, now: float) -> int:
        if now // self.length != getattr(self, "period", None):
            self._buckets.clear()
            self.total = 0
        self.period = now // self.length
        return self.total

    __slots__ = ("period",)


def test_calendar_aligned_window_would_admit_twice_the_limit() -> None:
    taken = []
    window = _FixedWindow(60)
    for now in (1079.0, 1079.5, 1080.0, 1080.5):
        if window.settle(now) + 1 <= 2:
            window.add(now, 1)
            taken.append((now, 1))
    assert most_in_any_window(taken, 60) == 4


@given(length=LENGTHS, most=st.integers(1, 12), gaps=GAPS, amount=st.integers(1, 12))
def test_amount_fits_after_the_reported_wait_and_not_much_earlier(
    length: int, most: int, gaps: list[tuple[float, int]], amount: int
) -> None:
    window, amount = SlidingWindow(length), min(amount, most)
    taken = admitted(window, most, gaps)
    # Time never goes back, also where the last ones were refused.
    now = 1_000.0
    for gap, _ in gaps:
        now += gap * length / 4
    window.settle(now)
    wait = window.seconds_until_room(now, most, amount)
    # An exact window would have room a 256th of its length earlier at most.
    exact = min(
        (
            end
            for end in (now, *(at + length for at, _ in taken))
            if end >= now and _fits(taken, end, length, most, amount)
        ),
    )
    assert exact - 1e-6 <= now + wait <= exact + length / BUCKETS_PER_WINDOW + 1e-6
    assert window.settle(now + wait + 1e-6 * length) + amount <= most


def _fits(taken: Sequence[tuple[float, int]], now: float, length: float, most: int, amount: int) -> bool:
    return sum(each for at, each in taken if at > now - length + 1e-6) + amount <= most


def test_window_is_empty_at_the_reported_time() -> None:
    window = SlidingWindow(DAY)
    assert window.seconds_until_empty(0.0) == 0.0
    window.add(0.0, 3)
    window.add(1_000.0, 2)
    assert window.seconds_until_empty(2_000.0) == DAY - 1_000.0
    assert window.seconds_until_less(2_000.0) == DAY - 2_000.0
    assert window.settle(DAY + 999.0) == 2
    assert window.settle(DAY + 1_000.0) == 0


def test_month_window_takes_no_more_steps_than_a_second_window() -> None:
    window = SlidingWindow(MONTH)
    for second in range(0, MONTH, 600):
        window.settle(float(second))
        window.add(float(second), 1)
    assert window.total == MONTH // 600
    assert len(window._buckets) <= BUCKETS_PER_WINDOW + 1

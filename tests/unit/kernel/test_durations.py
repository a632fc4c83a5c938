"""Lengths of time as people write them."""

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.units import FOREVER, MAX_DURATION_SECONDS, keep_alive_seconds, time_words, wait_words


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (300, 300.0),
        (0.5, 0.5),
        ("300", 300.0),
        ("5m", 300.0),
        ("90s", 90.0),
        ("2h", 7200.0),
        ("1h30m", 5400.0),
        ("1.5m", 90.0),
        ("250ms", 0.25),
        ("1d", 86_400.0),
        (0, 0.0),
        ("0", 0.0),
        (-0.0, 0.0),
        ("0s", 0.0),
        (-1, FOREVER),
        ("-1", FOREVER),
        (-300, FOREVER),
        ("-5m", FOREVER),
        (-(10**400), FOREVER),
        (float("-inf"), FOREVER),
        (int(MAX_DURATION_SECONDS), MAX_DURATION_SECONDS),
    ],
)
def test_common_duration_formats_are_parsed(written: object, seconds: float) -> None:
    assert keep_alive_seconds(written, "keep_alive") == seconds


@pytest.mark.parametrize(
    "written",
    [
        *("", " 5m", "5 m", "5m ", "m", "5x", "1e3", "five", "--5", "+5", "5m-3s", "\u0665m", "nan", "inf", "5" * 40),
        *(float("nan"), True, None, [], {}, b"5m"),
    ],
    ids=repr,
)
def test_other_text_is_refused_with_its_field(written: object) -> None:
    with pytest.raises(FieldError, match="5m") as refused:
        keep_alive_seconds(written, "keep_alive")
    assert refused.value.field == "keep_alive"


@pytest.mark.parametrize("written", [MAX_DURATION_SECONDS + 1, float("inf"), "367d", "9999999999999999h", 10**400])
def test_duration_above_a_year_is_refused(written: object) -> None:
    with pytest.raises(FieldError, match="at most"):
        keep_alive_seconds(written, "keep_alive")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0"), (0.3, "0.3"), (0.94, "0.9"), (3.0, "3"), (8.24, "8.2"), (9.97, "10"), (12.4, "12"), (300.0, "300")],
)
def test_short_wait_is_shown_in_tenths_of_a_second(seconds: float, words: str) -> None:
    assert wait_words(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 ms"),
        (0.00001, "under 0.1 ms"),
        (0.00042, "0.4 ms"),
        (0.0012, "1 ms"),
        (0.8391, "839 ms"),
        (9.5, "9500 ms"),
        (9.99996, "10 s"),
        (10.0, "10 s"),
        (12.34, "12.3 s"),
        (140.4, "140 s"),
        (123_456.0, "123456 s"),
    ],
)
def test_measured_time_is_shown_in_milliseconds_below_ten_seconds(seconds: float, words: str) -> None:
    assert time_words(seconds) == words

"""Rates of tokens, and several rates at once."""

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.units import MAX_TOKENS, Rate, RateUnit, parse_any_rate, parse_rates


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20000tok/min", Rate(20_000, 60, RateUnit.TOKENS)),
        (" 5 TOKENS/hour ", Rate(5, 3600, RateUnit.TOKENS)),
        ("100req/min", Rate(100, 60)),
        ("7/s", Rate(7, 1)),
    ],
)
def test_rate_of_either_unit_is_parsed(text: str, rate: Rate) -> None:
    assert parse_any_rate(text, "x") == rate


@pytest.mark.parametrize("text", ["0tok/min", f"{MAX_TOKENS + 1}tok/s", "tok/min", "1.5tok/min", "5tok/year", ""])
def test_invalid_token_rate_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(FieldError, match=r"router\.rate_limits: must be a rate such as"):
        parse_any_rate(text, "router.rate_limits")


def test_rate_round_trips_as_text() -> None:
    assert [str(rate) for rate in parse_rates(["50req/min", "20000tok/hour"], "x")] == ["50 req/min", "20000 tok/hour"]


def test_two_rates_of_one_unit_and_window_conflict() -> None:
    assert len(parse_rates(["5req/sec", "50req/min", "50tok/min"], "x")) == 3
    with pytest.raises(FieldError, match="x: has two rates of the same unit and window"):
        parse_rates(["5req/min", "50req/min"], "x")

"""How often something may happen, as a value: `100req/min`, `20000tok/min`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from weft.kernel.errors import invalid_field

MAX_AMOUNT = 100_000
"""Most requests of one window."""
MAX_TOKENS = 100_000_000
"""Most tokens of one window."""
MAX_RATES = 8
"""Rates that one caller can have at once."""

_WINDOW = r"/ ?(s|sec|second|m|min|minute|h|hour)"
_RATE = re.compile(rf"(\d{{1,9}}) ?(?:req|reqs|requests?)?{_WINDOW}", re.IGNORECASE)
_TOKEN_RATE = re.compile(rf"(\d{{1,9}}) ?(?:tok|toks|tokens?){_WINDOW}", re.IGNORECASE)
_WINDOWS = {"s": 1, "m": 60, "h": 3600}
_WORDS = {1: "sec", 60: "min", 3600: "hour"}


class RateUnit(Enum):
    """What is counted."""

    REQUESTS = "req"
    TOKENS = "tok"
    """Of prompts and answers."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `amount` in any `window_seconds` (1, 60 or 3600)."""

    amount: int
    window_seconds: int
    unit: RateUnit = RateUnit.REQUESTS

    def __str__(self) -> str:
        return f"{self.amount} {self.unit.value}/{_WORDS[self.window_seconds]}"


def parse_rate(text: str, field: str) -> Rate:
    """The rate in a text such as `100req/min`, `5/sec` or `1000 req/hour`. Raises INVALID_ARGUMENT naming `field`."""
    found = _RATE.fullmatch(text.strip())
    amount = int(found[1]) if found is not None else 0
    if found is None or not 1 <= amount <= MAX_AMOUNT:
        raise invalid_field(field, f"must be a rate such as 100req/min (or /sec, /hour), of 1 to {MAX_AMOUNT} requests")
    return Rate(amount, _WINDOWS[found[2][0].lower()])


def parse_any_rate(text: str, field: str) -> Rate:
    """The rate in a text such as `100req/min` or `20000tok/min`. Raises INVALID_ARGUMENT naming `field`."""
    found = _TOKEN_RATE.fullmatch(text.strip())
    if found is None:
        return parse_rate(text, field)
    if not 1 <= int(found[1]) <= MAX_TOKENS:
        raise invalid_field(field, f"must be a rate such as 20000tok/min, of 1 to {MAX_TOKENS} tokens")
    return Rate(int(found[1]), _WINDOWS[found[2][0].lower()], RateUnit.TOKENS)


def parse_rates(texts: Iterable[str], field: str) -> tuple[Rate, ...]:
    """Several rates that hold at once. Raises INVALID_ARGUMENT naming `field`, also for two of one unit and window."""
    rates = tuple(parse_any_rate(text, field) for text in texts)
    if len({(rate.unit, rate.window_seconds) for rate in rates}) < len(rates):
        raise invalid_field(field, "has two rates of the same unit and window")
    if len(rates) > MAX_RATES:
        raise invalid_field(field, f"has more than {MAX_RATES} rates")
    return rates

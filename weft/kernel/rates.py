"""How often something may happen, as a value: `100req/min`."""

import re
from dataclasses import dataclass

from weft.kernel.errors import invalid_field

MAX_AMOUNT = 100_000
"""Most requests of one window: each is remembered for as long as the window is."""

_RATE = re.compile(r"(\d{1,9}) ?(?:req|reqs|requests?)?/ ?(s|sec|second|m|min|minute|h|hour)", re.IGNORECASE)
_WINDOWS = {"s": 1, "m": 60, "h": 3600}
_WORDS = {1: "sec", 60: "min", 3600: "hour"}


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `amount` in any `window_seconds` (1, 60 or 3600)."""

    amount: int
    window_seconds: int

    def __str__(self) -> str:
        return f"{self.amount} req/{_WORDS[self.window_seconds]}"


def parse_rate(text: str, field: str) -> Rate:
    """The rate in a text such as `100req/min`, `5/sec` or `1000 req/hour`. Raises INVALID_ARGUMENT naming `field`."""
    found = _RATE.fullmatch(text.strip())
    amount = int(found[1]) if found is not None else 0
    if found is None or not 1 <= amount <= MAX_AMOUNT:
        raise invalid_field(field, f"must be a rate such as 100req/min (or /sec, /hour), of 1 to {MAX_AMOUNT} requests")
    return Rate(amount, _WINDOWS[found[2][0].lower()])

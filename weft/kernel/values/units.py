"""Parsing and formatting of durations, memory sizes and request rates."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from weft.kernel.errors.error_tree import FieldError, invalid_field

MAX_AMOUNT = 1_000_000_000
"""Maximum requests per window."""
MAX_TOKENS = 1_000_000_000_000
"""Maximum tokens per window."""
MAX_RATES = 8
"""Maximum number of rates of a caller."""

_HOURS = re.compile(r"(\d{1,2})-(\d{1,2})")
_WINDOW = r"/ ?(s|sec|second|m|min|minute|h|hour|d|day|w|week|mo|month)"
_RATE = re.compile(rf"(\d{{1,13}}) ?(?:req|reqs|requests?)?{_WINDOW}", re.IGNORECASE)
_TOKEN_RATE = re.compile(rf"(\d{{1,13}}) ?(?:tok|toks|tokens?){_WINDOW}", re.IGNORECASE)
SECOND, MINUTE, HOUR, DAY, WEEK, MONTH = 1, 60, 3_600, 86_400, 7 * 86_400, 30 * 86_400
"""Window lengths in seconds. A month is 30 days."""
_WINDOWS = {"s": SECOND, "m": MINUTE, "h": HOUR, "d": DAY, "w": WEEK}
_WORDS = {SECOND: "sec", MINUTE: "min", HOUR: "hour", DAY: "day", WEEK: "week", MONTH: "month"}


class RateUnit(Enum):
    """The counted unit."""

    REQUESTS = "req"
    TOKENS = "tok"
    """Prompt and answer tokens."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `amount` in any window of `window_seconds`, one of SECOND to MONTH."""

    amount: int
    window_seconds: int
    unit: RateUnit = RateUnit.REQUESTS

    def __str__(self) -> str:
        return f"{self.amount} {self.unit.value}/{_WORDS[self.window_seconds]}"


def parse_rate(text: str, field: str) -> Rate:
    """Parses a rate such as `100req/min`, `5/sec` or `1000 req/hour`. Raises INVALID_ARGUMENT naming `field`."""
    found = _RATE.fullmatch(text.strip())
    amount = int(found[1]) if found is not None else 0
    if found is None or not 1 <= amount <= MAX_AMOUNT:
        raise invalid_field(
            field,
            f"must be a rate such as 100req/min (or /sec, /hour, /day, /week, /month), of 1 to {MAX_AMOUNT} requests",
        )
    return Rate(amount, _window(found[2]))


def parse_any_rate(text: str, field: str) -> Rate:
    """Parses a rate such as `100req/min` or `20000tok/min`. Raises INVALID_ARGUMENT naming `field`."""
    found = _TOKEN_RATE.fullmatch(text.strip())
    if found is None:
        return parse_rate(text, field)
    if not 1 <= int(found[1]) <= MAX_TOKENS:
        raise invalid_field(field, f"must be a rate such as 20000tok/min, of 1 to {MAX_TOKENS} tokens")
    return Rate(int(found[1]), _window(found[2]), RateUnit.TOKENS)


def _window(word: str) -> int:
    return MONTH if word.lower().startswith("mo") else _WINDOWS[word[0].lower()]


def parse_rates(texts: Iterable[str], field: str) -> tuple[Rate, ...]:
    """Parses rates that apply together. Raises INVALID_ARGUMENT naming `field`, also if two share unit and window."""
    rates = tuple(parse_any_rate(text, field) for text in texts)
    if len({(rate.unit, rate.window_seconds) for rate in rates}) < len(rates):
        raise invalid_field(field, "has two rates of the same unit and window")
    if len(rates) > MAX_RATES:
        raise invalid_field(field, f"has more than {MAX_RATES} rates")
    return rates


MAX_DURATION_SECONDS = 366 * 86_400.0
"""One year. For a longer time use -1, no limit."""
FOREVER = -1.0
"""Result for every negative length."""
MAX_DURATION_CHARS = 32

_DURATION_UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_PART = r"(\d+(?:\.\d+)?)(ms|s|m|h|d)"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_LENGTH = re.compile(rf"-?(?:{_PART})+", re.ASCII)
_PARTS = re.compile(_PART, re.ASCII)


def hours_of(text: str, field: str) -> tuple[int, int]:
    """Returns the first hour of the day and the hour at its end; (0, 24) for an empty text.

    Raises INVALID_ARGUMENT naming the field.
    """
    if not text:
        return 0, 24
    found = _HOURS.fullmatch(text)
    first, last = map(int, found.groups()) if found else (24, 24)
    if first >= last == 24 or last > 24 or first > 23 or first == last:
        raise invalid_field(field, "must be two hours from 0 to 24, such as 22-6")
    return first, last


def keep_alive_seconds(value: object, field: str) -> float:
    """Parses how long a model stays loaded, in seconds: 300, "300", "5m", "1h30m", 0; FOREVER for a negative length.

    Raises INVALID_ARGUMENT naming `field`, also above a year.
    """
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        raise _malformed(field)
    if seconds < 0:
        return FOREVER
    if seconds > MAX_DURATION_SECONDS:
        raise invalid_field(field, f"must be at most {MAX_DURATION_SECONDS:.0f} seconds (366 days); -1 is no end")
    return seconds + 0.0  # turns -0.0 into 0.0


def _seconds(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        # A JSON integer may have any number of digits, more than a float can hold.
        return float(max(-1, min(value, int(MAX_DURATION_SECONDS) + 1)))
    if isinstance(value, float):
        return value
    return _written(value) if isinstance(value, str) and len(value) <= MAX_DURATION_CHARS else None


def _written(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _LENGTH.fullmatch(text):
        return None
    length = sum(float(amount) * _DURATION_UNITS[unit] for amount, unit in _PARTS.findall(text))
    return -length if text.startswith("-") else length


def _malformed(field: str) -> FieldError:
    return invalid_field(
        field, 'must be seconds such as 300, a length such as "90s", "5m" or "1h30m", 0 (not at all) or -1 (no end)'
    )


TENTHS_BELOW_SECONDS = 10.0
"""Wait estimates below this are shown in tenths of a second, others in whole seconds."""


def wait_words(seconds: float) -> str:
    """Returns a wait estimate in seconds for display: "12", "8.2", "0.3"."""
    tenths = round(seconds, 1)
    is_whole = tenths >= TENTHS_BELOW_SECONDS or tenths == int(tenths)
    return f"{seconds:.0f}" if is_whole else f"{tenths:.1f}"


MILLISECONDS_BELOW_SECONDS = 10.0


def time_words(seconds: float) -> str:
    """Returns a measured time: milliseconds below ten seconds, such as "839 ms" or "0.4 ms", else "12.3 s"."""
    milliseconds = round(seconds * 1000, 1)
    if milliseconds >= MILLISECONDS_BELOW_SECONDS * 1000:
        return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    if not milliseconds and seconds:
        return "under 0.1 ms"
    return f"{milliseconds:.0f} ms" if milliseconds >= 1 else f"{milliseconds:g} ms"


def dollars_words(nanodollars: float) -> str:
    """Returns an amount of money given in billionths of a dollar: "$12.30", "$0.0042", "$0.00"."""
    dollars = nanodollars / 1e9
    digits = 1 - math.floor(math.log10(dollars)) if 0 < dollars < 1 else 2
    return f"${dollars:,.{max(2, digits)}f}"


MAX_SIZE_CHARS = 32
MAX_SIZE_BYTES = 2**62
MIN_PLAIN_BYTES = 1024**2
"""Minimum for a number without a unit, since 300 is unlikely to mean bytes."""

_SIZE_UNITS: Mapping[str, int] = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: str, field: str) -> int:
    """Returns the bytes in "8GiB", "8G" (the same), "8GB" (8,000,000,000), "512MiB" or "8589934592".

    Raises INVALID_ARGUMENT naming `field`, also for a number without a unit below MIN_PLAIN_BYTES.
    """
    found = _SIZE.fullmatch(text.strip()) if len(text) <= MAX_SIZE_CHARS else None
    unit = None if found is None else _SIZE_UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise invalid_field(field, "must be an amount of memory such as 8GiB, 512MiB or 8GB")
    if not found[2] and float(found[1]) < MIN_PLAIN_BYTES:
        raise invalid_field(field, f"{found[1]} has no unit, which means bytes: write {found[1]}MiB or {found[1]}GiB")
    amount = int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
    if not 0 < amount <= MAX_SIZE_BYTES:
        raise invalid_field(field, "must be more than 0 bytes and at most 4 EiB")
    return amount


def size_words(amount_bytes: int) -> str:
    """Returns a size for display: "5.1 GiB", "512 MiB", "12 KiB", "7 bytes"."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if amount_bytes >= size:
            amount = amount_bytes / size
            return f"{amount:.0f} {unit}" if amount >= 100 or amount == int(amount) else f"{amount:.1f} {unit}"
    return f"{amount_bytes} bytes"

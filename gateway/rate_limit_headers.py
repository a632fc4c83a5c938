"""How much more a caller may ask for, as headers of answers: OpenAI's names, on answers and on refusals (429).

Of requests and of tokens it is the tightest window that counts the request, as it was when the request was admitted or
refused. There are none where no limit counts it.
"""

from collections.abc import Iterator

from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus, RateLimitWindow

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)


def rate_limit_headers(status: RateLimitStatus | None) -> list[tuple[bytes, bytes]]:
    """Returns the headers; none where nothing limits the caller."""
    return [] if status is None else [header for unit, window in _windows(status) for header in _headers(unit, window)]


def _windows(status: RateLimitStatus) -> Iterator[tuple[str, RateLimitWindow]]:
    if status.HasField("requests"):
        yield "requests", status.requests
    if status.HasField("tokens"):
        yield "tokens", status.tokens


def _headers(unit: str, window: RateLimitWindow) -> Iterator[tuple[bytes, bytes]]:
    values = (str(window.limit), str(window.remaining), reset_words(window.reset.ToNanoseconds() / 1e9))
    for part, value in zip(("limit", "remaining", "reset"), values, strict=True):
        yield f"x-ratelimit-{part}-{unit}".encode(), value.encode()


def reset_words(seconds: float) -> str:
    """Returns a length of time as OpenAI writes it: "0s", "120ms", "8.64s", "6m0s", "26h3m0s"."""
    millis = max(0, round(seconds * 1e3))
    if 0 < millis < 1_000:
        return f"{millis}ms"
    whole, rest = divmod(millis, 1_000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    last = f"{second + rest / 1e3:g}s" if rest and not minutes else f"{second}s"
    return f"{hours}h{minute}m{last}" if hours else f"{minutes}m{last}" if minutes else last

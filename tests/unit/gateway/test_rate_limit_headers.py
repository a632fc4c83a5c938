"""The headers that say how much more a caller may ask for, and when to come back."""

import pytest

from gateway.errors import RATE_LIMIT_HEADERS, error_headers, rate_limit_headers, reset_words
from gateway.http.cors import EXPOSED_HEADERS
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus, RateLimitWindow
from weft.dispatch.rate_windows import status_in, status_metadata
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import duration_of

STATUS = RateLimitStatus(
    requests=RateLimitWindow(limit=20, remaining=0, reset=duration_of(59.5)),
    tokens=RateLimitWindow(limit=40_000, remaining=39_000, reset=duration_of(86_399.2)),
)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0s"),
        (0.12, "120ms"),
        (0.0004, "0s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.4, "1m1s"),
        (93_780, "26h3m0s"),
        (-1, "0s"),
    ],
)
def test_reset_time_uses_the_openai_format(seconds: float, words: str) -> None:
    assert reset_words(seconds) == words


def test_every_limited_unit_has_three_headers_and_others_have_none() -> None:
    assert dict(rate_limit_headers(STATUS)) == {
        b"x-ratelimit-limit-requests": b"20",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"59.5s",
        b"x-ratelimit-limit-tokens": b"40000",
        b"x-ratelimit-remaining-tokens": b"39000",
        b"x-ratelimit-reset-tokens": b"23h59m59s",
    }
    assert rate_limit_headers(None) == []
    assert rate_limit_headers(RateLimitStatus()) == []


def test_browsers_may_read_all_rate_limit_headers() -> None:
    assert set(RATE_LIMIT_HEADERS) <= set(EXPOSED_HEADERS)


def test_rate_status_survives_error_metadata() -> None:
    assert status_in(status_metadata(STATUS)) == STATUS
    assert status_in({"limit_requests": "many"}) == RateLimitStatus()


def refusal(seconds: float, reason: Reason = Reason.RATE_LIMIT_EXCEEDED) -> dict[bytes, bytes]:
    error = WeftError(reason, "too much", metadata=status_metadata(STATUS), retry_after_seconds=seconds)
    return dict(error_headers(error, b""))


def test_refusal_has_rate_headers_and_a_retry_time() -> None:
    headers = refusal(12.3)
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert (headers[b"retry-after"], headers[b"x-should-retry"]) == (b"13", b"true")


def test_hours_long_limit_is_reported_and_tells_clients_not_to_retry() -> None:
    headers = refusal(7_200.5)
    assert (headers[b"retry-after"], headers[b"x-should-retry"]) == (b"7201", b"false")


def test_full_queue_headers_are_unchanged() -> None:
    headers = refusal(7_200.5, Reason.QUEUE_FULL)
    assert (headers[b"retry-after"], headers[b"x-should-retry"]) == (b"60", b"true")
    assert b"x-ratelimit-limit-requests" not in headers

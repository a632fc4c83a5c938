"""Rates as text, and counted tenants."""

import pytest

from gateway.auth.rate_limits import TenantRateLimits
from gateway.errors import DetailedError
from gateway.gateway_config import RateLimitConfig
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.units import MAX_AMOUNT, Rate, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100req/min", Rate(100, 60)),
        ("5req/sec", Rate(5, 1)),
        ("1000 requests/hour", Rate(1000, 3600)),
        ("7/s", Rate(7, 1)),
        (" 1REQ/M ", Rate(1, 60)),
    ],
)
def test_rate_is_parsed(text: str, rate: Rate) -> None:
    assert parse_rate(text, "x") == rate


@pytest.mark.parametrize(
    "text",
    ["", "req/min", "0req/min", "-1req/min", "1.5req/min", "5req/year", f"{MAX_AMOUNT + 1}/s", "5req", "5/min;1"],
)
def test_invalid_rate_error_names_the_variable(text: str) -> None:
    with pytest.raises(FieldError, match="DEFAULT_RATE_LIMIT: must be a rate such as 100req/min"):
        parse_rate(text, "DEFAULT_RATE_LIMIT")


def test_request_beyond_the_limit_gets_limit_remaining_and_reset() -> None:
    clock = SystemClock()
    limits = TenantRateLimits(RateLimitConfig(default=Rate(3, 60)), clock)
    for _ in range(3):
        limits.take("community-x")
    before = clock.utc_now().timestamp()
    with pytest.raises(DetailedError, match="Tenant community-x exceeded 3 req/min") as refused:
        limits.take("community-x")
    assert refused.value.reason is Reason.RATE_LIMIT_EXCEEDED
    assert (refused.value.details["limit"], refused.value.details["remaining"]) == (3, 0)
    reset = refused.value.details["resetAt"]
    assert isinstance(reset, int)
    assert before < reset <= before + 62
    assert refused.value.retry_after_seconds is not None
    assert 55 < refused.value.retry_after_seconds <= 60


def test_tenants_are_counted_separately_and_may_have_their_own_rate() -> None:
    limits = TenantRateLimits(RateLimitConfig(default=Rate(1, 60), tenants={"big": Rate(4, 60)}), SystemClock())
    limits.take("a")
    limits.take("b")
    for _ in range(4):
        limits.take("big")
    for tenant in ("a", "b", "big"):
        with pytest.raises(DetailedError):
            limits.take(tenant)

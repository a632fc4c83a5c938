"""The limits of tenants: what counts which request, and what stays counted when limits change."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_svc.declared_tenants import limits_of
from router_svc.policy.pool_settings import RateLimitConfig
from router_svc.rate_limits import RateLimits
from weft.api.registry.v1.tenant_pb2 import TenantLimit, TenantManifest
from weft.api.router.v1.request_service_pb2 import LimitUse
from weft.dispatch.rate_windows import status_in
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.units import DAY, HOUR, MINUTE, MONTH, Rate, RateUnit
from weft_testing.fake_clock import FakeClock

MINUTELY, HOURLY, DAILY, MONTHLY = (
    TenantLimit.WINDOW_MINUTE,
    TenantLimit.WINDOW_HOUR,
    TenantLimit.WINDOW_DAY,
    TenantLimit.WINDOW_MONTH,
)
PER_KEY, PER_MODEL = TenantLimit.SUBJECT_KEY, TenantLimit.SUBJECT_MODEL


def limits(clock: FakeClock, **config: Any) -> RateLimits:
    return RateLimits(RateLimitConfig(**config), {}, clock, max_clients=8)


def declare(rate_limits: RateLimits, *given: TenantLimit, tenant: str = "a", unlimited: bool = False) -> None:
    manifest = TenantManifest(name=tenant, limits=given, unlimited=unlimited)
    rate_limits.declare({tenant: limits_of(manifest)})


def asked(**fields: Any) -> PlacementRequest:
    given = {"tenant": "a", "model": "qwen", "operation": Operation.CHAT, "caller": "key:one", **fields}
    return PlacementRequest(request_id="r", **given)


def refused(rate_limits: RateLimits, **fields: Any) -> WeftError:
    with pytest.raises(WeftError) as caught:
        rate_limits.take(asked(**fields))
    assert caught.value.reason is Reason.RATE_LIMIT_EXCEEDED
    return caught.value


def used(rate_limits: RateLimits, **wanted: Any) -> list[int]:
    return [
        use.used for use in rate_limits.uses("a") if all(getattr(use, name) == value for name, value in wanted.items())
    ]


async def test_per_key_limit_counts_each_key_separately_and_requests_without_a_key_together() -> None:
    rate_limits = limits(FakeClock())
    declare(rate_limits, TenantLimit(window=MINUTELY, requests=1, per=PER_KEY))
    for caller in ("key:one", "key:two", ""):
        rate_limits.take(asked(caller=caller))
    error = refused(rate_limits, caller="key:two")
    assert error.message == "Tenant a with key:two exceeded 1 req/min"
    told = {name: error.metadata[name] for name in ("tenant", "per", "key", "unit", "window", "limit", "remaining")}
    assert told == {
        "tenant": "a",
        "per": "key",
        "key": "key:two",
        "unit": "requests",
        "window": "minute",
        "limit": "1",
        "remaining": "0",
    }
    assert refused(rate_limits, caller="").retry_after_seconds == pytest.approx(60)


async def test_per_model_limit_counts_each_matching_name_separately() -> None:
    rate_limits = limits(FakeClock())
    declare(
        rate_limits,
        TenantLimit(window=HOURLY, requests=1, per=PER_MODEL, model="big-*"),
        TenantLimit(window=HOURLY, requests=3, model="big-*"),
    )
    rate_limits.take(asked(model="big-a"))
    rate_limits.take(asked(model="big-b"))
    for _ in range(5):
        rate_limits.take(asked(model="small"))
    assert "requests for big-a" in refused(rate_limits, model="big-a").message
    rate_limits.take(asked(model="big-c"))
    assert "requests for big-*" in refused(rate_limits, model="big-d").message


async def test_refusal_reports_the_limit_with_the_longest_wait() -> None:
    clock = FakeClock()
    rate_limits = limits(clock)
    declare(rate_limits, TenantLimit(window=MINUTELY, requests=1), TenantLimit(window=DAILY, requests=1))
    rate_limits.take(asked())
    await clock.advance(10)
    error = refused(rate_limits)
    assert error.metadata["window"] == "day"
    assert error.retry_after_seconds == pytest.approx(DAY - 10)


async def test_counts_are_kept_when_the_limit_amount_changes() -> None:
    clock = FakeClock()
    rate_limits = limits(clock)
    declare(rate_limits, TenantLimit(window=MONTHLY, requests=2))
    rate_limits.take(asked())
    rate_limits.take(asked())
    refused(rate_limits)
    declare(rate_limits, TenantLimit(window=MONTHLY, requests=3))
    rate_limits.take(asked())
    refused(rate_limits)
    declare(rate_limits, TenantLimit(window=MONTHLY, requests=1))
    refused(rate_limits)
    assert used(rate_limits) == [3]
    await clock.advance(MONTH)
    rate_limits.take(asked())


async def test_tenant_given_limits_keeps_counts_of_the_default_and_weft_yaml() -> None:
    for config in ({"default": (Rate(2, 60),)}, {"tenants": {"a": (Rate(2, 60),)}}):
        rate_limits = limits(FakeClock(), **config)
        rate_limits.take(asked())
        declare(rate_limits, TenantLimit(window=MINUTELY, requests=2))
        rate_limits.take(asked())
        refused(rate_limits)
        rate_limits.declare({})
        refused(rate_limits)


async def test_declared_tenant_without_limits_has_the_default_and_an_unlimited_one_none() -> None:
    rate_limits = limits(FakeClock(), default=(Rate(1, 60),), tenants={"a": (Rate(5, 60),)})
    declare(rate_limits)
    rate_limits.take(asked())
    refused(rate_limits)
    declare(rate_limits, unlimited=True)
    for _ in range(10):
        assert rate_limits.take(asked()).status is None


async def test_declaration_does_not_affect_other_tenants() -> None:
    rate_limits = limits(FakeClock(), default=(Rate(1, 60),))
    rate_limits.take(asked(tenant="b"))
    declare(rate_limits, TenantLimit(window=MINUTELY, requests=5))
    refused(rate_limits, tenant="b")
    rate_limits.take(asked())


async def test_tokens_are_corrected_when_the_answer_is_complete() -> None:
    rate_limits = limits(FakeClock())
    declare(rate_limits, TenantLimit(window=HOURLY, tokens=1000))
    counted = rate_limits.take(asked(prompt_tokens=100))
    rate_limits.correct(counted, 700)
    assert used(rate_limits, unit=LimitUse.UNIT_TOKENS) == [700]
    refused(rate_limits, prompt_tokens=301)
    rate_limits.take(asked(prompt_tokens=300))


async def test_status_shows_the_tightest_window_of_each_unit() -> None:
    clock = FakeClock()
    rate_limits = limits(clock)
    declare(
        rate_limits,
        TenantLimit(window=MINUTELY, requests=10, tokens=1000),
        TenantLimit(window=DAILY, requests=5),
        TenantLimit(window=HOURLY, tokens=150, per=PER_KEY),
    )
    status = rate_limits.take(asked(prompt_tokens=40)).status
    assert status is not None
    assert (status.requests.limit, status.requests.remaining, status.requests.window.seconds) == (5, 4, DAY)
    assert (status.tokens.limit, status.tokens.remaining, status.tokens.window.seconds) == (150, 110, HOUR)
    await clock.advance(30)
    refusal = status_in(refused(rate_limits, prompt_tokens=120).metadata)
    assert (refusal.tokens.remaining, refusal.tokens.reset.seconds, refusal.requests.remaining) == (110, HOUR - 30, 4)


async def test_removed_limit_is_forgotten_and_a_new_one_starts_at_zero() -> None:
    rate_limits = limits(FakeClock())
    declare(rate_limits, TenantLimit(window=MINUTELY, requests=1, per=PER_KEY))
    rate_limits.take(asked())
    declare(rate_limits, TenantLimit(window=HOURLY, requests=1))
    rate_limits.take(asked())
    declare(rate_limits, TenantLimit(window=MINUTELY, requests=1, per=PER_KEY))
    rate_limits.take(asked())
    refused(rate_limits)


async def test_keys_beyond_the_bound_share_a_window() -> None:
    rate_limits = limits(FakeClock(), max_subjects=2)
    declare(rate_limits, TenantLimit(window=MINUTELY, requests=1, per=PER_KEY))
    for caller in ("key:one", "key:two", "key:three"):
        rate_limits.take(asked(caller=caller))
    refused(rate_limits, caller="key:four")


async def test_usage_is_reported_per_window_and_only_for_keys_with_usage() -> None:
    rate_limits = limits(FakeClock(), default=(Rate(9, 60),))
    declare(
        rate_limits,
        TenantLimit(window=MINUTELY, requests=10, tokens=500),
        TenantLimit(window=DAILY, requests=20, per=PER_KEY),
    )
    assert used(rate_limits) == [0, 0]
    rate_limits.take(asked(prompt_tokens=30))
    rate_limits.take(asked(tenant="b"))
    told = [(use.key, use.unit, use.limit, use.used, use.window.seconds) for use in rate_limits.uses("a")]
    assert told == [
        ("", LimitUse.UNIT_REQUESTS, 10, 1, MINUTE),
        ("", LimitUse.UNIT_TOKENS, 500, 30, MINUTE),
        ("key:one", LimitUse.UNIT_REQUESTS, 20, 1, DAY),
    ]
    assert {use.tenant for use in rate_limits.uses()} == {"a", "b"}


AMOUNTS = st.integers(1, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(["m", "n"]), st.sampled_from(["key:1", "key:2"])),
        st.tuples(st.just("wait"), st.floats(0.0, 40.0), st.none()),
        st.tuples(st.just("declare"), AMOUNTS, AMOUNTS),
    ),
    min_size=5,
    max_size=60,
)


@given(steps=STEPS)
async def test_admissions_in_any_window_never_exceed_the_limit_at_its_last_request(
    steps: list[tuple[str, Any, Any]],
) -> None:
    clock = FakeClock()
    rate_limits = limits(clock)
    whole, each = 4, 2
    taken: list[tuple[float, str, str]] = []

    def use() -> None:
        declare(
            rate_limits,
            TenantLimit(window=MINUTELY, requests=whole),
            TenantLimit(window=MINUTELY, requests=each, per=PER_KEY),
            TenantLimit(window=MINUTELY, requests=each, per=PER_MODEL),
        )

    use()
    for what, one, other in steps:
        if what == "wait":
            await clock.advance(one)
        elif what == "declare":
            whole, each = one, other
            use()
        else:
            now, before = clock.monotonic(), len(taken)
            lately = [(model, key) for at, model, key in taken if at > now - 60]
            with suppress(WeftError):
                rate_limits.take(asked(model=one, caller=other))
                taken.append((now, one, other))
            if len(taken) == before:
                continue
            assert len(lately) < whole
            assert [model for model, _ in lately].count(one) < each
            assert [key for _, key in lately].count(other) < each


async def test_weft_yaml_rates_may_be_per_day_week_or_month() -> None:
    clock = FakeClock()
    rate_limits = limits(clock, tenants={"a": (Rate(1, DAY), Rate(50, MONTH, RateUnit.TOKENS))})
    rate_limits.take(asked(prompt_tokens=10))
    assert refused(rate_limits).metadata["window"] == "day"
    await clock.advance(DAY * 1.01)
    assert refused(rate_limits, prompt_tokens=41).metadata["window"] == "month"


def test_unknown_window_counts_as_the_longest() -> None:
    newer = TenantLimit(window=99, requests=3)  # type: ignore[arg-type]  # as a newer registry might send
    (limit,) = limits_of(TenantManifest(name="a", limits=[newer])) or ()
    assert replace(limit.rate, amount=0).window_seconds == MONTH

"""Profiles of clients, how they ask, what limits them, and pauses."""

from datetime import UTC
from typing import Any

import pytest
from kit.request_endings import ending
from kit.scheduling import placement_request as asked

from router_svc.client_registry import (
    MAX_TARGETS_COUNTED,
    MAX_TARGETS_TOLD,
    ClientRegistry,
    ClientsConfig,
)
from router_svc.policy.cooldown import Cooldown, CooldownRule
from router_svc.policy.pool_settings import ClientProfile, RateLimitConfig
from router_svc.receipt_counts import MAX_COUNTED_TOKENS
from router_svc.usage import MAX_COUNTED_GPU_NANOSECONDS, MAX_COUNTED_MILLIJOULES
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.units import Rate, RateUnit
from weft_testing.fake_clock import FakeClock

PAUSES: dict[str, Any] = {"cooldown_after_refusals": 3, "cooldown_seconds": 10, "max_cooldown_seconds": 40}
PROFILES = {
    "batch": ClientProfile(priority=Priority.LOW, route="drafts", rates=(Rate(2, 60),), **PAUSES),
    "hourly": ClientProfile(rates=(Rate(2, 3600),), **PAUSES),
}
UNLIMITED = RateLimitConfig()


def registry(clock: FakeClock, limits: RateLimitConfig = UNLIMITED, *, max_clients: int = 1024) -> ClientRegistry:
    return ClientRegistry(ClientsConfig(profiles=PROFILES, max_clients=max_clients), limits, clock)


def refused(clients: ClientRegistry, request: PlacementRequest, key: int = 99) -> WeftError:
    with pytest.raises(WeftError) as caught:
        clients.admit(key, request)
    assert caught.value.reason is Reason.RATE_LIMIT_EXCEEDED
    return caught.value


def record_of(clients: ClientRegistry, client_id: str) -> pb.ClientRecord:
    return next(record for record in clients.records() if record.client_id == client_id)


def used(prompt: int, completion: int, outcome: int = receipt_pb2.OUTCOME_COMPLETED) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(outcome=outcome)  # type: ignore[arg-type]
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = prompt, completion
    return receipt


def test_measured_device_time_shares_are_summed_with_their_count() -> None:
    clients = registry(FakeClock())
    known, no_energy, unknown = used(1, 1), used(1, 1), used(1, 1)
    known.device_usage.device_time.FromMilliseconds(700)
    known.device_usage.energy_millijoules = 900
    no_energy.device_usage.device_time.FromMilliseconds(300)
    unknown.device_usage.gap = receipt_pb2.DeviceUsage.GAP_NOT_SAMPLED
    clients.admit(1, asked(client_id="a"))
    clients.note_end(ending(1, receipt=unknown))
    record = record_of(clients, "a")
    assert (record.measured_count, record.HasField("device_time")) == (0, False)
    assert not record.HasField("energy_millijoules")
    for key, receipt in enumerate((known, no_energy)):
        clients.admit(key, asked(client_id="a"))
        clients.note_end(ending(key, receipt=receipt))
    record = record_of(clients, "a")
    assert (record.measured_count, record.device_time.ToMilliseconds(), record.energy_millijoules) == (2, 1_000, 900)


def test_absurd_figures_of_a_runner_are_bounded_as_usage_is() -> None:
    limits = RateLimitConfig(default=(Rate(2**60, 60, RateUnit.TOKENS),))
    clients, absurd = registry(FakeClock(), limits), used(2**62, 2**62)
    absurd.device_usage.device_time.FromSeconds(10**10)
    absurd.device_usage.energy_millijoules = 2**63 - 1
    negative = used(-5, -5)
    negative.device_usage.device_time.FromSeconds(-5)
    negative.device_usage.energy_millijoules = -5
    for key, receipt in enumerate((absurd, absurd, negative)):
        clients.admit(key, asked(client_id="a"))
        clients.note_end(ending(key, receipt=receipt))
    record = record_of(clients, "a")
    assert record.device_time.ToNanoseconds() == 2 * MAX_COUNTED_GPU_NANOSECONDS
    assert record.energy_millijoules == 2 * MAX_COUNTED_MILLIJOULES
    assert [use.used for use in clients.limit_uses("a")] == [4 * MAX_COUNTED_TOKENS]


def test_profile_fills_options_its_client_leaves_unset() -> None:
    clients = registry(FakeClock())
    silent = clients.resolve(asked(client_id="batch", names_priority=False, model="auto"))
    assert (silent.priority, silent.model) == (Priority.LOW, "route/drafts")
    loud = clients.resolve(asked(client_id="batch", priority=Priority.NORMAL, model="qwen"))
    assert (loud.priority, loud.model) == (Priority.NORMAL, "qwen")


@pytest.mark.parametrize("client_id", ["", "somebody"])
def test_options_are_unset_without_a_profile(client_id: str) -> None:
    request = asked(client_id=client_id, names_priority=False, model="auto")
    assert registry(FakeClock()).resolve(request) is request


async def test_client_usage_is_recorded_per_target_and_outcome() -> None:
    clock = FakeClock()
    clients = registry(clock)
    for key in range(4):
        clients.admit(key, asked(client_id="app", model="qwen" if key else "llama"))
        await clock.advance(5)
    clients.note_end(ending(0, receipt=used(10, 20)))
    clients.note_end(ending(1, receipt=used(0, 0, receipt_pb2.OUTCOME_REJECTED)))
    clients.note_end(ending(1, receipt=used(5, 5)))
    record = record_of(clients, "app")
    assert (record.request_count, record.running_count, record.refused_count, record.token_count) == (4, 2, 1, 30)
    assert [(target.target, target.request_count) for target in record.targets] == [("qwen", 3), ("llama", 1)]
    assert record.usual_interval.ToNanoseconds() == 5_000_000_000
    assert (record.last_seen_time.seconds - record.first_seen_time.seconds) == 15
    assert (record.has_profile, record.route) == (False, "")
    clients.admit(9, asked(client_id="batch"))
    record = record_of(clients, "batch")
    assert (record.has_profile, record.route, record.default_priority) == (True, "drafts", Priority.LOW.wire)


async def test_repeatedly_refused_client_is_paused_for_longer_each_time() -> None:
    clock = FakeClock()
    clients = registry(clock)
    request = asked(client_id="hourly")
    clients.admit(1, request)
    clients.admit(2, request)
    pauses = []
    for _ in range(4):
        for _ in range(3):
            assert "exceeded 2 req/hour" in refused(clients, request).message
        error = refused(clients, request)
        assert "was refused too often in a row" in error.message
        assert error.retry_after_seconds is not None
        pauses.append(error.retry_after_seconds)
        assert int(error.metadata["resetAt"]) == int(clock.utc_now().timestamp() + error.retry_after_seconds) + 1
        ends = record_of(clients, "hourly").cooldown_end_time.ToDatetime(tzinfo=UTC)
        assert (ends - clock.utc_now()).total_seconds() == pytest.approx(error.retry_after_seconds)
        await clock.advance(error.retry_after_seconds)
    assert pauses == [10, 20, 40, 40]


async def test_refusal_during_a_pause_does_not_extend_it() -> None:
    clock = FakeClock()
    clients = registry(clock)
    request = asked(client_id="batch")
    for key in range(2):
        clients.admit(key, request)
    for _ in range(3):
        refused(clients, request)
    for _ in range(50):
        refused(clients, request)
    await clock.advance(10)
    assert "exceeded" in refused(clients, request).message, "the pause is over; the window is not"
    await clock.advance(60)
    clients.admit(50, request)
    assert not record_of(clients, "batch").HasField("cooldown_end_time")


async def test_client_of_one_tenant_does_not_affect_another_tenant() -> None:
    clients = registry(FakeClock())
    for key in range(2):
        clients.admit(key, asked(client_id="batch", tenant="loud"))
    for _ in range(4):
        refused(clients, asked(client_id="batch", tenant="loud"))
    clients.admit(5, asked(client_id="batch", tenant="quiet"))
    assert record_of(clients, "batch").request_count == 7, "the record sums over tenants"


async def test_tenants_are_limited_in_requests_and_tokens() -> None:
    clock = FakeClock()
    limits = RateLimitConfig(
        default=(Rate(3, 60), Rate(100, 60, RateUnit.TOKENS)), tenants={"big": (Rate(1000, 60, RateUnit.TOKENS),)}
    )
    clients = registry(clock, limits)
    clients.admit(1, asked(prompt_tokens=80))
    error = refused(clients, asked(prompt_tokens=30))
    assert "Tenant a exceeded 100 tok/min" in error.message
    assert (error.metadata["tenant"], error.metadata["limit"], error.metadata["remaining"]) == ("a", "100", "20")
    for key in (2, 3):
        clients.admit(key, asked(prompt_tokens=1))
    assert "3 req/min" in refused(clients, asked(prompt_tokens=1)).message
    for key in range(10, 20):
        clients.admit(key, asked(tenant="big", prompt_tokens=100))
    assert "Tenant big exceeded 1000 tok/min" in refused(clients, asked(tenant="big", prompt_tokens=1)).message


async def test_tokens_of_a_request_without_runner_work_are_refunded() -> None:
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(100, 60, RateUnit.TOKENS),)))
    clients.admit(1, asked(prompt_tokens=100))
    clients.note_end(ending(1, receipt=used(0, 0, receipt_pb2.OUTCOME_REJECTED)))
    clients.admit(2, asked(prompt_tokens=100))
    clients.note_end(ending(2))
    refused(clients, asked(prompt_tokens=1))


async def test_rejection_without_a_receipt_refunds_its_tokens() -> None:
    """Over gRPC a rejection ends the call, and with it the way for a receipt."""
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(100, 60, RateUnit.TOKENS),)))
    clients.admit(1, asked(prompt_tokens=100, client_id="app"))
    clients.note_rejected(1, Reason.QUEUE_FULL)
    clients.note_end(ending(1))
    clients.admit(2, asked(prompt_tokens=100, client_id="app"))
    clients.note_rejected(2, Reason.WORKER_LOST)
    clients.note_end(ending(2))
    record = record_of(clients, "app")
    assert (record.refused_count, record.token_count) == (1, 100), "on the second one somebody may have worked"
    refused(clients, asked(prompt_tokens=1))


async def test_tokens_of_a_request_that_failed_while_running_are_not_refunded() -> None:
    """A deadline of one second would make every prompt free."""
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(100, 60, RateUnit.TOKENS),)))
    clients.admit(1, asked(prompt_tokens=100))
    clients.note_end(ending(1, receipt=receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED)))
    refused(clients, asked(prompt_tokens=1))


async def test_request_cancelled_before_any_work_costs_no_tokens_despite_attempts() -> None:
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(100, 60, RateUnit.TOKENS),)))
    clients.admit(1, asked(prompt_tokens=100))
    clients.note_rejected(1, Reason.QUEUE_TIMEOUT)
    clients.note_end(ending(1, receipt=receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED)))
    clients.admit(2, asked(prompt_tokens=100))


async def test_mesh_requests_and_those_counted_by_another_router_are_not_counted() -> None:
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(1, 60),)))
    clients.admit(1, asked(priority=Priority.SYSTEM))
    clients.admit(2, asked(age_seconds=3.0, is_counted=True))
    clients.admit(3, asked())
    refused(clients, asked())


async def test_durable_requests_counted_at_submission_are_not_counted_again() -> None:
    durable = asked(priority=Priority.DURABLE, names_priority=False, client_id="batch")
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(1, 60),)))
    assert clients.resolve(durable).priority is Priority.DURABLE
    for key in range(10):
        clients.admit(key, durable)
        clients.note_end(ending(key))
    clients.admit(20, asked())
    refused(clients, asked())
    assert clients.records() == [], "being offered again and again is not asking"


async def test_most_recently_seen_client_is_evicted_last() -> None:
    clients = registry(FakeClock(), max_clients=2)
    for key, client in enumerate(["one", "two", "one", "three"]):
        clients.admit(key, asked(client_id=client))
    assert [record.client_id for record in clients.records()] == ["one", "three"]
    clients.note_end(ending(1, receipt=used(1, 1)))


def test_client_targets_are_bounded() -> None:
    clients = registry(FakeClock())
    for turn in range(1_000):
        clients.admit(2 * turn, asked(client_id="app", model="often"))
        clients.admit(2 * turn + 1, asked(client_id="app", model=f"once-{turn}"))
    targets = record_of(clients, "app").targets
    assert len(targets) == MAX_TARGETS_TOLD
    assert (targets[0].target, targets[0].request_count) == ("often", 1_000)
    [kept] = clients.take_changed()
    assert len(kept.record.targets) == MAX_TARGETS_COUNTED
    assert MAX_TARGETS_TOLD < MAX_TARGETS_COUNTED


def test_pauses_double_up_to_their_bound_and_reset_after_a_calm_period() -> None:
    rule = CooldownRule(after_refusals=1, seconds=10, max_seconds=30)
    cooldown, now, pauses = Cooldown(), 0.0, []
    for _ in range(4):
        cooldown.note_refused(rule, now)
        pauses.append(cooldown.seconds_left(now))
        now = cooldown.ends_at
    assert pauses == [10, 20, 30, 30]
    cooldown.note_refused(rule, now + 30.1)
    assert cooldown.seconds_left(now + 30.1) == pytest.approx(10)


def test_admitted_request_resets_the_refusal_count() -> None:
    rule, cooldown = CooldownRule(after_refusals=2), Cooldown()
    cooldown.note_refused(rule, 0.0)
    cooldown.note_allowed()
    cooldown.note_refused(rule, 0.0)
    assert cooldown.seconds_left(0.0) == 0
    never = CooldownRule(after_refusals=0)
    for _ in range(100):
        cooldown.note_refused(never, 0.0)
    assert cooldown.seconds_left(0.0) == 0


async def test_durable_requests_are_counted_and_leave_part_of_each_window_to_callers() -> None:
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(10, 60),), spared_for_callers_percent=20))
    durable = asked(priority=Priority.DURABLE, client_id="batch")
    for key in range(8):
        clients.admit(key, durable)
    error = refused(clients, durable)
    assert error.retry_after_seconds == pytest.approx(60)
    for key in (8, 9):
        assert clients.admit(key, asked()) is not None
    refused(clients, asked())


async def test_unused_durable_work_is_refunded_and_used_work_is_corrected() -> None:
    limits = RateLimitConfig(default=(Rate(100, 60, RateUnit.TOKENS), Rate(10, 60)))
    clients = registry(FakeClock(), limits)
    durable = asked(priority=Priority.DURABLE, prompt_tokens=40)
    clients.admit(1, durable)
    clients.note_end(ending(1))
    clients.admit(2, durable)
    clients.note_end(ending(2, receipt=receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED)))
    assert clients.limit_uses("a") == []
    clients.admit(3, durable)
    clients.note_end(ending(3, receipt=used(30, 25)))
    assert [use.used for use in clients.limit_uses("a")] == [55, 1]
    clients.admit(4, asked(priority=Priority.DURABLE, prompt_tokens=25))
    refused(clients, asked(priority=Priority.DURABLE, prompt_tokens=1))


async def test_window_of_one_request_is_not_reserved_for_callers() -> None:
    clients = registry(FakeClock(), RateLimitConfig(default=(Rate(1, 60),)))
    clients.admit(1, asked(priority=Priority.DURABLE))
    refused(clients, asked(priority=Priority.DURABLE))

"""Inference on one runner: its queue, its limits per tenant, and the metrics from requests."""

import pytest
from gateway_script import ScriptedDispatcher, serving
from openai import RateLimitError
from runner_api_stage import edge, runner_api

from gateway.gateway_config import GatewayConfig, RateLimitConfig
from gateway.runner_api.deps import RunnerApiConfig
from gateway.runner_api.facts import TTL_SECONDS
from weft.api.common.v1 import receipt_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import Rate
from weft_testing.fake_clock import FakeClock

TIGHT = RateLimitConfig(default=Rate(2, 60), tenants={"big": Rate(5, 60)})


async def test_answer_headers_report_cache_queue_and_gpu_time() -> None:
    async with runner_api() as stage:
        answer = await stage.chat()
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == "Hello, world"
    told = {name: answer.headers[name] for name in ("x-cache-hit", "x-cache-tokens-reused", "x-queue-wait-ms")}
    assert told == {"x-cache-hit": "true", "x-cache-tokens-reused": "5", "x-queue-wait-ms": "150"}
    assert answer.headers["x-gpu-time-ms"] == "450"


async def test_full_queue_returns_503_with_its_depth_before_placement() -> None:
    dispatcher = ScriptedDispatcher()
    async with runner_api(dispatcher) as stage:
        stage.queue.load = (16, 4)
        answer = await stage.chat()
        assert_queue_full(answer.status, answer.error, "Queue depth 16/16, retry in 5 seconds", 16)
        assert answer.headers["retry-after"] == "5"
        stage.queue.load = (15, 4)
        assert (await stage.chat()).status == 200


def assert_queue_full(status: int, error: dict[str, object], message: str, depth: int) -> None:
    assert status == 503
    assert (error["code"], error["message"]) == ("queue_full", message)
    assert (error["queueDepth"], error["avgWaitMs"]) == (depth, None)


async def test_queue_full_at_the_scheduler_is_reported_the_same_way() -> None:
    full = ScriptedDispatcher([WeftError(Reason.QUEUE_FULL, "the queue for tiny is full", retry_after_seconds=7.0)])
    async with runner_api(full) as stage:
        stage.queue.load = (4, 1)
        answer = await stage.chat()
    assert_queue_full(answer.status, answer.error, "Queue depth 4/16, retry in 7 seconds", 4)


async def test_queue_depth_zero_defers_to_the_scheduler() -> None:
    async with runner_api(config=RunnerApiConfig(max_queue_depth=0)) as stage:
        assert (await stage.chat()).status == 200


class Granted(ScriptedDispatcher):
    """Its receipts have an attempt, a wait of 150 ms, and a load of 1 s."""

    def receipt(self) -> receipt_pb2.Receipt:
        receipt = super().receipt()
        receipt.attempts.add(runner="gpu-0")
        return receipt


async def test_queue_waits_show_in_rejections_capabilities_and_metrics() -> None:
    clock = FakeClock()
    async with runner_api(Granted(), clock=clock) as stage:
        assert (await stage.chat()).status == 200
        stage.queue.load = (16, 4)
        assert (await stage.chat()).error["avgWaitMs"] == 150
        await clock.advance(TTL_SECONDS, sleepers=1)
        queue = (await stage.get("/v1/capabilities")).json["queue"]
        metrics = (await stage.get("/metrics")).text
    assert queue == {"depth": 16, "maxDepth": 16, "avgWaitMs": 150, "p95WaitMs": 150}
    assert 'weft_runner_queue_wait_seconds_count{model="tiny"} 1.0' in metrics
    assert 'weft_runner_inference_duration_seconds_count{model="tiny"} 1.0' in metrics
    assert 'weft_runner_requests_total{model="tiny",status="queue_full",tenant="default"} 1.0' in metrics


async def test_request_without_a_slot_is_not_counted_as_inference_or_wait() -> None:
    async with runner_api(ScriptedDispatcher([WeftError(Reason.MODEL_NOT_FOUND, "no such model")])) as stage:
        await stage.chat()
        metrics = (await stage.get("/metrics")).text
    assert "weft_runner_inference_duration_seconds_count" not in metrics
    assert "weft_runner_queue_wait_seconds_count" not in metrics


async def test_tenant_over_its_rate_gets_429_and_others_continue() -> None:
    async with runner_api(config=edge(rate_limits=TIGHT)) as stage:
        assert [(await stage.chat(X_Tenant_ID="x")).status for _ in range(3)] == [200, 200, 429]
        refused = await stage.chat(X_Tenant_ID="x")
        assert (await stage.chat(X_Tenant_ID="y")).status == 200
        assert [(await stage.chat(X_Tenant_ID="big")).status for _ in range(6)] == [200] * 5 + [429]
        metrics = (await stage.get("/metrics")).text
    assert 'weft_runner_requests_total{model="tiny",status="rate_limit_exceeded",tenant="x"} 2.0' in metrics
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    error = refused.error
    assert (error["code"], error["message"]) == ("rate_limit_exceeded", "Tenant x exceeded 2 req/min")
    assert (error["limit"], error["remaining"]) == (2, 0)
    assert isinstance(error["resetAt"], int)


async def test_rate_limit_applies_before_queueing() -> None:
    dispatcher = ScriptedDispatcher()
    async with runner_api(dispatcher, config=edge(rate_limits=TIGHT)) as stage:
        for _ in range(5):
            await stage.chat()
    assert len(dispatcher.contexts) == 2


@pytest.mark.parametrize("path", ["/v1/capabilities", "/health", "/v1/models"])
async def test_non_inference_requests_are_not_rate_limited(path: str) -> None:
    async with runner_api(config=edge(rate_limits=RateLimitConfig(default=Rate(1, 60)))) as stage:
        for _ in range(5):
            assert (await stage.get(path)).status == 200
        assert (await stage.chat()).status == 200


async def test_gateway_enforces_the_same_rates_if_configured() -> None:
    config = GatewayConfig(port=0, rate_limits=RateLimitConfig(default=Rate(1, 60)))
    async with serving(config=config) as gateway:
        create = gateway.sdk.chat.completions.create
        await create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(RateLimitError) as refused:
            await create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "rate_limit_exceeded"


@pytest.mark.slow("runs whole services")
async def test_gateway_has_no_rate_limit_by_default() -> None:
    async with serving() as gateway:
        for _ in range(60):
            await gateway.sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert len(gateway.dispatcher.contexts) == 60

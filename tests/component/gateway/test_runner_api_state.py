"""GET /v1/capabilities, /health and /metrics of one runner."""

import pytest
from kit.runner_facts import model_facts
from prometheus_client.parser import text_string_to_metric_families
from runner_api_stage import GIB, ScriptedRunner, device, facts, runner_api

from gateway.runner_api.deps import RunnerApiConfig
from gateway.runner_api.facts import STALE_SECONDS, TTL_SECONDS, ModelStage, RunnerStage
from gateway.runner_api.runner_api_metrics import MAX_TENANT_LABELS
from weft.gpu.snapshot import DeviceSnapshot
from weft_testing.fake_clock import FakeClock

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_capabilities_have_a_lifetime_of_five_seconds() -> None:
    async with runner_api() as stage:
        answer = await stage.get("/v1/capabilities")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "max-age=5"
    assert answer.json["runnerId"] == "gpu-0"
    assert answer.json["models"]["loaded"][0]["gpuMemoryMB"] == 2048
    assert answer.json["models"]["available"] == ["small"]
    assert answer.json["resources"]["gpuMemoryFreeMB"] == 5 * 1024
    assert answer.json["queue"] == {"depth": 0, "maxDepth": 16, "avgWaitMs": None, "p95WaitMs": None}


async def test_head_request_returns_headers_without_a_body() -> None:
    async with runner_api() as stage:
        answer = await stage.ask("HEAD", "/v1/capabilities")
    assert (answer.status, answer.text) == (200, "")


async def test_capabilities_are_cached_and_refreshed_in_the_background() -> None:
    clock, runner = FakeClock(), ScriptedRunner()
    async with runner_api(runner=runner, clock=clock) as stage:
        runner.seen = (device(5, GIB),)
        held = await stage.get("/v1/capabilities")
        await clock.advance(TTL_SECONDS, sleepers=1)
        fresh = await stage.get("/v1/capabilities")
    assert held.json["resources"]["gpuIds"] == [0]
    assert fresh.json["resources"]["gpuIds"] == [5]


async def test_model_that_became_ready_is_reported_immediately() -> None:
    async with runner_api(clock=FakeClock()) as stage:
        assert [entry["id"] for entry in (await stage.get("/v1/capabilities")).json["models"]["loaded"]] == ["tiny"]
        models = [model_facts(one.name, ModelStage.LOADED) for one in stage.runner.told.models]
        stage.runner.told = facts(RunnerStage.SERVING, *models)
        after = (await stage.get("/v1/capabilities")).json["models"]
    assert ([entry["id"] for entry in after["loaded"]], after["available"]) == (["tiny", "small"], [])


async def test_capabilities_that_cannot_be_refreshed_are_served_until_stale() -> None:
    clock = FakeClock()

    class Breaking(ScriptedRunner):
        is_broken = False

        async def devices(self) -> tuple[DeviceSnapshot, ...] | None:
            if self.is_broken:
                raise RuntimeError("the driver is gone")
            return self.seen

    runner = Breaking()
    async with runner_api(runner=runner, clock=clock) as stage:
        runner.is_broken = True
        await clock.advance(TTL_SECONDS, sleepers=1)
        assert (await stage.get("/v1/capabilities")).status == 200
        await clock.advance(STALE_SECONDS, sleepers=1)
        stale = await stage.get("/v1/capabilities")
        runner.is_broken = False
        await clock.advance(TTL_SECONDS, sleepers=1)
        assert (await stage.get("/v1/capabilities")).status == 200
    assert (stale.status, stale.error["code"]) == (503, "service_unavailable")


@pytest.mark.parametrize(
    ("stage", "code", "words"),
    [
        (RunnerStage.STARTING, "service_unavailable", "starting"),
        (RunnerStage.STOPPING, "shutting_down", "shutting down"),
    ],
)
async def test_starting_or_stopping_runner_returns_503_for_capabilities(
    stage: RunnerStage, code: str, words: str
) -> None:
    async with runner_api() as api:
        assert (await api.get("/v1/capabilities")).status == 200
        api.runner.told = facts(stage)
        answer = await api.get("/v1/capabilities")
    assert (answer.status, answer.error["code"]) == (503, code)
    assert words in answer.error["message"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_health_reports_status_uptime_models_and_queue_depth() -> None:
    clock = FakeClock()
    async with runner_api(clock=clock) as stage:
        stage.queue.load = (3, 1)
        await clock.advance(90, sleepers=1)
        answer = await stage.get("/health")
    assert answer.status == 200
    assert answer.json == {"status": "healthy", "uptime": 90, "modelsLoaded": 1, "queueDepth": 3}


@pytest.mark.parametrize(
    ("told", "waiting", "reason"),
    [
        (facts(), 16, "queue_saturated"),
        (facts(RunnerStage.SERVING, model_facts("tiny", ModelStage.FAILED)), 0, "all_models_failed"),
        (
            facts(RunnerStage.SERVING, model_facts("tiny", ModelStage.LOADING, out_of_memory=True)),
            0,
            "gpu_out_of_memory",
        ),
    ],
)
async def test_unhealthy_runner_returns_503_with_the_reason(told: object, waiting: int, reason: str) -> None:
    async with runner_api(runner=ScriptedRunner(told)) as stage:  # type: ignore[arg-type]
        stage.queue.load = (waiting, 4)
        answer = await stage.get("/health")
    assert answer.status == 503
    assert (answer.json["status"], answer.json["reason"]) == ("unhealthy", reason)
    assert answer.error["message"]
    assert "retry-after" in answer.headers


async def test_metrics_include_queue_and_devices() -> None:
    async with runner_api() as stage:
        stage.queue.load = (3, 1)
        found = samples((await stage.get("/metrics")).text)
    assert found["weft_runner_queue_depth", ()] == 3
    assert found["weft_runner_gpu_memory_used_bytes", (("gpu", "0"),)] == 3 * GIB


async def test_tenant_cardinality_in_metrics_is_bounded() -> None:
    async with runner_api() as stage:
        for number in range(MAX_TENANT_LABELS + 20):
            await stage.chat(X_Tenant_ID=f"t{number}")
        found = samples((await stage.get("/metrics")).text)
    tenants = {dict(labels)["tenant"] for name, labels in found if name == "weft_runner_requests_total"}
    assert len(tenants) == MAX_TENANT_LABELS + 1
    assert found["weft_runner_requests_total", (("model", "tiny"), ("status", "success"), ("tenant", "other"))] == 20


async def test_metrics_can_be_disabled() -> None:
    async with runner_api(config=RunnerApiConfig(metrics=False, metrics_port=0)) as stage:
        assert (await stage.get("/metrics")).status == 404
        assert stage.service.metrics_url == ""


async def test_metrics_can_use_a_separate_port_that_serves_nothing_else() -> None:
    async with runner_api(config=RunnerApiConfig(metrics_port=0)) as stage:
        there = stage.service.metrics_url
        assert there != stage.service.url
        assert (await stage.get(f"{there}/metrics")).status == 200
        assert (await stage.get(f"{there}/v1/capabilities")).status == 404
        assert (await stage.get("/metrics")).status == 200


async def test_openapi_document_lists_every_route() -> None:
    async with runner_api() as stage:
        document = (await stage.get("/openapi.json")).json
    paths = document["paths"]
    assert {
        "/v1/capabilities",
        "/v1/models/load",
        "/v1/models/load/{task}",
        "/v1/models/unload",
        "/v1/cache/flush",
        "/health",
        "/metrics",
        "/v1/chat/completions",
        "/v1/models",
    } <= set(paths)
    assert not any(path.startswith(("/api/", "/v1/admin")) for path in paths)
    schemas = document["components"]["schemas"]
    assert "gpuMemoryBudgetMB" in schemas["LoadBody"]["properties"]

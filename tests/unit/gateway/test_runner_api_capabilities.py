"""Facts to JSON: unknown values are null."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from kit.runner_facts import model_facts as model

from gateway.runner_api.capabilities import MEBIBYTE, capabilities_body, verdict_of
from gateway.runner_api.facts import ModelFacts, ModelStage, RunnerFacts, RunnerStage
from gateway.runner_api.runner_api_metrics import MAX_WAITS, WINDOW_SECONDS, QueueFacts, RequestObserver
from weft.api.registry.v1.runner_pb2 import EngineLoad
from weft.api.runner.v1.runner_service_pb2 import CacheFigures
from weft.gpu.snapshot import DeviceSnapshot, DeviceUse
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft_testing.fake_clock import FakeClock

GIB = 1024 * MEBIBYTE
QUEUE = QueueFacts(depth=3, max_depth=16, average_wait_ms=150, p95_wait_ms=450)


def runner(*models: ModelFacts, stage: RunnerStage = RunnerStage.SERVING) -> RunnerFacts:
    return RunnerFacts(name="gpu-0", kind="llama_server-weft-0.1.0", stage=stage, models=models)


def device(index: int, total_bytes: int, **figures: Any) -> DeviceSnapshot:
    return DeviceSnapshot(index=index, id=f"GPU-{index}", name="Big", total_bytes=total_bytes, **figures)


def test_descriptor_has_the_specified_shape() -> None:
    facts = runner(
        model(
            quantization="q4_k_m",
            context_tokens=32768,
            loaded_at=1745880000,
            memory_bytes=24 * GIB,
            takes_chats=True,
            tenants_apart=True,
        ),
        model("small", ModelStage.LOADING, load_progress=0.45, load_eta=timedelta(seconds=179.6), tenants_apart=True),
        model("asleep", ModelStage.AVAILABLE, tenants_apart=True),
        model("broken", ModelStage.FAILED, tenants_apart=True),
    )
    devices = (device(0, 80 * GIB, used_bytes=58 * GIB, utilization=0.67),)
    assert capabilities_body(facts, devices, QUEUE) == {
        "runnerType": "llama_server-weft-0.1.0",
        "runnerId": "gpu-0",
        "models": {
            "loaded": [
                {
                    "id": "qwen",
                    "quantization": "q4_k_m",
                    "contextLength": 32768,
                    "loadedAt": 1745880000,
                    "gpuMemoryMB": 24576,
                    "weightsMB": None,
                    "kvCacheMB": None,
                    "kvCacheTokens": None,
                    "kvCacheUtilization": None,
                }
            ],
            "loading": [{"id": "small", "progress": 0.45, "eta": 180}],
            "available": ["asleep", "broken"],
        },
        "resources": {
            "gpuIds": [0],
            "gpuMemoryTotalMB": 81920,
            "gpuMemoryUsedMB": 59392,
            "gpuMemoryFreeMB": 22528,
            "gpuUtilization": 0.67,
            "kvCacheSizeMB": None,
            "kvCacheUtilization": None,
            "devices": [
                {
                    "id": 0,
                    "uuid": devices[0].id,
                    "name": devices[0].name,
                    "memoryTotalMB": 81920,
                    "memoryUsedMB": 59392,
                    "memoryByModelMB": {},
                    "memoryForeignMB": None,
                    "utilization": 0.67,
                    "utilizationLastMinute": None,
                    "powerWatts": None,
                    "energyJoules": None,
                }
            ],
        },
        "queue": {"depth": 3, "maxDepth": 16, "avgWaitMs": 150, "p95WaitMs": 450},
        "capabilities": {
            "streaming": True,
            "prefixCaching": True,
            "multiTenant": True,
            "visionInput": False,
            "audioInput": False,
            "functionCalling": True,
        },
        "health": "degraded",
    }


def resources(devices: tuple[DeviceSnapshot, ...] | None) -> object:
    return capabilities_body(runner(), devices, QUEUE)["resources"]


def test_unavailable_host_has_nulls_and_not_zeros() -> None:
    assert set(dict.fromkeys(resources(None).values())) == {None}  # type: ignore[attr-defined]


def test_device_shows_power_and_memory_holders() -> None:
    use = DeviceUse(mean_utilization=0.33333, bytes_by_model={"b": None, "a": GIB}, foreign_bytes=GIB // 2)
    facts = replace(runner(), device_use={0: use})
    figures = (device(0, 4 * GIB, power_milliwatts=120_460, energy_millijoules=5_000), device(1, GIB))
    found: Any = capabilities_body(facts, figures, QUEUE)["resources"]
    first, second = found["devices"]
    assert (first["powerWatts"], first["energyJoules"], first["utilizationLastMinute"]) == (120.5, 5.0, 0.333)
    assert (first["memoryByModelMB"], first["memoryForeignMB"]) == ({"a": 1024, "b": None}, 512)
    assert (second["powerWatts"], second["energyJoules"], second["memoryForeignMB"]) == (None, None, None)


def _with_load(name: str, **load: Any) -> ModelFacts:
    found = model(name)
    found.state.engine_load.CopyFrom(EngineLoad(**load))
    return found


def _cache(*models: ModelFacts) -> tuple[object, object]:
    found: Any = capabilities_body(runner(*models), (), QUEUE)["resources"]
    return found["kvCacheSizeMB"], found["kvCacheUtilization"]


def test_kv_cache_is_known_if_each_engine_reports_its_own() -> None:
    half = _with_load("a", kv_cache_bytes=3 * GIB, kv_cache_share=0.5)
    assert _cache(half) == (3072, 0.5)
    assert _cache(half, _with_load("b", kv_cache_bytes=GIB, kv_cache_share=0.1)) == (4096, 0.4), "by size"
    assert _cache(half, _with_load("b", kv_cache_bytes=GIB)) == (4096, None)
    assert _cache(half, _with_load("b")) == (None, None), "the other engine says nothing"
    assert _cache(half, model("b", ModelStage.AVAILABLE)) == (3072, 0.5), "what is not loaded has none"


def test_host_without_accelerators_has_no_ids_and_no_memory() -> None:
    found = resources(())
    assert (found["gpuIds"], found["gpuMemoryTotalMB"], found["gpuUtilization"]) == ([], 0, None)  # type: ignore[index]


def test_unknown_use_of_one_device_makes_the_sum_unknown_but_not_the_size() -> None:
    devices = (
        device(0, GIB, used_bytes=GIB // 2, utilization=0.5),
        device(1, GIB),
    )
    found = resources(devices)
    assert isinstance(found, dict)
    assert found["gpuMemoryTotalMB"] == 2048
    assert (found["gpuMemoryUsedMB"], found["gpuMemoryFreeMB"], found["gpuUtilization"]) == (None, None, None)


@pytest.mark.parametrize(
    ("apart", "told"), [([True, True], True), ([True, False], False), ([True, None], None), ([], None)]
)
def test_tenants_are_isolated_only_if_every_model_isolates_them(apart: list[bool | None], told: bool | None) -> None:
    body = capabilities_body(runner(*(model(str(at), tenants_apart=how) for at, how in enumerate(apart))), (), QUEUE)
    assert body["capabilities"]["multiTenant"] is told  # type: ignore[index]


def test_prefix_cache_of_an_attached_server_is_unknown_until_a_hit() -> None:
    unseen = capabilities_body(runner(model(tenants_apart=False)), (), QUEUE)
    seen = capabilities_body(runner(model(tenants_apart=False, cache=CacheFigures(hit_count=1))), (), QUEUE)
    assert unseen["capabilities"]["prefixCaching"] is None  # type: ignore[index]
    assert seen["capabilities"]["prefixCaching"] is True  # type: ignore[index]


@pytest.mark.parametrize(
    ("models", "waiting", "status", "reason"),
    [
        ([model()], 15, "healthy", ""),
        ([model()], 16, "unhealthy", "queue_saturated"),
        ([model(), model("b", ModelStage.FAILED)], 0, "degraded", ""),
        ([model(stage=ModelStage.FAILED), model("b", ModelStage.FAILED)], 0, "unhealthy", "all_models_failed"),
        ([model(), model("b", ModelStage.LOADING, out_of_memory=True)], 0, "unhealthy", "gpu_out_of_memory"),
        ([model(stage=ModelStage.AVAILABLE)], 0, "healthy", ""),
        ([], 0, "healthy", ""),
    ],
)
def test_runner_is_unhealthy_for_three_reasons_only(
    models: list[ModelFacts], waiting: int, status: str, reason: str
) -> None:
    verdict = verdict_of(runner(*models), QueueFacts(depth=waiting, max_depth=16))
    assert (verdict.status, verdict.reason) == (status, reason)


def test_runner_without_a_queue_is_never_saturated() -> None:
    assert verdict_of(runner(model()), QueueFacts(depth=0, max_depth=0)).status == "healthy"


class Idle:
    load = (0, 0)


def observer(clock: FakeClock) -> RequestObserver:
    return RequestObserver(MetricsPage(), queue=Idle(), max_queue_depth=16, model_label=str, clock=clock)


def waits(seen: RequestObserver) -> tuple[int | None, int | None]:
    queue = seen.queue_facts()
    return queue.average_wait_ms, queue.p95_wait_ms


def test_wait_percentiles_come_from_samples_and_are_null_without_any() -> None:
    seen = observer(FakeClock())
    assert waits(seen) == (None, None)
    for wait in range(1, 100):
        seen.note_wait(wait / 1000)
    assert waits(seen) == (50, 95)


async def test_wait_samples_expire_and_are_bounded() -> None:
    clock = FakeClock()
    seen = observer(clock)
    for _ in range(MAX_WAITS):
        seen.note_wait(10.0)
    for _ in range(MAX_WAITS):
        seen.note_wait(1.0)
    assert waits(seen)[0] == 1000
    await clock.advance(WINDOW_SECONDS + 1)
    assert waits(seen) == (None, None)

"""A runner's description as the values of its HTTP surface."""

from typing import Any

import pytest

from gateway.runner_api.capabilities import capabilities_body
from gateway.runner_api.facts import ModelStage, RunnerStage
from gateway.runner_api.runner_api_metrics import QueueFacts
from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1 import runner_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, Source
from weft_app.compose.runner_http import runner_facts, usable_devices

Phase = runner_pb2.InstanceState.Phase


def told(phase: str = "PHASE_READY", *, draining: bool = False) -> pb.DescribeResponse:
    state = runner_pb2.InstanceState(model="qwen", phase=Phase.Value(phase), slots_used=2, context_tokens=4096)
    runner = runner_pb2.Runner(name="a", runtime="llama_server", version="0.1.0")
    runner.capability.CopyFrom(runner_pb2.Capability(instances=[state], draining=draining))
    return pb.DescribeResponse(runner=runner, instances=[pb.InstanceDescription(model="qwen")])


@pytest.mark.parametrize(
    ("phase", "stage"),
    [
        ("PHASE_READY", ModelStage.LOADED),
        ("PHASE_DRAINING", ModelStage.LOADED),
        ("PHASE_LOADING", ModelStage.LOADING),
        ("PHASE_CRASH_LOOP", ModelStage.FAILED),
        ("PHASE_FAILED", ModelStage.FAILED),
        ("PHASE_HIBERNATING", ModelStage.AVAILABLE),
        ("PHASE_IDLE", ModelStage.AVAILABLE),
        ("PHASE_STOPPING", ModelStage.AVAILABLE),
    ],
)
def test_every_phase_has_a_stage(phase: str, stage: ModelStage) -> None:
    assert runner_facts(told(phase), RunnerStage.SERVING, ()).models[0].stage is stage


def test_undeclared_fact_is_unknown() -> None:
    (model,) = runner_facts(told(), RunnerStage.SERVING, ()).models
    assert (model.memory_bytes, model.loaded_at, model.tenants_apart) == (None, None, None)
    facts = runner_facts(told("PHASE_LOADING"), RunnerStage.SERVING, ())
    queue = QueueFacts(depth=0, max_depth=1)
    body: Any = capabilities_body(facts, None, queue)
    assert body["models"]["loading"] == [{"id": "qwen", "progress": None, "eta": None}]
    loaded: Any = capabilities_body(
        runner_facts(told(), RunnerStage.SERVING, ()), None, QueueFacts(depth=0, max_depth=1)
    )
    assert loaded["models"]["loaded"][0]["quantization"] is None


def test_measured_memory_takes_precedence_over_the_lease() -> None:
    description = told()
    memory = description.runner.capability.instances[0].memory
    memory.leased_bytes = 10
    assert runner_facts(description, RunnerStage.SERVING, ()).models[0].memory_bytes == 10
    memory.measured_bytes = 0
    assert runner_facts(description, RunnerStage.SERVING, ()).models[0].memory_bytes == 0


def test_only_a_loaded_model_has_a_load_time() -> None:
    description = told()
    description.instances[0].last_ready_time.seconds = 1745880000
    assert runner_facts(description, RunnerStage.SERVING, ()).models[0].loaded_at == 1745880000
    description.runner.capability.instances[0].phase = runner_pb2.InstanceState.PHASE_HIBERNATING
    assert runner_facts(description, RunnerStage.SERVING, ()).models[0].loaded_at is None


def test_draining_runner_is_stopping_in_any_stage() -> None:
    assert runner_facts(told(draining=True), RunnerStage.STARTING, ()).stage is RunnerStage.STOPPING
    assert runner_facts(told(), RunnerStage.STARTING, ()).stage is RunnerStage.STARTING


def test_out_of_memory_counts_until_the_model_is_ready_again() -> None:
    description = told("PHASE_CRASH_LOOP")
    fault = description.instances[0].restarts.add(reason=error_reason_pb2.ERROR_REASON_OUT_OF_MEMORY)
    assert runner_facts(description, RunnerStage.SERVING, ()).models[0].out_of_memory
    fault.recovery.FromMilliseconds(5)
    assert not runner_facts(description, RunnerStage.SERVING, ()).models[0].out_of_memory
    fault.ClearField("recovery")
    description.runner.capability.instances[0].phase = runner_pb2.InstanceState.PHASE_READY
    assert not runner_facts(description, RunnerStage.SERVING, ()).models[0].out_of_memory


def test_cache_figures_and_isolation_are_passed_on() -> None:
    description = told()
    description.instances[0].cache_isolation = pb.CACHE_ISOLATION_SLOTS
    description.instances[0].cache.hit_count = 3
    (model,) = runner_facts(description, RunnerStage.SERVING, ["qwen"]).models
    assert (model.tenants_apart, model.description.cache.hit_count, model.takes_chats) == (True, 3, True)


def sight(source: Source, *indexes: int) -> HostSnapshot:
    devices = [DeviceSnapshot(index=index, id=str(index), name="x", total_bytes=100, used_bytes=7) for index in indexes]
    return HostSnapshot(host="h", source=source, devices=tuple(devices))


def test_only_devices_allowed_for_the_runner_are_listed() -> None:
    assert usable_devices(sight(Source.NVML, 0, 1, 2), [1]) == sight(Source.NVML, 1).devices
    assert len(usable_devices(sight(Source.NVML, 0, 1, 2), ()) or ()) == 3


def test_hanging_library_is_unknown_and_not_zero_devices() -> None:
    assert usable_devices(sight(Source.UNKNOWN), ()) is None
    assert usable_devices(sight(Source.NVML), ()) == ()

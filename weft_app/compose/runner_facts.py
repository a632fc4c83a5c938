"""What a runner says of itself over gRPC, as the values of its HTTP surface: the same words, told twice."""

from collections.abc import Collection
from datetime import UTC

from gateway.runner_api.facts import CacheCounts, DeviceFacts, ModelFacts, ModelStage, RunnerFacts, RunnerStage
from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1 import runner_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.gpu.snapshot import HostSnapshot, Source

_STAGES = {
    runner_pb2.InstanceState.PHASE_READY: ModelStage.LOADED,
    # It finishes what runs.
    runner_pb2.InstanceState.PHASE_DRAINING: ModelStage.LOADED,
    runner_pb2.InstanceState.PHASE_LOADING: ModelStage.LOADING,
    runner_pb2.InstanceState.PHASE_CRASH_LOOP: ModelStage.FAILED,
    runner_pb2.InstanceState.PHASE_FAILED: ModelStage.FAILED,
}
_APART = {
    pb.CACHE_ISOLATION_SLOTS: True,
    pb.CACHE_ISOLATION_WHOLE: True,
    pb.CACHE_ISOLATION_SALT: True,
    pb.CACHE_ISOLATION_NONE: False,
}


def runner_facts(told: pb.DescribeResponse, stage: RunnerStage, chat_models: Collection[str]) -> RunnerFacts:
    """The facts in a runner's description; `chat_models` are those that take chats."""
    runner = told.runner
    described = {instance.model: instance for instance in told.instances}
    return RunnerFacts(
        name=runner.name,
        kind=f"{runner.runtime}-weft-{runner.version}",
        stage=RunnerStage.STOPPING if runner.capability.draining else stage,
        models=tuple(
            _model(state, described.get(state.model) or pb.InstanceDescription(), state.model in chat_models)
            for state in runner.capability.instances
        ),
    )


def device_facts(sight: HostSnapshot, allowed: Collection[int]) -> tuple[DeviceFacts, ...] | None:
    """The devices that a runner may use, all of the host's where `allowed` is empty; None: nobody can tell."""
    if sight.source is Source.UNKNOWN and not sight.devices:
        return None
    return tuple(
        DeviceFacts(
            index=device.index,
            total_bytes=device.total_bytes,
            used_bytes=device.used_bytes,
            utilization=device.utilization,
        )
        for device in sight.devices
        if not allowed or device.index in allowed
    )


def _model(state: runner_pb2.InstanceState, told: pb.InstanceDescription, takes_chats: bool) -> ModelFacts:
    stage = _STAGES.get(state.phase, ModelStage.AVAILABLE)
    is_loaded = stage is ModelStage.LOADED
    ready_at = told.last_ready_time.ToDatetime(UTC) if told.HasField("last_ready_time") else None
    return ModelFacts(
        name=state.model,
        stage=stage,
        quantization=told.load_options.quantization or None,
        context_tokens=state.context_tokens or None,
        loaded_at=int(ready_at.timestamp()) if is_loaded and ready_at is not None else None,
        memory_bytes=_memory(state.memory),
        load_progress=state.load_progress if state.HasField("load_progress") else None,
        load_eta_seconds=state.load_eta.ToNanoseconds() / 1e9 if state.HasField("load_eta") else None,
        slots_used=state.slots_used,
        takes_chats=takes_chats,
        takes_images=told.vision_input,
        tenants_apart=_APART.get(told.cache_isolation),
        out_of_memory=not is_loaded and _ran_out_of_memory(told),
        cache=CacheCounts(
            hits=told.cache.hit_count,
            misses=told.cache.miss_count,
            prompt_tokens=told.cache.prompt_token_count,
            cached_tokens=told.cache.cached_token_count,
        ),
    )


def _memory(memory: runner_pb2.InstanceMemory) -> int | None:
    if memory.HasField("measured_bytes"):
        return memory.measured_bytes
    return memory.leased_bytes or None


def _ran_out_of_memory(told: pb.InstanceDescription) -> bool:
    """Whether the last fault was a lack of memory, and it has not come up again since."""
    last = told.restarts[-1] if told.restarts else None
    return (
        last is not None
        and last.reason == error_reason_pb2.ERROR_REASON_OUT_OF_MEMORY
        and not last.HasField("recovery")
    )

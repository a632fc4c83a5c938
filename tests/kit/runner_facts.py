"""Facts about a runner's models, as its HTTP API reads them."""

from typing import Any

from gateway.runner_api.facts import ModelFacts, ModelStage
from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2 as pb

PHASES = {
    ModelStage.AVAILABLE: InstanceState.PHASE_HIBERNATING,
    ModelStage.LOADING: InstanceState.PHASE_LOADING,
    ModelStage.LOADED: InstanceState.PHASE_READY,
    ModelStage.FAILED: InstanceState.PHASE_FAILED,
}


def model_facts(
    name: str = "qwen",
    stage: ModelStage = ModelStage.LOADED,
    *,
    takes_chats: bool = False,
    tenants_apart: bool | None = None,
    out_of_memory: bool = False,
    loaded_at: int | None = None,
    memory_bytes: int | None = None,
    quantization: str = "",
    cache: pb.CacheFigures | None = None,
    called: frozenset[str] = frozenset(),
    **state: Any,
) -> ModelFacts:
    """Returns a model as its runner would describe it."""
    isolation = {True: pb.CACHE_ISOLATION_SLOTS, False: pb.CACHE_ISOLATION_NONE, None: pb.CACHE_ISOLATION_UNSPECIFIED}
    description = pb.InstanceDescription(model=name, cache_isolation=isolation[tenants_apart], cache=cache)
    description.load_options.quantization = quantization
    description.load_parameters.add(name="context_tokens", integer=True, minimum=16, maximum=32_768)
    if loaded_at is not None:
        description.last_ready_time.seconds = loaded_at
    if out_of_memory:
        description.restarts.add(reason=error_reason_pb2.ERROR_REASON_OUT_OF_MEMORY)
    found = InstanceState(model=name, phase=PHASES[stage], **state)
    if memory_bytes is not None:
        found.memory.measured_bytes = memory_bytes
    return ModelFacts(found, description, takes_chats, called)

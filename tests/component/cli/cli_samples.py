"""Resources for the scripted mesh."""

from datetime import UTC, datetime

from weft.api.registry.v1 import (
    model_pb2,
    runner_pb2,
    tags_pb2,
    wake_pb2,
)
from weft.kernel.values.address import relayed_address
from weft.kernel.values.names import resource_id

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def some_model(name: str = "qwen", pool: str = "big", status: str = "ACTIVE") -> model_pb2.Model:
    wake = wake_pb2.Wake(by_runner=True)
    wake.max_wait.FromSeconds(60)
    model = model_pb2.Model(
        manifest=model_pb2.ModelManifest(
            name=name,
            pool_name=pool,
            operations=[model_pb2.MODEL_OPERATION_CHAT],
            context_tokens=4096,
            wake=wake,
            tags=tags_pb2.Tags(tier="fast", labels={"team": "a", "zone": "x"}, owner="ann"),
            upstream="qwen.gguf",
        ),
        type="llama_server",
        id=resource_id("model", name, 0),
        runner="r1",
        status=model_pb2.Model.Status.Value(f"STATUS_{status}"),
        kind=model_pb2.Model.KIND_VIRTUAL,
    )
    model.create_time.FromDatetime(MOMENT)
    model.last_heartbeat_time.FromDatetime(MOMENT)
    return model


def some_runner(target: str) -> runner_pb2.Runner:
    state = runner_pb2.InstanceState(
        model="qwen", phase=runner_pb2.InstanceState.PHASE_READY, slots_total=4, slots_used=1
    )
    runner = runner_pb2.Runner(
        name="r1",
        incarnation="life-1",
        address=relayed_address(target, "r1"),
        host="box",
        runtime="llama_server",
        version="0.2",
        status=runner_pb2.Runner.STATUS_ACTIVE,
        capability=runner_pb2.Capability(instances=[state]),
        dial_out=True,
    )
    runner.last_heartbeat_time.FromDatetime(MOMENT)
    return runner

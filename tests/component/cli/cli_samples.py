"""Resources for the scripted mesh."""

from datetime import UTC, datetime

from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    event_pb2,
    model_pb2,
    route_pb2,
    runner_pb2,
    tags_pb2,
    wake_pb2,
)
from weft.kernel.address import relayed_address
from weft.kernel.names import resource_id

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


def some_agent(name: str = "coder", description: str = "Writes code") -> agent_pb2.Agent:
    return agent_pb2.Agent(
        manifest=agent_pb2.AgentManifest(
            name=name,
            model="qwen",
            description=description,
            system_prompt="You are terse.\nVery.",
            default_params=sampling_pb2.SamplingParams(temperature=0.2, stop=["\n"], logit_bias={7: 1.5}),
            behaviour=agent_behaviour_pb2.AgentBehaviour(
                platform_prompt=True,
                tools=["files.read"],
                max_tool_iterations=4,
                signals=["NEEDS_HIGHER_REASONER"],
                stop_on_decision_request=False,
                repetition_policy=agent_behaviour_pb2.REPETITION_POLICY_OFF,
                parse_text_tool_calls=False,
            ),
        ),
        kind=agent_pb2.Agent.KIND_VIRTUAL,
        runner="r1",
        status=agent_pb2.Agent.STATUS_ACTIVE,
    )


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


def some_route(name: str = "summaries") -> route_pb2.Route:
    route = route_pb2.Route(
        manifest=route_pb2.RouteManifest(
            name=name, description="Short ones", candidates=["qwen", "big"], pin_primary=True
        ),
        status=route_pb2.Route.STATUS_ACTIVE,
    )
    route.manifest.budget.FromSeconds(60)
    route.manifest.keep_alive.FromSeconds(300)
    route.create_time.FromDatetime(MOMENT)
    return route


def some_event(sequence: int, name: str = "qwen") -> event_pb2.Event:
    event = event_pb2.Event(
        sequence=sequence,
        kind="model",
        name=name,
        reason=event_pb2.EVENT_REASON_WOKE,
        message="it woke up",
    )
    event.time.FromDatetime(MOMENT)
    return event

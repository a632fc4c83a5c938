"""One resource of each kind as the registry would tell it, with every field set."""

from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    event_pb2,
    model_pb2,
    pool_pb2,
    route_pb2,
    runner_pb2,
    wake_pb2,
)

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

BEHAVIOUR = agent_behaviour_pb2.AgentBehaviour(
    platform_prompt=True,
    tools=["files.read", "search"],
    max_tool_iterations=0,
    signals=["NEEDS_EXTERNAL_INFO", "POLICY_RISK"],
    stop_on_decision_request=False,
    repetition_policy=agent_behaviour_pb2.REPETITION_POLICY_OFF,
    parse_text_tool_calls=False,
)


def some_model(name: str = "qwen", **fields: object) -> model_pb2.Model:
    model = model_pb2.Model(
        manifest=model_pb2.ModelManifest(
            name=name,
            pool_name="big",
            operations=[model_pb2.MODEL_OPERATION_CHAT, model_pb2.MODEL_OPERATION_EMBEDDING],
            context_tokens=4096,
            digest="sha256:" + "0" * 64,
            remote=True,
            wake=wake_pb2.Wake(
                by_runner=True,
                by_mesh=wake_pb2.WakeRecipe(
                    http=wake_pb2.HttpAction(
                        url="http://10.0.0.1/wake", method="PUT", headers={"X-Key": "${WEFT_WAKE_K}"}
                    )
                ),
                max_wait=Duration(seconds=90),
            ),
            skills=[model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_IMAGE],
        ),
        runner="r1",
        status=model_pb2.Model.STATUS_ACTIVE,
        kind=model_pb2.Model.KIND_VIRTUAL,
        declared_runner="r1",
    )
    model.create_time.FromDatetime(MOMENT)
    model.last_heartbeat_time.FromDatetime(MOMENT)
    model.MergeFrom(model_pb2.Model(**fields))  # type: ignore[arg-type]  # fields of a Model
    return model


def some_agent(name: str = "coder", description: str = "Writes code") -> agent_pb2.Agent:
    agent = agent_pb2.Agent(
        manifest=agent_pb2.AgentManifest(
            name=name,
            model="qwen",
            description=description,
            system_prompt="You are terse.\nVery.",
            default_params=sampling_pb2.SamplingParams(
                max_tokens=7,
                temperature=0.2,
                top_p=0.9,
                top_k=0,
                min_p=0.1,
                seed=-3,
                stop=["a", "b"],
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                repeat_penalty=1.1,
                logit_bias={5: 1.5, 50256: -100.0},
            ),
            behaviour=BEHAVIOUR,
        ),
        kind=agent_pb2.Agent.KIND_VIRTUAL,
        runner="r1",
        status=agent_pb2.Agent.STATUS_ACTIVE,
    )
    agent.create_time.FromDatetime(MOMENT)
    agent.last_heartbeat_time.FromDatetime(MOMENT)
    return agent


def some_runner(name: str = "r1", phase: str = "READY", **fields: object) -> runner_pb2.Runner:
    runner = runner_pb2.Runner(
        name=name,
        incarnation="life-1",
        address="unix:/run/r1.sock",
        host="box",
        runtime="llama_server",
        version="0.2",
        status=runner_pb2.Runner.STATUS_ACTIVE,
        capability=runner_pb2.Capability(
            instances=[
                runner_pb2.InstanceState(
                    model="qwen",
                    phase=runner_pb2.InstanceState.Phase.Value(f"PHASE_{phase}"),
                    slots_total=4,
                    slots_used=1,
                    load_progress=0.5,
                    context_tokens=8192,
                    detail="why",
                )
            ],
            max_requests=3,
        ),
        dial_out=True,
    )
    runner.last_heartbeat_time.FromDatetime(MOMENT)
    runner.MergeFrom(runner_pb2.Runner(**fields))  # type: ignore[arg-type]  # fields of a Runner
    return runner


def some_pool() -> pool_pb2.Pool:
    return pool_pb2.Pool(
        name="big", explicit=True, members=[some_model("qwen"), some_model("qwen-2")], size=2, active_count=2
    )


def some_route(name: str = "summaries") -> route_pb2.Route:
    route = route_pb2.Route(
        manifest=route_pb2.RouteManifest(
            name=name,
            description="Short ones",
            candidates=["qwen", "big"],
            budget=Duration(seconds=90, nanos=500_000_000),
            keep_alive=Duration(seconds=300),
            pin_primary=True,
        ),
        status=route_pb2.Route.STATUS_ACTIVE,
    )
    route.create_time.FromDatetime(MOMENT)
    return route


def some_event(sequence: int = 1, name: str = "qwen") -> event_pb2.Event:
    event = event_pb2.Event(
        sequence=sequence,
        kind="model",
        name=name,
        reason=event_pb2.EVENT_REASON_WOKE,
        message="it woke up",
    )
    event.time.FromDatetime(MOMENT)
    return event

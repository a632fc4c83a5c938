"""The rules of fields as the options of the protos say them: every broken one by its path, nothing secret repeated."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    declaration_service_pb2,
    model_pb2,
    route_pb2,
    runner_pb2,
    runner_session_service_pb2,
    wake_pb2,
)
from weft.api.registry.v1.tags_pb2 import Tags
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.schemas.field_rules import check_message, enum_words


def a_model(**fields: Any) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(**{"name": "m", "operations": [model_pb2.MODEL_OPERATION_CHAT]} | fields)


def a_route(**fields: Any) -> route_pb2.RouteManifest:
    return route_pb2.RouteManifest(**{"name": "r", "candidates": ["a", "b"]} | fields)


def an_agent(**params: Any) -> agent_pb2.AgentManifest:
    return agent_pb2.AgentManifest(name="a", model="m", default_params=sampling_pb2.SamplingParams(**params))


def a_state(**fields: Any) -> runner_pb2.InstanceState:
    given: dict[str, Any] = {"model": "m", "phase": runner_pb2.InstanceState.PHASE_READY}
    return runner_pb2.InstanceState(**given | fields)


def a_runner(**fields: Any) -> runner_pb2.Runner:
    return runner_pb2.Runner(**{"name": "r", "incarnation": "life-1", "address": "unix:/x"} | fields)


def a_wake(**recipe: Any) -> wake_pb2.Wake:
    return wake_pb2.Wake(by_mesh=wake_pb2.WakeRecipe(**recipe))


@pytest.mark.parametrize(
    "message",
    [
        a_model(),
        a_model(pool_name="p", digest="sha256:" + "0a" * 32, wake=wake_pb2.Wake(by_runner=True)),
        a_route(budget=Duration(nanos=1), keep_alive=Duration(seconds=-1)),
        a_route(budget=Duration(seconds=86_400)),
        an_agent(temperature=0.0, stop=["x"], logit_bias={1: -100.0}),
        a_state(load_progress=1.0, unload_time=Timestamp(seconds=1)),
        a_runner(),
        a_wake(http=wake_pb2.HttpAction(url="https://h/x", headers={"A": "b"})),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_valid_message_is_accepted(message: Any) -> None:
    check_message(message, "here")


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        (a_model(name=""), "name", "must be 1 to 128 letters"),
        (a_model(name="-x"), "name", "must be 1 to 128 letters"),
        (a_model(pool_name="a//b"), "pool_name", "must be 1 to 128 letters"),
        (a_model(operations=[]), "operations", "at least one operation"),
        (a_model(operations=[1, 99]), "operations", "only known ones"),
        (a_model(operations=[0]), "operations", "only known ones"),
        (a_model(operations=[1] * 9), "operations", "must have at most 8, has 9"),
        (a_model(skills=[99]), "skills", "only known skills"),
        (a_model(context_tokens=-1), "context_tokens", "must not be negative"),
        (a_model(digest="md5:0"), "digest", "64 lower-case hex digits"),
        (a_model(wake=wake_pb2.Wake(max_wait=Duration())), "wake.max_wait", "must be 1 to 3600"),
        (a_model(wake=a_wake()), "wake.by_mesh", "needs exactly one of http, command and wake_on_lan"),
        (a_route(candidates=[]), "candidates", "must have at least 1, has 0"),
        (a_route(candidates=[f"m{n}" for n in range(17)]), "candidates", "must have at most 16, has 17"),
        (a_route(candidates=["a", "a"]), "candidates[1]", "must not appear twice"),
        (a_route(candidates=["a", ""]), "candidates[1]", "must be 1 to 128 letters"),
        (a_route(budget=Duration()), "budget", "must be more than 0 and at most 86400"),
        (a_route(budget=Duration(seconds=86_401)), "budget", "must be more than 0 and at most 86400"),
        (a_route(keep_alive=Duration(seconds=2**31)), "keep_alive", "must be at most 31622400 seconds"),
        (a_route(description="x" * 1025), "description", "must be at most 1024 characters"),
        (a_route(description="a\0b"), "description", "without control characters"),
        (agent_pb2.AgentManifest(name="a"), "target", "needs exactly one of model and pool"),
        (agent_pb2.AgentManifest(name="a", model=""), "model", "must be 1 to 128 letters"),
        (an_agent(temperature=math.nan), "default_params.temperature", "must be 0 to 2"),
        (an_agent(temperature=-math.inf), "default_params.temperature", "must be 0 to 2"),
        (an_agent(max_tokens=0), "default_params.max_tokens", "must be 1 to 2147483647"),
        (an_agent(stop=["a", ""]), "default_params.stop[1]", "must be 1 to 1024 characters"),
        (an_agent(logit_bias={7: 101.0}), "default_params.logit_bias[7]", "must be -100 to 100"),
        (a_state(phase=0), "phase", "must be set"),
        (a_state(phase=99), "phase", "must be idle, loading"),
        (a_state(load_progress=1.1), "load_progress", "must be 0 to 1"),
        (a_state(slots_used=-1), "slots_used", "must not be negative"),
        (a_state(unload_time=Timestamp(seconds=2**40)), "unload_time", "between the years 1 and 9999"),
        (a_state(load_eta=Duration(seconds=-1)), "load_eta", "must be 0 to 86400"),
        (a_runner(address=""), "address", "must not be empty"),
        (a_runner(address="a\nb"), "address", "without line breaks"),
        (a_runner(incarnation="a b"), "incarnation", "must be 1 to 128 letters"),
        (
            a_runner(capability=runner_pb2.Capability(instances=[a_state(), a_state()])),
            "capability.instances[1].model",
            "must not appear twice",
        ),
        (a_wake(http=wake_pb2.HttpAction()), "by_mesh.http.url", "must be an http or https URL"),
        (a_wake(http=wake_pb2.HttpAction(url="http://h", method="post")), "by_mesh.http.method", "must be GET, POST"),
        (
            a_wake(http=wake_pb2.HttpAction(url="http://h", headers={"x y": ""})),
            "by_mesh.http.headers",
            "names must be tokens",
        ),
        (
            a_wake(http=wake_pb2.HttpAction(url="http://h", headers={"x": "a\nb"})),
            "by_mesh.http.headers[x]",
            "without line breaks",
        ),
        (a_wake(command=wake_pb2.CommandAction(argv=["a", "\0"])), "by_mesh.command.argv[1]", "none of them NUL"),
        (
            a_wake(wake_on_lan=wake_pb2.WakeOnLanAction(mac_address="00:00:00:00:00:01", port=65_536)),
            "by_mesh.wake_on_lan.port",
            "must be 1 to 65535",
        ),
        (declaration_service_pb2.PoolDeclaration(name="p", members=["a", "a"]), "members[1]", "must not appear twice"),
        (
            runner_session_service_pb2.OpenSessionRequest(request_id="x", models=[a_model(), a_model()]),
            "models[1].name",
            "must not appear twice",
        ),
        (Tags(tier="very fast"), "tier", "must be a word of 1 to 32 letters"),
        (Tags(tier="x" * 33), "tier", "must be a word of 1 to 32 letters"),
        (Tags(labels={"a b": "c"}), "labels", "must have keys of 1 to 64 letters"),
        (Tags(labels={"a": "b,c"}), "labels[a]", "must be 1 to 128 letters"),
        (Tags(labels={"a": ""}), "labels[a]", "must be 1 to 128 letters"),
        (Tags(labels={"a": "v" * 129}), "labels[a]", "must be 1 to 128 letters"),
        (Tags(labels={f"k{n}": "v" for n in range(17)}), "labels", "must have at most 16, has 17"),
        (Tags(owner="a b"), "owner", "must be 1 to 128 letters"),
        (
            agent_behaviour_pb2.AgentBehaviour(signals=["lower"]),
            "signals[0]",
            "must be 1 to 64 capital letters",
        ),
        (agent_behaviour_pb2.AgentBehaviour(repetition_policy=99), "repetition_policy", "must be off, warn or kill"),  # type: ignore[arg-type]
    ],
)
def test_violated_rule_is_reported_with_its_path(message: Any, field: str, problem: str) -> None:
    with pytest.raises(FieldError, match=problem) as refusal:
        check_message(message, "here")
    assert refusal.value.field == f"here.{field}"
    with pytest.raises(FieldError) as refusal:
        check_message(message)
    assert refusal.value.field == field


SECRET = "hunter2"


@pytest.mark.parametrize(
    "change",
    [
        lambda http: setattr(http, "url", f"ftp://{SECRET}"),
        lambda http: http.headers.update({"x": f"{SECRET}\n"}),
        lambda http: http.headers.update({f"{SECRET} ": "x"}),
    ],
)
def test_refusal_never_repeats_the_value(change: Callable[[Any], None]) -> None:
    action = wake_pb2.HttpAction(url="http://h")
    change(action)
    with pytest.raises(FieldError) as refusal:
        check_message(action)
    assert SECRET not in str(refusal.value)


def test_enum_words_have_no_prefix_and_no_unset_value() -> None:
    phases = enum_words(runner_pb2.InstanceState.Phase.DESCRIPTOR)
    assert phases[runner_pb2.InstanceState.PHASE_CRASH_LOOP] == "crash-loop"
    assert 0 not in phases
    assert enum_words(model_pb2.ModelOperation.DESCRIPTOR)[model_pb2.MODEL_OPERATION_CHAT] == "chat"

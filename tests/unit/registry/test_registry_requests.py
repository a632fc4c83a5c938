"""Everything a caller may send that the registry must not swallow."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.refusals import refused

from registry_svc.mesh.requests import MAX_PAGE_SIZE, page_of, valid_heartbeat, valid_opening
from registry_svc.registry_config import RegistryConfig
from registry_svc.wire_values import page_token
from weft.api.registry.v1 import model_pb2, registry_service_pb2, runner_pb2, runner_session_service_pb2, wake_pb2
from weft.documents.left_out import left_out_item
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.names import is_name

CONFIG = RegistryConfig(database_url="sqlite://", max_models_per_session=3)
OpenSession = runner_session_service_pb2.OpenSessionRequest
Heartbeat = runner_session_service_pb2.HeartbeatRequest
InstanceState = runner_pb2.InstanceState


def an_opening() -> OpenSession:
    return OpenSession(
        request_id="open-1",
        runner=runner_pb2.Runner(
            name="r1", incarnation="life-1", address="dns:///host:7071", host="host", runtime="fake", version="0.1.0"
        ),
        models=[
            model_pb2.ModelManifest(
                name="m1",
                pool_name="pool",
                operations=[model_pb2.MODEL_OPERATION_EMBEDDING, model_pb2.MODEL_OPERATION_CHAT],
                context_tokens=4096,
                digest="sha256:" + "0a" * 32,
            )
        ],
    )


def a_heartbeat() -> Heartbeat:
    state = InstanceState(model="m1", phase=InstanceState.PHASE_READY, slots_total=4, slots_used=1)
    return Heartbeat(
        session_id="ses-1", incarnation="life-1", sequence=1, capability=runner_pb2.Capability(instances=[state])
    )


def test_valid_opening_round_trips() -> None:
    opening = an_opening()
    assert not valid_opening(opening, CONFIG)
    assert (opening.runner.name, opening.runner.address) == ("r1", "dns:///host:7071")
    assert opening.models[0].operations == [model_pb2.MODEL_OPERATION_CHAT, model_pb2.MODEL_OPERATION_EMBEDDING]
    assert opening.models[0].pool_name == "pool"


def test_valid_heartbeat_round_trips() -> None:
    beat = a_heartbeat()
    assert not valid_heartbeat(beat, CONFIG)
    assert beat.HasField("capability")
    assert beat.capability.instances[0].phase == InstanceState.PHASE_READY
    assert not beat.capability.instances[0].HasField("load_progress")


def test_heartbeat_without_a_report_differs_from_one_with_an_empty_report() -> None:
    bare = a_heartbeat()
    bare.ClearField("capability")
    valid_heartbeat(bare, CONFIG)
    assert not bare.HasField("capability")
    bare.capability.SetInParent()
    valid_heartbeat(bare, CONFIG)
    assert bare.HasField("capability")


def _set(path: str, value: object) -> Callable[[OpenSession], None]:
    def change(request: OpenSession) -> None:
        target: object = request
        *parents, last = path.split(".")
        for name in parents:
            target = target.models[0] if name == "models0" else getattr(target, name)  # type: ignore[attr-defined]
        setattr(target, last, value)

    return change


def _publish(*names: str) -> Callable[[OpenSession], None]:
    def change(request: OpenSession) -> None:
        for name in names:
            request.models.add(name=name, operations=[model_pb2.MODEL_OPERATION_CHAT])

    return change


def _operations(*numbers: int) -> Callable[[OpenSession], None]:
    def change(request: OpenSession) -> None:
        del request.models[0].operations[:]
        request.models[0].operations.extend(model_pb2.ModelOperation.ValueType(number) for number in numbers)

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_set("request_id", ""), "request_id"),
        (_set("request_id", "x" * 129), "request_id"),
        (_set("session_id", "a b"), "session_id"),
        (_set("runner.name", "-r"), "runner.name"),
        (_set("runner.name", ""), "runner.name"),
        (_set("runner.incarnation", ""), "runner.incarnation"),
        (_set("runner.address", ""), "runner.address"),
        (_set("runner.address", "x" * 513), "runner.address"),
        (_set("runner.address", "unix:/a\nb"), "runner.address"),
    ],
)
def test_opening_with_an_invalid_field_of_the_runner_is_refused_with_its_path(
    change: Callable[[OpenSession], None], field: str
) -> None:
    request = an_opening()
    change(request)
    with refused(field=field):
        valid_opening(request, CONFIG)


@pytest.mark.parametrize(
    ("change", "said", "models"),
    [
        (_set("runner.host", "h" * 256), "host r1: host: must be at most 255", ["m1"]),
        (_set("runner.runtime", "a\x00b"), "runtime r1: runtime: must be", ["m1"]),
        (_set("runner.version", "\x1b[31m"), "version r1: version: must be", ["m1"]),
        (_set("models0.name", "m//1"), "model m//1: model.name: must be", []),
        (_set("models0.pool_name", "p p"), "model m1: model.pool_name: must be", []),
        (_set("models0.upstream", "a\x00b"), "model m1: model.upstream: must be", []),
        (_set("models0.upstream", "x" * 100_000), "model m1: model.upstream: must be", []),
        (_set("models0.digest", "sha256:xyz"), "model m1: model.digest: must be", []),
        (_set("models0.context_tokens", -1), "model m1: model.context_tokens: must", []),
        (_operations(), "model m1: model.operations: must", []),
        (_operations(0), "model m1: model.operations", []),
        (_operations(1, 99), "model m1: model.operations", []),
        (_publish("m2", "m1"), "model m1: its name appears twice", ["m1", "m2"]),
        (_publish("m2", "m3", "m4"), "model m4: a runner has at most 3", ["m1", "m2", "m3"]),
        (_publish("m2", "r1"), "model r1: model.name: must not be the name of the runner", ["m1", "m2"]),
    ],
)
def test_invalid_item_of_an_opening_is_left_out_with_the_reason(
    change: Callable[[OpenSession], None], said: str, models: list[str]
) -> None:
    request = an_opening()
    change(request)
    [item] = valid_opening(request, CONFIG)
    assert left_out_item(item).startswith(said)
    assert [model.name for model in request.models] == models
    assert not valid_opening(request, CONFIG)


HTTP = wake_pb2.WakeRecipe(http=wake_pb2.HttpAction(url="http://127.0.0.1:8080/api/v1/tenants/acme", method="DELETE"))
COMMAND = wake_pb2.WakeRecipe(command=wake_pb2.CommandAction(argv=["/bin/true"]))
PACKET = wake_pb2.WakeRecipe(wake_on_lan=wake_pb2.WakeOnLanAction(mac_address="02:00:00:00:00:01"))
PACKET_TO_MESH = wake_pb2.WakeRecipe(
    wake_on_lan=wake_pb2.WakeOnLanAction(mac_address="02:00:00:00:00:01", broadcast_address="127.0.0.1")
)


@pytest.mark.parametrize("recipe", [HTTP, COMMAND, PACKET_TO_MESH])
@pytest.mark.parametrize("by_runner", [True, False])
def test_joined_machine_cannot_make_the_mesh_call_an_address_or_run_a_program(
    recipe: wake_pb2.WakeRecipe, by_runner: bool
) -> None:
    request = an_opening()
    request.runner.dial_out = True
    request.models[0].wake.CopyFrom(wake_pb2.Wake(by_runner=by_runner, by_mesh=recipe))
    [item] = valid_opening(request, CONFIG)
    assert left_out_item(item) == (
        "wake m1: a joined machine may publish Wake-on-LAN recipes only; an operator declares others with weft apply"
    )
    assert [model.name for model in request.models] == ["m1"]
    assert request.models[0].HasField("wake") is by_runner
    assert not request.models[0].wake.HasField("by_mesh")


def test_joined_machine_may_publish_a_packet_and_a_configured_runner_a_request() -> None:
    for dial_out, recipe in ((True, PACKET), (False, PACKET), (False, HTTP)):
        request = an_opening()
        request.runner.dial_out = dial_out
        request.models[0].wake.by_mesh.CopyFrom(recipe)
        assert not valid_opening(request, CONFIG)
        assert request.models[0].wake.HasField("by_mesh")


@pytest.mark.parametrize(
    ("target", "dial_out", "left"),
    [
        ({"model": "m2"}, True, False),
        ({"model": "m1"}, True, True),
        ({"model": "of-the-mesh"}, True, True),
        ({"pool": "pool"}, True, True),
        ({"model": "of-the-mesh"}, False, False),
    ],
)
def test_joined_machine_publishes_tools_only_for_models_that_it_alone_serves(
    target: dict[str, str], dial_out: bool, left: bool
) -> None:
    """`m1` is in a pool, whose other members would run the tools of their runners."""
    request = an_opening()
    request.runner.dial_out = dial_out
    request.models.add(name="m2", operations=[model_pb2.MODEL_OPERATION_CHAT])
    agent = request.agents.add(name="a1", **target)
    assert not valid_opening(request, CONFIG)
    agent.behaviour.tools.append("read_note")
    found = valid_opening(request, CONFIG)
    assert [(item.kind, item.name) for item in found] == ([("agent", "a1")] if left else [])


def test_opening_may_contain_a_first_report_whose_invalid_parts_are_left_out() -> None:
    request = an_opening()
    request.runner.capability.instances.add(model="m1", phase=InstanceState.PHASE_IDLE, slots_used=-1)
    [item] = valid_opening(request, CONFIG)
    assert left_out_item(item) == "slots_used m1: slots_used: must not be negative"
    assert request.runner.capability.instances[0].phase == InstanceState.PHASE_IDLE


@pytest.mark.parametrize(
    ("values", "member"),
    [
        ({"slots_total": -1}, "slots_total"),
        ({"slots_used": -1}, "slots_used"),
        ({"context_tokens": -1}, "context_tokens"),
        ({"load_progress": math.nan}, "load_progress"),
        ({"load_progress": math.inf}, "load_progress"),
        ({"load_progress": -0.1}, "load_progress"),
        ({"load_progress": 1.1}, "load_progress"),
        ({"detail": "x" * 4097}, "detail"),
    ],
)
def test_invalid_value_of_a_report_is_left_out_with_the_reason(values: dict[str, object], member: str) -> None:
    request = a_heartbeat()
    for name, value in values.items():
        setattr(request.capability.instances[0], name, value)
    [item] = valid_heartbeat(request, CONFIG)
    assert (item.kind, item.name) == (member, "m1")
    assert request.capability.instances[0].phase == InstanceState.PHASE_READY


@pytest.mark.parametrize("values", [{"model": "agent/name"}, {"model": ""}, {"phase": 0}, {"phase": 99}])
def test_state_of_no_model_or_phase_is_left_out(values: dict[str, object]) -> None:
    request = a_heartbeat()
    request.capability.instances.add(model="m2", phase=InstanceState.PHASE_IDLE)
    for name, value in values.items():
        setattr(request.capability.instances[0], name, value)
    [item] = valid_heartbeat(request, CONFIG)
    assert item.kind == "instance"
    assert [state.model for state in request.capability.instances] == ["m2"]


def test_report_lists_every_model_once_and_a_bounded_number() -> None:
    request = a_heartbeat()
    request.capability.instances.add(model="m1", phase=InstanceState.PHASE_IDLE)
    [item] = valid_heartbeat(request, CONFIG)
    assert left_out_item(item) == "instance m1: its name appears twice"
    for number in range(5):
        request.capability.instances.add(model=f"x{number}", phase=InstanceState.PHASE_IDLE)
    assert [item.name for item in valid_heartbeat(request, CONFIG)] == ["x2", "x3", "x4"]
    assert [state.model for state in request.capability.instances] == ["m1", "x0", "x1"]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["x" * 129], 0),
        (["files.read", "a\nb"], 1),
        (["a\nb", "files.read", "a b", "", "c d"], 1),
        (["files.read", "files.read"], 1),
        ([f"tool-{number}" for number in range(1_025)], 1_024),
        ([f"tool {number}" for number in range(2_000)], 0),
    ],
)
def test_invalid_tool_names_of_a_report_are_left_out(names: list[str], kept: int) -> None:
    request = a_heartbeat()
    request.capability.tool_names.extend(names)
    assert {item.kind for item in valid_heartbeat(request, CONFIG)} == {"tool_names"}
    assert list(request.capability.tool_names) == [name for name in names if is_name(name)][:kept]
    assert request.capability.instances[0].phase == InstanceState.PHASE_READY


@pytest.mark.parametrize(
    ("change", "field"),
    [({"sequence": -1}, "sequence"), ({"session_id": ""}, "session_id"), ({"incarnation": ""}, "incarnation")],
)
def test_heartbeat_without_a_session_is_refused(change: dict[str, object], field: str) -> None:
    request = a_heartbeat()
    for name, value in change.items():
        setattr(request, name, value)
    with refused(field=field):
        valid_heartbeat(request, CONFIG)


@pytest.mark.parametrize(("asked", "got"), [(0, 100), (5000, 1000), (7, 7)])
def test_page_sizes_have_a_default_and_a_limit(asked: int, got: int) -> None:
    assert page_of(registry_service_pb2.ListResourcesRequest(kind="model", page_size=asked))[1] == got
    with pytest.raises(FieldError, match="page_size"):
        page_of(registry_service_pb2.ListResourcesRequest(kind="model", page_size=-1))


@settings(deadline=None)  # a busy machine is not a failure
@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", fullmatch=True))
def test_page_token_round_trips(name: str) -> None:
    request = registry_service_pb2.ListResourcesRequest(kind="runner", page_token=page_token(name))
    assert page_of(request)[0] == name


@settings(deadline=None)  # a busy machine is not a failure
@given(st.text(), st.integers(0, 2**31 - 1))
def test_page_token_decodes_to_a_name_or_is_refused(token: str, size: int) -> None:
    try:
        after, limit = page_of(
            registry_service_pb2.ListResourcesRequest(kind="model", page_token=token, page_size=size)
        )
    except FieldError as error:
        assert error.field == "page_token"  # noqa: PT017 - refusing is one of two right answers
    else:
        assert after == "" or is_name(after)
        assert 0 < limit <= MAX_PAGE_SIZE

"""Everything a caller may send that the registry must not swallow."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.refusals import refused

from registry_svc.config import RegistryConfig
from registry_svc.mesh.requests import MAX_PAGE_SIZE, page_of, valid_heartbeat, valid_opening
from registry_svc.wire_values import page_token
from weft.api.registry.v1 import model_pb2, registry_service_pb2, runner_pb2, runner_session_service_pb2
from weft.kernel.errors import FieldError
from weft.kernel.names import is_name

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
    opening = valid_opening(an_opening(), CONFIG)
    assert (opening.runner.name, opening.runner.address) == ("r1", "dns:///host:7071")
    assert opening.models[0].operations == [model_pb2.MODEL_OPERATION_CHAT, model_pb2.MODEL_OPERATION_EMBEDDING]
    assert opening.models[0].pool_name == "pool"


def test_valid_heartbeat_round_trips() -> None:
    beat = valid_heartbeat(a_heartbeat(), CONFIG)
    assert beat.HasField("capability")
    assert beat.capability.instances[0].phase == InstanceState.PHASE_READY
    assert not beat.capability.instances[0].HasField("load_progress")


def test_heartbeat_without_a_report_differs_from_one_with_an_empty_report() -> None:
    bare = a_heartbeat()
    bare.ClearField("capability")
    assert not valid_heartbeat(bare, CONFIG).HasField("capability")
    bare.capability.SetInParent()
    assert valid_heartbeat(bare, CONFIG).HasField("capability")


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
        (_set("runner.host", "h" * 256), "runner.host"),
        (_set("runner.runtime", "a\x00b"), "runner.runtime"),
        (_set("runner.version", "\x1b[31m"), "runner.version"),
        (_set("models0.name", "m//1"), "models[0].name"),
        (_set("models0.pool_name", "p p"), "models[0].pool_name"),
        (_set("models0.digest", "sha256:xyz"), "models[0].digest"),
        (_set("models0.context_tokens", -1), "models[0].context_tokens"),
        (_operations(), "models[0].operations"),
        (_operations(0), "models[0].operations"),
        (_operations(1, 99), "models[0].operations"),
        (_publish("m2", "m1"), "models[2].name"),
        (_publish("m2", "m3", "m4"), "models"),
    ],
)
def test_opening_with_an_invalid_field_is_refused_with_its_path(
    change: Callable[[OpenSession], None], field: str
) -> None:
    request = an_opening()
    change(request)
    with refused(field=field):
        valid_opening(request, CONFIG)


def test_opening_may_contain_a_first_report_and_its_errors_have_paths() -> None:
    request = an_opening()
    request.runner.capability.instances.add(model="m1", phase=InstanceState.PHASE_IDLE, slots_used=-1)
    with refused(field="runner.capability.instances[0].slots_used"):
        valid_opening(request, CONFIG)


@pytest.mark.parametrize(
    ("values", "member"),
    [
        ({"model": "agent/name"}, "model"),
        ({"phase": 0}, "phase"),
        ({"phase": 99}, "phase"),
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
def test_report_with_an_invalid_value_is_refused_with_its_path(values: dict[str, object], member: str) -> None:
    request = a_heartbeat()
    for name, value in values.items():
        setattr(request.capability.instances[0], name, value)
    with pytest.raises(FieldError) as refusal:
        valid_heartbeat(request, CONFIG)
    assert refusal.value.field == f"capability.instances[0].{member}"


def test_report_lists_every_model_once_and_a_bounded_number() -> None:
    request = a_heartbeat()
    request.capability.instances.add(model="m1", phase=InstanceState.PHASE_IDLE)
    with refused(field="capability.instances[1].model"):
        valid_heartbeat(request, CONFIG)
    for number in range(5):
        request.capability.instances.add(model=f"x{number}", phase=InstanceState.PHASE_IDLE)
    with refused(field="capability.instances"):
        valid_heartbeat(request, CONFIG)


@pytest.mark.parametrize(
    ("names", "field"),
    [
        (["x" * 129], "capability.tool_names[0]"),
        (["files.read", "a\nb"], "capability.tool_names[1]"),
        (["files.read", "files.read"], "capability.tool_names[1]"),
        ([f"tool-{number}" for number in range(1_025)], "capability.tool_names"),
    ],
)
def test_report_with_invalid_tool_names_is_refused(names: list[str], field: str) -> None:
    request = a_heartbeat()
    request.capability.tool_names.extend(names)
    with refused(field=field):
        valid_heartbeat(request, CONFIG)


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

"""The read model: a snapshot, then changes."""

import pytest
from kit.resources import gone, put, snapshot

from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    model_pb2,
    registry_service_pb2,
    route_pb2,
    router_pb2,
    runner_pb2,
    settings_pb2,
)
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.agents import target_of
from weft.dispatch.fleet import FleetView, apply_watch
from weft.kernel.requests.request_values import Operation, Skill


def _runner(name: str, *, phase: int = runner_pb2.InstanceState.PHASE_READY) -> registry_service_pb2.WatchedRunner:
    state = runner_pb2.InstanceState(model=f"m-{name}", phase=phase, slots_total=2)  # type: ignore[arg-type]
    runner = runner_pb2.Runner(
        name=name,
        incarnation="1",
        status=runner_pb2.Runner.STATUS_ACTIVE,
        capability=runner_pb2.Capability(instances=[state]),
    )
    return registry_service_pb2.WatchedRunner(runner=runner, ticket_key=b"key")


def _model(name: str, pool: str = "") -> model_pb2.Model:
    manifest = model_pb2.ModelManifest(
        name=name, pool_name=pool, operations=[model_pb2.MODEL_OPERATION_CHAT, model_pb2.MODEL_OPERATION_EMBEDDING]
    )
    return model_pb2.Model(manifest=manifest, runner="a", status=model_pb2.Model.STATUS_ACTIVE)


def _snapshot(revision: int, *runners: str) -> registry_service_pb2.WatchResponse:
    told = snapshot(*(_model(f"m-{name}") for name in runners), runners=[_runner(name) for name in runners])
    return registry_service_pb2.WatchResponse(revision=revision, snapshot=told)


def _change(
    revision: int, change: registry_service_pb2.Change | None = None, **kind: object
) -> registry_service_pb2.WatchResponse:
    change = change or registry_service_pb2.Change(**kind)  # type: ignore[arg-type]  # one member of the oneof
    return registry_service_pb2.WatchResponse(revision=revision, change=change)


def test_snapshot_replaces_everything() -> None:
    view = apply_watch(apply_watch(FleetView(), _snapshot(3, "a", "b")), _snapshot(9, "c"))
    assert (view.revision, set(view.runners), set(view.models)) == (9, {"c"}, {"m-c"})
    assert view.runners["c"].ticket_key == b"key"


def test_changes_add_replace_and_remove() -> None:
    view = apply_watch(FleetView(), _snapshot(1, "a"))
    view = apply_watch(view, _change(2, runner=_runner("b")))
    view = apply_watch(view, _change(3, runner=_runner("a", phase=runner_pb2.InstanceState.PHASE_LOADING)))
    assert view.runners["a"].instances["m-a"].phase == InstanceState.PHASE_LOADING
    view = apply_watch(view, _change(4, deleted_runner="a"))
    view = apply_watch(view, _change(5, gone("model", "m-a")))
    assert (view.revision, set(view.runners), set(view.models)) == (5, {"b"}, set())


def test_earlier_view_is_immutable() -> None:
    before = apply_watch(FleetView(), _snapshot(1, "a"))
    apply_watch(before, _change(2, deleted_runner="a"))
    assert "a" in before.runners


def test_phase_of_a_newer_registry_is_not_treated_as_ready() -> None:
    view = apply_watch(FleetView(), _change(1, runner=_runner("a", phase=99)))
    assert view.runners["a"].instances["m-a"].phase == InstanceState.PHASE_FAILED


def test_pool_is_found_by_its_name_and_its_members() -> None:
    view = FleetView()
    for revision, (name, pool) in enumerate([("p", ""), ("x", "p"), ("y", "")]):
        view = apply_watch(view, _change(revision, put(_model(name, pool))))
    assert {member.name for member in view.pool_members("p")} == {"p", "x"}
    assert {member.name for member in view.pool_members("x")} == {"p", "x"}
    assert [member.name for member in view.pool_members("y")] == ["y"]
    assert view.pool_members("nobody") == []
    assert view.models["y"].operations == {Operation.CHAT, Operation.EMBEDDING}


def test_pool_takes_precedence_over_a_model_of_another_pool_with_its_name() -> None:
    view = FleetView()
    for revision, (name, pool) in enumerate([("p", "q"), ("x", "p")]):
        view = apply_watch(view, _change(revision, put(_model(name, pool))))
    assert [member.name for member in view.pool_members("p")] == ["x"]


def _agent(**fields: object) -> agent_pb2.Agent:
    defaults = sampling_pb2.SamplingParams(temperature=0)
    manifest = agent_pb2.AgentManifest(name="coder", default_params=defaults, **fields)  # type: ignore[arg-type]
    return agent_pb2.Agent(manifest=manifest)


def test_agents_are_added_changed_and_removed_by_the_watch() -> None:
    told = snapshot(_agent(model="m", system_prompt="Be terse."))
    view = apply_watch(FleetView(), registry_service_pb2.WatchResponse(revision=1, snapshot=told))
    coder = view.agents["coder"]
    assert (*target_of(coder.manifest), coder.manifest.system_prompt) == ("m", False, "Be terse.")
    assert coder.manifest.default_params.HasField("temperature")
    assert not coder.HasField("inactive_time")
    view = apply_watch(view, _change(2, put(_agent(pool="p"))))
    assert target_of(view.agents["coder"].manifest) == ("p", True)
    view = apply_watch(view, _change(3, gone("agent", "coder")))
    assert view.agents == {}


def test_agent_behavior_is_stored_and_replaced() -> None:
    behaviour = agent_behaviour_pb2.AgentBehaviour(tools=["files.read"])
    view = apply_watch(FleetView(), _change(1, put(_agent(model="m", behaviour=behaviour))))
    assert view.agents["coder"].manifest.behaviour == behaviour
    view = apply_watch(view, _change(2, put(_agent(model="m"))))
    assert not view.agents["coder"].manifest.HasField("behaviour")


def test_agent_with_an_offline_runner_reports_it() -> None:
    agent = _agent(model="m")
    agent.inactive_time.GetCurrentTime()
    assert apply_watch(FleetView(), _change(1, put(agent))).agents["coder"].HasField("inactive_time")


@pytest.mark.parametrize(
    ("status", "active", "hibernating"),
    [
        (model_pb2.Model.STATUS_ACTIVE, True, False),
        (model_pb2.Model.STATUS_HIBERNATING, False, True),
        (model_pb2.Model.STATUS_INACTIVE, False, False),
    ],
)
def test_hibernating_model_is_reachable_and_not_active(
    status: model_pb2.Model.Status.ValueType, active: bool, hibernating: bool
) -> None:
    model = _model("m")
    model.status = status
    model.manifest.wake.by_runner = True
    view = apply_watch(FleetView(), _change(1, put(model))).models["m"]
    assert (view.active, view.hibernating, view.reachable) == (active, hibernating, active or hibernating)
    assert view.wake is not None
    assert view.wake.by_runner


def test_provider_model_is_expected_until_the_mesh_runner_publishes_it() -> None:
    """Requests that came before the first one of a mesh was served were refused for want of a heartbeat."""
    model = _model("m")
    model.manifest.provider.url, model.status = "https://api.example.com/v1", model_pb2.Model.STATUS_INACTIVE
    served = apply_watch(FleetView(), _change(1, put(model))).models["m"]
    model.runner = ""
    created = apply_watch(FleetView(), _change(1, put(model))).models["m"]
    model.manifest.ClearField("provider")
    declared = apply_watch(FleetView(), _change(1, put(model))).models["m"]
    assert (created.expected, served.expected, declared.expected) == (True, False, False)


def test_concurrency_limit_of_a_runner_is_known() -> None:
    runner = _runner("a")
    runner.runner.capability.max_requests = 3
    assert apply_watch(FleetView(), _change(1, runner=runner)).runners["a"].max_requests == 3


def test_runner_loads_and_tools_are_stored() -> None:
    watched = _runner("a")
    watched.runner.capability.tool_names.extend(["files.read", "web.search"])
    view = apply_watch(FleetView(), _change(1, runner=watched))
    assert view.runners["a"].tool_names == {"files.read", "web.search"}
    assert not view.runners["a"].instances["m-a"].HasField("usual_load")
    watched.runner.capability.instances[0].usual_load.FromMilliseconds(47_500)
    view = apply_watch(view, _change(2, runner=watched))
    assert view.runners["a"].instances["m-a"].usual_load.ToMilliseconds() == 47_500


def _route(**fields: object) -> route_pb2.Route:
    manifest = route_pb2.RouteManifest(name="sum", candidates=["m", "p"], **fields)  # type: ignore[arg-type]
    route = route_pb2.Route(manifest=manifest)
    route.create_time.FromSeconds(7)
    return route


def test_routes_are_added_changed_and_removed_by_the_watch() -> None:
    told = snapshot(_route(description="Short"))
    view = apply_watch(FleetView(), registry_service_pb2.WatchResponse(revision=1, snapshot=told))
    route = view.routes["sum"]
    manifest = route.manifest
    assert (list(manifest.candidates), manifest.description, route.create_time.seconds) == (["m", "p"], "Short", 7)
    assert (manifest.HasField("budget"), manifest.HasField("keep_alive"), manifest.pin_primary) == (False, False, False)
    changed = _route(pin_primary=True)
    changed.manifest.budget.FromMilliseconds(1_500)
    changed.manifest.keep_alive.FromSeconds(-1)
    view = apply_watch(view, _change(2, put(changed)))
    assert view.routes["sum"] == changed
    changed.manifest.keep_alive.FromSeconds(0)
    assert apply_watch(view, _change(3, put(changed))).routes["sum"].manifest.HasField("keep_alive")
    view = apply_watch(view, _change(3, gone("route", "sum")))
    assert (view.routes, view.revision) == ({}, 3)


def test_cloud_fallback_is_denied_before_the_registry_allows_it() -> None:
    assert not FleetView().settings.allow_cloud_fallback
    # A registry of an earlier release has no settings.
    assert not apply_watch(FleetView(), _snapshot(1, "a")).settings.allow_cloud_fallback
    yes, no = settings_pb2.MeshSettings(allow_cloud_fallback=True), settings_pb2.MeshSettings()
    snapshot = registry_service_pb2.Snapshot(settings=yes)
    view = apply_watch(FleetView(), registry_service_pb2.WatchResponse(revision=1, snapshot=snapshot))
    assert view.settings.allow_cloud_fallback
    view = apply_watch(view, _change(2, put(_model("m"))))
    assert view.settings.allow_cloud_fallback
    assert not apply_watch(view, _change(3, settings=no)).settings.allow_cloud_fallback


def test_change_keeps_unrelated_parts_identical() -> None:
    view = apply_watch(FleetView(), _snapshot(1, "a"))
    after = apply_watch(view, _change(2, put(_route())))
    assert after.runners is view.runners
    assert after.models is view.models
    assert after.agents is view.agents
    assert after.settings is view.settings


def test_undeclared_skills_are_unknown_and_not_empty() -> None:
    assert apply_watch(FleetView(), _change(1, put(_model("m")))).models["m"].skills is None
    model = _model("m")
    model.manifest.skills.extend([model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_IMAGE])
    view = apply_watch(FleetView(), _change(1, put(model)))
    assert view.models["m"].skills == frozenset({Skill.TEXT, Skill.IMAGE})


def test_routers_are_added_changed_and_removed_by_the_watch() -> None:
    first = router_pb2.Router(name="r1", incarnation="a", address="10.0.0.1:7071")
    snapshot = registry_service_pb2.Snapshot(routers=[first])
    view = apply_watch(FleetView(), registry_service_pb2.WatchResponse(revision=1, snapshot=snapshot))
    assert view.routers == {"r1": router_pb2.Router(name="r1", incarnation="a", address="10.0.0.1:7071")}

    second = router_pb2.Router(name="r2", incarnation="b", address="10.0.0.2:7071", leading=True)
    for number, change in enumerate(
        (registry_service_pb2.Change(router=second), registry_service_pb2.Change(deleted_router="r1")), start=2
    ):
        view = apply_watch(view, registry_service_pb2.WatchResponse(revision=number, change=change))
    assert view.routers == {
        "r2": router_pb2.Router(name="r2", incarnation="b", address="10.0.0.2:7071", leading=True),
    }

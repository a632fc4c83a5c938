"""What a configuration promises, beside what is there."""

from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp

from router_svc.fleet_view import candidate_of
from router_svc.policy.endpoints.candidates import Readiness
from weft.api.registry.v1 import agent_pb2
from weft.dispatch.fleet import (
    ExpectedMesh,
    ExpectingFleet,
    FleetView,
    ModelView,
    RunnerView,
    expected_model,
)
from weft.kernel.requests.request_values import Operation

EMPTY = FleetView(revision=1)


def model(*, active: bool = True) -> ModelView:
    return replace(expected_model("m", "", "r"), active=active, expected=False)


def runner(*, active: bool = True) -> RunnerView:
    return RunnerView(
        name="r",
        incarnation="1",
        address="x",
        host="h",
        runtime="fake",
        active=active,
        draining=False,
        ticket_key=b"",
        instances={},
    )


def agent(*, runner_gone: bool = False) -> agent_pb2.Agent:
    manifest = agent_pb2.AgentManifest(name="a", model="m", system_prompt="Greet.")
    return agent_pb2.Agent(manifest=manifest, inactive_time=Timestamp(seconds=1) if runner_gone else None)


def view(*, model_is_there: bool, runner_is_there: bool) -> FleetView:
    return FleetView(
        revision=2, runners={"r": runner(active=runner_is_there)}, models={"m": model(active=model_is_there)}
    )


def test_expected_model_is_known_and_counts_as_loading() -> None:
    shown = ExpectedMesh([expected_model("m", "pool", "r")], [agent()]).shown(EMPTY)
    assert shown.models["m"].pool == "pool"
    assert not shown.models["m"].reachable, "the health of a gateway does not count it"
    assert shown.agents["a"].manifest.system_prompt == "Greet."
    candidate = candidate_of(shown, shown.models["m"])
    assert (candidate.readiness, candidate.detail) == (Readiness.LOADING, "its runner is being started")
    assert candidate.operations == frozenset(Operation)


def test_no_model_is_expected_before_the_first_snapshot() -> None:
    assert ExpectedMesh([expected_model("m", "", "r")]).shown(FleetView()) == FleetView()


def test_stale_or_partial_row_is_not_an_arrival() -> None:
    """A runner is told before its models: those who waited were refused in between."""
    expected = ExpectedMesh([expected_model("m", "", "r")], [agent()])
    for model_is_there, runner_is_there in ((False, False), (False, True), (True, False)):
        seen = view(model_is_there=model_is_there, runner_is_there=runner_is_there)
        shown = expected.shown(replace(seen, agents={"a": agent(runner_gone=True)}))
        assert shown.models["m"].expected
        assert not shown.agents["a"].HasField("inactive_time")


def test_arrived_model_is_no_longer_expected() -> None:
    expected = ExpectedMesh([expected_model("m", "", "r")], [agent()])
    there = replace(view(model_is_there=True, runner_is_there=True), agents={"a": agent()})
    assert expected.shown(there) is not None
    assert not expected.shown(there).models["m"].expected
    gone = view(model_is_there=False, runner_is_there=False)
    assert expected.shown(gone) is gone


def test_model_missing_after_startup_is_unknown() -> None:
    class Fleet:
        view = EMPTY

    expected = ExpectedMesh([expected_model("m", "", "r")])
    fleet = ExpectingFleet(Fleet(), expected)
    assert "m" in fleet.view.models
    expected.clear()
    assert fleet.view is EMPTY

"""What changed from view to view, however it is found out."""

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from kit.fleet import model_view, runner_view
from kit.recipes import wake_plan

from router_svc.fleet_view import MeshDiff, candidate_of
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView, ModelView, RunnerView

if TYPE_CHECKING:
    from router_svc.policy.endpoints.candidates import Candidate

MODELS = ("a", "b", "c", "d")
RUNNERS = ("r1", "r2")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("runner"), st.sampled_from(RUNNERS), st.integers(0, 2)),
        st.tuples(st.just("no runner"), st.sampled_from(RUNNERS), st.just(0)),
        st.tuples(st.just("model"), st.sampled_from(MODELS), st.integers(0, 1)),
        st.tuples(st.just("no model"), st.sampled_from(MODELS), st.just(0)),
        st.tuples(st.just("again"), st.just(""), st.just(0)),
    ),
    max_size=30,
)


def runner(name: str, used: int) -> RunnerView:
    instances = {
        model: InstanceState(
            model=model, phase=InstanceState.PHASE_READY, slots_total=4, slots_used=used, load_progress=None, detail=""
        )
        for model in MODELS
    }
    return runner_view(name, host=name, instances=instances)


def model(name: str, on: str) -> ModelView:
    return model_view(name, on, wake=wake_plan(by_runner=True))


def after(view: FleetView, what: str, name: str, number: int) -> FleetView:
    """The next view, which shares with the last one what did not change."""
    runners, models = dict(view.runners), dict(view.models)
    match what:
        case "runner":
            return replace(view, revision=view.revision + 1, runners=runners | {name: runner(name, number)})
        case "no runner":
            runners.pop(name, None)
            return replace(view, revision=view.revision + 1, runners=runners)
        case "model":
            return replace(view, revision=view.revision + 1, models=models | {name: model(name, RUNNERS[number])})
        case "no model":
            models.pop(name, None)
            return replace(view, revision=view.revision + 1, models=models)
        case _:
            return view


@given(steps=STEPS, told_every=st.integers(1, 3))
def test_incremental_changes_add_up_to_the_view(steps: list[tuple[str, str, int]], told_every: int) -> None:
    """Also where several changes are taken together."""
    diff, view = MeshDiff(), FleetView()
    known: dict[str, Candidate] = {}
    for number, (what, name, value) in enumerate(steps):
        view = after(view, what, name, value)
        if number % told_every:
            continue
        change = diff.changes_to(view)
        for gone in change.gone:
            del known[gone]
        known |= {candidate.model: candidate for candidate in change.candidates}
        assert known == {each.name: candidate_of(view, each) for each in view.models.values()}


def test_runner_change_reports_only_its_own_models() -> None:
    view = FleetView(1, {name: runner(name, 0) for name in RUNNERS}, {each: model(each, "r1") for each in MODELS[:2]})
    view = after(view, "model", "c", 1)
    diff = MeshDiff()
    assert {each.model for each in diff.changes_to(view).candidates} == {"a", "b", "c"}
    view = after(view, "runner", "r2", 1)
    assert [each.model for each in diff.changes_to(view).candidates] == ["c"]
    assert diff.changes_to(view).candidates == ()

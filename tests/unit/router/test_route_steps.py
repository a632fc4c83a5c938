"""Routes: the order of their steps, their conditions, and remote models in them."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from index_harness import ANYWHERE, CHAT, index, member, pick, place, placed
from scheduler_harness import arrival, candidate, scheduler

from router_svc.policy.decisions import Placed, Rejects, Waits
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.route_conditions import RouteCondition
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.pool_settings import ChoicePolicy
from router_svc.policy.router_request import Request
from router_svc.policy.scheduler import Scheduler
from weft.api.registry.v1.route_pb2 import RouteCondition as RouteConditionMessage
from weft.api.registry.v1.route_pb2 import RouteManifest
from weft.documents.kinds.route import check_route
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.failover import FailureKind
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Skill

LINE = "route/r"


def solo(name: str, **changes: object) -> Candidate:
    return member(name, pool=name, **changes)


def ladder(*candidates: str, pin_primary: bool = False) -> Route:
    return Route(name="r", candidates=candidates, pin_primary=pin_primary)


def test_primary_answers_while_it_has_a_free_slot() -> None:
    mesh = index(solo("big", slots=2), solo("small"), routes=[ladder("big", "small")])
    assert placed(mesh, 4, LINE) == ["big", "big", "small", "small"]
    mesh.release(solo("big", slots=2))
    assert placed(mesh, 1, LINE) == ["big"]


@pytest.mark.parametrize("readiness", [Readiness.ASLEEP, Readiness.LOADING, Readiness.DOWN])
def test_ready_fallback_answers_before_a_primary_that_is_not_ready(readiness: Readiness) -> None:
    mesh = index(solo("big", readiness=readiness), solo("small"), routes=[ladder("big", "small")])
    assert placed(mesh, 1, LINE) == ["small"]


@pytest.mark.parametrize("readiness", [Readiness.ASLEEP, Readiness.LOADING])
def test_pinned_primary_is_waited_for_while_it_is_online(readiness: Readiness) -> None:
    mesh = index(solo("big", readiness=readiness), solo("small"), routes=[ladder("big", "small", pin_primary=True)])
    assert place(mesh, LINE) is None
    gates = {each.model: each.gate for each in mesh.considered(LINE, pick(), 0.0)}
    assert gates["small"] == "big is waited for"
    mesh.table.put(solo("big", readiness=Readiness.DOWN))
    assert placed(mesh, 1, LINE) == ["small"]


def test_busy_pinned_primary_is_waited_for() -> None:
    mesh = index(solo("big", slots=1), solo("small"), routes=[ladder("big", "small", pin_primary=True)])
    assert placed(mesh, 2, LINE) == ["big", "nobody"]


def test_pinned_primary_that_failed_or_lacks_a_capability_is_not_waited_for() -> None:
    mesh = index(solo("big", context_tokens=1024), solo("small"), routes=[ladder("big", "small", pin_primary=True)])
    assert placed(mesh, 1, LINE, pick(excluded=frozenset({solo("big").key}))) == ["small"]
    assert placed(mesh, 1, LINE, pick(type(CHAT)(CHAT.operation, context_tokens=2048))) == ["small"]


def test_route_entry_may_be_a_pool_with_its_own_policy() -> None:
    mesh = index(member("a"), member("b"), solo("c"), policy=ChoicePolicy.ROUND_ROBIN, routes=[ladder("p", "c")])
    assert placed(mesh, 3, LINE) == ["a", "b", "a"]
    assert [candidate.model for candidate in mesh.table.members(LINE)] == ["a", "b", "c"]


def test_route_entry_may_be_one_model_of_a_pool() -> None:
    mesh = index(member("a", slots=1), member("b"), routes=[ladder("a", "p")])
    assert placed(mesh, 2, LINE) == ["a", "b"]
    assert [candidate.model for candidate in mesh.table.members(LINE)] == ["a", "b"]


def test_entries_unknown_to_the_mesh_are_skipped_until_they_appear() -> None:
    mesh = index(solo("small"), routes=[ladder("big", "small")])
    assert placed(mesh, 1, LINE) == ["small"]
    mesh.table.put(solo("big"))
    assert placed(mesh, 1, LINE) == ["big"]


def test_wakeable_candidates_follow_the_route_order() -> None:
    asleep = [solo(name, readiness=Readiness.ASLEEP) for name in "cab"]
    mesh = index(*asleep, routes=[ladder("b", "c", "a")])
    assert [candidate.model for candidate in mesh.permitted(LINE, CHAT, frozenset())] == ["b", "c", "a"]


def test_preference_is_route_position_among_free_candidates_then_warmth_then_load() -> None:
    mesh = index(
        solo("asleep", readiness=Readiness.ASLEEP),
        solo("loading", readiness=Readiness.LOADING),
        solo("busy", slots=1),
        solo("second"),
        solo("third"),
        routes=[ladder("asleep", "busy", "loading", "second", "third")],
    )
    assert placed(mesh, 1, "busy") == ["busy"]
    choice = mesh.choose(LINE, pick(), 0.0)
    assert choice is not None
    assert [each.model for each in choice.considered] == ["second", "third", "busy", "loading", "asleep"]
    assert choice.count == 5


def test_ejected_candidate_is_not_used_while_another_route_step_works() -> None:
    mesh = index(member("a"), member("b"), solo("c"), routes=[ladder("p", "c")])
    for _ in range(5):
        mesh.health.note_failure(member("a"), FailureKind.BROKE, 0.0)
    mesh.table.put(member("b", readiness=Readiness.DOWN))
    assert placed(mesh, 1, LINE) == ["c"]
    mesh.table.drop("c")
    assert place(mesh, LINE, now=5.0) == member("a")


def test_remote_models_are_members_only_as_primary_without_cloud_fallback() -> None:
    cloud, other = solo("cloud", remote=True), solo("other", remote=True)
    mesh = index(cloud, other, solo("local"), routes=[ladder("local", "cloud", "other")], cloud_fallback=False)
    assert [candidate.model for candidate in mesh.table.members(LINE)] == ["local"]
    assert LINE not in mesh.table.queues_of(cloud)
    assert placed(mesh, 5, LINE, pick(ANYWHERE)) == ["local"] * 4 + ["nobody"]
    mesh.table.set_routes({"r": ladder("local", "cloud", "other")}, cloud_fallback=True)
    assert LINE in mesh.table.queues_of(cloud)
    assert placed(mesh, 1, LINE, pick(ANYWHERE)) == ["cloud"]
    mesh.table.set_routes({"r": ladder("cloud", "other")}, cloud_fallback=False)
    assert LINE in mesh.table.queues_of(cloud)
    assert placed(mesh, 4, LINE, pick(ANYWHERE)) == ["cloud"] * 3 + ["nobody"]
    assert placed(mesh, 1, LINE) == ["nobody"]


def test_fallback_excluded_by_the_cloud_guard_is_explained_and_not_only_counted() -> None:
    mesh = index(solo("local"), solo("cloud", remote=True), routes=[ladder("local", "cloud")], cloud_fallback=False)
    choice = mesh.choose(LINE, pick(ANYWHERE), 0.0)
    assert choice is not None
    assert {each.model: each.gate for each in choice.considered} == {
        "local": "",
        "cloud": "remote, and the mesh does not fall back to such models",
    }
    assert choice.count == 2
    assert len(mesh.considered(LINE, pick(ANYWHERE), 0.0)) == 2
    mesh.table.set_routes({"r": ladder("local", "cloud")}, cloud_fallback=True)
    assert {each.gate for each in mesh.considered(LINE, pick(ANYWHERE), 0.0)} == {""}


def test_only_local_members_of_a_mixed_fallback_pool_count() -> None:
    mesh = index(
        solo("first", slots=1),
        member("here", slots=1),
        member("there", remote=True),
        routes=[ladder("first", "p")],
        cloud_fallback=False,
    )
    assert placed(mesh, 3, LINE, pick(ANYWHERE)) == ["first", "here", "nobody"]
    assert [candidate.model for candidate in mesh.table.members(LINE)] == ["first", "here"]


NOON = datetime(2026, 11, 27, 12, 30, tzinfo=UTC)


def mesh(*conditions: RouteCondition, **changes: Any) -> Scheduler:
    found = scheduler(candidate("a", "small", slots=9), candidate("b", "large", slots=9))
    route = Route(name="r", candidates=("small", "large"), conditions=conditions, **changes)
    found.apply(MeshChange(routes={"r": route}), 0.0)
    return found


def request(key: int = 1, **facts: Any) -> Request:
    found = arrival(key, "route/r")
    found.spec = replace(found.spec, **facts)
    found.arrived_wall = NOON
    return found


@pytest.mark.parametrize(
    ("condition", "accepted", "excluded", "why"),
    [
        ({"max_prompt_tokens": 100}, {"prompt_tokens": 100}, {"prompt_tokens": 101}, "prompts of at most 100 tokens"),
        ({"min_prompt_tokens": 100}, {"prompt_tokens": 100}, {"prompt_tokens": 99}, "prompts of at least 100 tokens"),
        ({"tools": True}, {"skills": frozenset({Skill.TOOLS})}, {}, "requests with tools"),
        ({"tools": False}, {}, {"tools": frozenset({"search"})}, "requests without tools"),
        ({"images": False}, {}, {"skills": frozenset({Skill.IMAGE})}, "requests without images"),
        ({"labels": frozenset({"a=1"})}, {"labels": frozenset({"a=1", "b=2"})}, {}, "requests labeled a=1"),
        ({"tenants": ("ann", "bob")}, {"tenant": "bob"}, {"tenant": "eve"}, "requests of ann, bob"),
    ],
)
def test_condition_decides_which_requests_a_candidate_takes(
    condition: dict[str, Any], accepted: dict[str, Any], excluded: dict[str, Any], why: str
) -> None:
    found = RouteCondition(candidate="small", **condition)
    assert found.unmet(request(**accepted).spec, NOON, allow_remote=False) == ""
    assert found.unmet(request(**excluded).spec, NOON, allow_remote=False) == f"takes {why}"


@pytest.mark.parametrize(("first", "last", "is_open"), [(9, 17, True), (12, 13, True), (13, 12, False), (22, 13, True)])
def test_hours_of_a_condition_may_pass_midnight(first: int, last: int, is_open: bool) -> None:
    found = RouteCondition(candidate="small", from_hour=first, to_hour=last)
    assert bool(found.unmet(request().spec, NOON, allow_remote=False)) is not is_open


def test_candidate_may_be_kept_for_callers_with_enough_of_their_rate_limit_left() -> None:
    found = RouteCondition(candidate="small", min_budget=0.2)
    unmet = [found.unmet(request().spec, NOON, allow_remote=False, budget_left=left) for left in (0.2, 0.19)]
    assert unmet == ["", "takes requests while at least 20% of the rate limit is left"]


def test_condition_may_require_or_exclude_permission_for_remote_models() -> None:
    for required in (True, False):
        found = RouteCondition(candidate="small", allow_remote=required)
        assert [bool(found.unmet(request().spec, NOON, allow_remote=each)) for each in (required, not required)] == [
            False,
            True,
        ]


@pytest.mark.parametrize("pin_primary", [False, True])
def test_first_candidate_that_accepts_the_request_answers_and_the_decision_explains_it(pin_primary: bool) -> None:
    found = mesh(RouteCondition(candidate="small", max_prompt_tokens=100), pin_primary=pin_primary)
    (short,) = found.submit(request(1, prompt_tokens=50), 0.0)
    (long,) = found.submit(request(2, prompt_tokens=500), 0.0)
    assert isinstance(short, Placed)
    assert isinstance(long, Placed)
    assert (short.candidate.model, long.candidate.model) == ("small", "large")
    assert long.choice is not None
    others = {each.model: each.gate for each in long.choice.others}
    assert others == {"small": "takes prompts of at most 100 tokens"}


OFFICE = RouteCondition(candidate="p", runner_labels=frozenset({"zone=office"}))


def labeled(*zones: str) -> Scheduler:
    found = scheduler(
        *(candidate(zone, f"at-{zone}", pool="p", labels=frozenset({f"zone={zone}"})) for zone in zones),
        candidate("b", "large"),
    )
    found.apply(MeshChange(routes={"r": Route(name="r", candidates=("p", "large"), conditions=(OFFICE,))}), 0.0)
    return found


def test_condition_may_choose_the_labels_of_runners_and_is_explained() -> None:
    found = labeled("home", "office")
    (first,), (second,) = (found.submit(request(key), 0.0) for key in (1, 2))
    assert isinstance(first, Placed)
    assert isinstance(second, Placed)
    assert (first.candidate.model, second.candidate.model) == ("at-office", "large")
    assert second.choice is not None
    others = {each.model: each.gate for each in second.choice.others}
    assert others == {"at-home": "lacks the label zone=office", "at-office": "its slot is busy"}


def test_changed_label_of_a_model_applies_to_new_and_waiting_requests() -> None:
    found = labeled("office")
    (first,), (second,) = (found.submit(request(key), 0.0) for key in (1, 2))
    assert isinstance(first, Placed)
    assert isinstance(second, Placed)
    (waits,) = found.submit(request(3), 0.0)
    assert isinstance(waits, Waits)
    abroad = candidate("office", "at-office", pool="p", labels=frozenset({"zone=abroad"}))
    found.apply(MeshChange(candidates=(abroad,)), 1.0)
    assert found.finish(1, 2.0) == [], "it no longer has the label that the condition requires"
    assert [type(each) for each in found.finish(2, 3.0)] == [Placed]
    found.apply(MeshChange(routes={"r": Route(name="r", candidates=("p",), conditions=(OFFICE,))}), 4.0)
    (refused,) = found.submit(request(4), 5.0)
    assert isinstance(refused, Rejects)
    found.apply(MeshChange(candidates=(replace(abroad, labels=frozenset({"zone=office"})),)), 6.0)
    (fourth,) = found.submit(request(5), 7.0)
    assert isinstance(fourth, Placed)


def test_refusal_states_the_label_that_no_runner_has() -> None:
    found = labeled("home")
    found.apply(MeshChange(routes={"r": Route(name="r", candidates=("p",), conditions=(OFFICE,))}), 0.0)
    (refused,) = found.submit(request(), 0.0)
    assert isinstance(refused, Rejects)
    assert refused.message == "no candidate of route/r has the label zone=office that a condition requires"


def test_request_that_no_candidate_accepts_is_refused_with_the_conditions() -> None:
    limit = 100
    found = mesh(*(RouteCondition(candidate=name, max_prompt_tokens=limit) for name in ("small", "large")))
    (refused,) = found.submit(request(prompt_tokens=500), 0.0)
    assert isinstance(refused, Rejects)
    assert refused.reason is Reason.NO_RUNNER_AVAILABLE
    assert refused.message == (
        "no candidate of route/r accepts the request: candidate 1 takes prompts of at most 100 tokens; "
        "candidate 2 takes prompts of at most 100 tokens"
    )


def test_conditions_apply_to_waiting_requests_of_a_route_whose_order_changes() -> None:
    found = scheduler(candidate("a", "small"), candidate("b", "large"))
    for_ann = RouteCondition(candidate="small", tenants=("ann",))
    route = Route(name="r", candidates=("small", "large"), conditions=(for_ann,))
    found.apply(MeshChange(routes={"r": route}), 0.0)
    for key in (1, 2):
        assert isinstance(found.submit(request(key, tenant="ann"), 0.0)[-1], Placed)
    assert isinstance(found.submit(request(3, tenant="eve"), 0.0)[-1], Waits)
    assert found.apply(MeshChange(routes={"r": replace(route, candidates=("large", "small"))}), 1.0) == []
    assert found.finish(1, 2.0) == [], "small takes requests of ann"
    (granted,) = found.finish(2, 3.0)
    assert isinstance(granted, Placed)
    assert granted.candidate.model == "large"


@pytest.mark.parametrize(
    ("conditions", "field"),
    [
        ([{"candidate": "other"}], "conditions[0].candidate"),
        ([{"candidate": "small"}, {"candidate": "small"}], "conditions[1].candidate"),
        ([{"candidate": "small", "hours": "6"}], "conditions[0].hours"),
        ([{"candidate": "small", "hours": "6-25"}], "conditions[0].hours"),
        ([{"candidate": "small", "min_prompt_tokens": 9, "max_prompt_tokens": 5}], "conditions[0].max_prompt_tokens"),
    ],
)
def test_invalid_conditions_are_refused_naming_the_field(conditions: list[dict[str, Any]], field: str) -> None:
    messages = [RouteConditionMessage(**each) for each in conditions]
    with pytest.raises(FieldError) as raised:
        check_route(RouteManifest(name="r", candidates=["small", "large"], conditions=messages), "route")
    assert raised.value.field == f"route.{field}"

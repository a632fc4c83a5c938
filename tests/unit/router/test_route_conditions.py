"""Conditions of a route's candidates: which requests they take, in order, and how decisions explain it."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from scheduler_harness import arrival, candidate, scheduler

from router_svc.policy.decisions import Placed, Rejects
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.route_conditions import RouteCondition
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.request import Request
from router_svc.policy.scheduler import Scheduler
from weft.api.registry.v1.route_pb2 import RouteCondition as RouteConditionMessage
from weft.api.registry.v1.route_pb2 import RouteManifest
from weft.documents.kinds.route import check_route
from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason
from weft.kernel.request import Skill

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

"""Routes: their order, their budgets, and the keep-alive of their models."""

from dataclasses import replace

import pytest
from scheduler_harness import arrival, asleep, candidate, failed, placed, rejected, scheduler, woken

from router_svc.policy.decisions import Placed, Rejects
from router_svc.policy.endpoints.candidates import Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import Route
from weft.kernel.errors.reasons import Reason


def route(*candidates: str, **changes: object) -> MeshChange:
    return MeshChange(routes={"r": Route(name="r", candidates=candidates, **changes)})  # type: ignore[arg-type]  # fields by name


def test_unknown_route_is_refused_without_suggesting_others() -> None:
    mesh = scheduler(candidate("a", "m"))
    mesh.apply(route("m"), 0.0)
    (refused,) = mesh.submit(arrival(1, "route/other"), 0.0)
    assert isinstance(refused, Rejects)
    assert refused.reason is Reason.MODEL_NOT_FOUND
    assert refused.message == "there is no route other; `weft get routes` (GET /api/v1/routes) lists what there is"
    assert (refused.metadata["unknown_kind"], refused.metadata["unknown_name"]) == ("route", "other")


def test_primary_answers_with_the_keep_alive_of_its_route() -> None:
    mesh = scheduler(candidate("a", "m"), candidate("b", "n"))
    mesh.apply(route("m", "n", keep_alive_seconds=90.0), 0.0)
    (placement,) = mesh.submit(arrival(1, "route/r"), 0.0)
    assert isinstance(placement, Placed)
    assert (placement.candidate.model, placement.keep_alive_seconds) == ("m", 90.0)
    (direct,) = mesh.submit(arrival(2, "n"), 0.0)
    assert isinstance(direct, Placed)
    assert direct.keep_alive_seconds is None


def test_grant_has_the_deadline_of_its_route_or_request() -> None:
    mesh = scheduler(candidate("a", "m", slots=4))
    mesh.apply(route("m", budget_seconds=30.0), 0.0)
    ends = {}
    for key, target, deadline_at in ((1, "route/r", None), (2, "route/r", 5.0), (3, "m", 50.0), (4, "m", None)):
        (placement,) = mesh.submit(arrival(key, target, arrived_at=1.0, deadline_at=deadline_at), 2.0)
        assert isinstance(placement, Placed)
        ends[key] = placement.deadline_at
    assert ends == {1: 31.0, 2: 5.0, 3: 50.0, 4: None}


def test_hibernating_pinned_primary_is_woken_although_a_fallback_is_free() -> None:
    mesh = scheduler(asleep("a", "m"), candidate("b", "n"))
    mesh.apply(route("m", "n", pin_primary=True), 0.0)
    decisions = mesh.submit(arrival(1, "route/r"), 0.0)
    assert (woken(decisions), placed(decisions)) == (["m"], {})


def test_pinned_primary_that_fails_to_wake_is_not_waited_for() -> None:
    mesh = scheduler(asleep("a", "m"), candidate("b", "n"))
    mesh.apply(route("m", "n", pin_primary=True), 0.0)
    mesh.submit(arrival(1, "route/r"), 0.0)
    assert placed(mesh.wake_finished("m", failed("no"), 5.0)) == {1: "b"}


def test_request_waiting_for_a_deleted_route_is_refused() -> None:
    mesh = scheduler(candidate("a", "m"))
    mesh.apply(route("m"), 0.0)
    mesh.submit(arrival(1, "route/r"), 0.0)
    mesh.submit(arrival(2, "route/r"), 0.0)
    assert rejected(mesh.apply(MeshChange(routes={}), 1.0)) == {2: Reason.MODEL_NOT_FOUND}


def test_request_waiting_for_a_remote_fallback_is_refused_when_the_cloud_guard_is_enabled() -> None:
    remote = candidate("c", "cloud", remote=True)
    mesh = scheduler(candidate("a", "m", readiness=Readiness.DOWN), remote)
    mesh.apply(replace(route("m", "cloud"), cloud_fallback=True), 0.0)
    assert placed(mesh.submit(arrival(1, "route/r", allow_remote=True), 0.0)) == {1: "c"}
    mesh.submit(arrival(2, "route/r", allow_remote=True), 0.0)
    assert rejected(mesh.apply(MeshChange(cloud_fallback=False), 1.0)).keys() == {2}


def test_cloud_fallback_is_off_until_the_mesh_allows_it() -> None:
    mesh = scheduler(candidate("a", "m"), candidate("b", "cloud", remote=True))
    mesh.apply(route("m", "cloud"), 0.0)
    mesh.submit(arrival(1, "route/r", allow_remote=True), 0.0)
    assert placed(mesh.submit(arrival(2, "route/r", allow_remote=True), 0.0)) == {}
    assert placed(mesh.apply(MeshChange(cloud_fallback=True), 1.0)) == {2: "b"}


@pytest.mark.parametrize("cloud_fallback", [True, False])
@pytest.mark.parametrize("asks_remote", [True, False])
@pytest.mark.parametrize(
    "reason",
    [
        Reason.CONNECT_FAILED,
        Reason.BACKEND_NOT_READY,
        Reason.NO_SLOT_AVAILABLE,
        Reason.WORKER_LOST,
        Reason.TICKET_INVALID,
        Reason.TOOL_UNAVAILABLE,
    ],
)
def test_retry_uses_a_remote_fallback_only_if_cloud_guard_and_request_allow_it(
    reason: Reason, asks_remote: bool, cloud_fallback: bool
) -> None:
    mesh = scheduler(candidate("a", "m"), candidate("b", "cloud", remote=True))
    mesh.apply(replace(route("m", "cloud"), cloud_fallback=cloud_fallback), 0.0)
    mesh.submit(arrival(1, "route/r", allow_remote=asks_remote), 0.0)
    decisions = mesh.report_failed(1, 1, reason, 0.0) + mesh.tick(1.0)
    assert ("b" in placed(decisions).values()) is (cloud_fallback and asks_remote)

"""No path sends bytes off the premises without a permit: random meshes, routes, guards, tenants and retries."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from permit_world import (
    FAILURES,
    Ask,
    Fail,
    Finish,
    Pass,
    PermitViolation,
    PermitWorld,
    PlacingScheduler,
    Step,
    candidates,
    mesh_settings,
    routes,
    steps,
)

from router_svc.policy.arrival import Arrival
from router_svc.policy.decisions import Decision
from router_svc.policy.endpoints import capability
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import ResolvedRoute, Route
from router_svc.policy.scheduler import Scheduler
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation, Priority

CONTROL_EXAMPLES = 2000
"""At most; a control ends with the first violation."""
LONG_SEARCH = pytest.mark.slow("searches up to 2,000 histories for a planted fault")


def _honest() -> PlacingScheduler:
    return Scheduler(settings=mesh_settings())


def _live(
    make: Callable[[], PlacingScheduler],
    fleet: Sequence[Candidate],
    ladders: Sequence[Route],
    *,
    allows_fallback: bool,
    story: Sequence[Step],
) -> PermitWorld:
    world = PermitWorld(make())
    world.begin(fleet, ladders, allows_fallback=allows_fallback)
    for step in story:
        world.do(step)
    return world


_STORIES: dict[str, st.SearchStrategy[Any]] = {
    "fleet": st.lists(candidates(), min_size=3, max_size=6, unique_by=lambda candidate: candidate.model),
    "ladders": st.lists(routes(), min_size=2, max_size=2, unique_by=lambda route: route.name),
    "allows_fallback": st.booleans(),
    "story": steps(),
}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(**_STORIES)
def test_no_request_is_placed_off_the_premises_without_a_permit_nor_past_the_guard(
    fleet: list[Candidate], ladders: list[Route], allows_fallback: bool, story: list[Step]
) -> None:
    _live(_honest, fleet, ladders, allows_fallback=allows_fallback, story=story)


def _finds_a_violation(make: Callable[[], PlacingScheduler]) -> bool:
    """Whether the same search finds what another scheduler does wrong."""

    @settings(
        max_examples=CONTROL_EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(**_STORIES)
    def search(fleet: list[Candidate], ladders: list[Route], allows_fallback: bool, story: list[Step]) -> None:
        _live(make, fleet, ladders, allows_fallback=allows_fallback, story=story)

    try:
        search()
    except (PermitViolation, AssertionError):
        return True
    return False


class _TakesEveryPermitForGranted(Scheduler):
    def submit(self, arrival: Arrival, now: float) -> list[Decision]:
        return super().submit(replace(arrival, needs=replace(arrival.needs, allow_remote=True)), now)


class _ForgetsTheGuard(Scheduler):
    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        return super().apply(replace(change, cloud_fallback=True), now)


class _PermitsRetries(Scheduler):
    """Sends a request that failed once wherever there is room."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._seen: dict[int, Arrival] = {}

    def submit(self, arrival: Arrival, now: float) -> list[Decision]:
        self._seen[arrival.key] = arrival
        return super().submit(arrival, now)

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        arrival = self._seen[key]
        needs = replace(arrival.needs, allow_remote=True)
        again = replace(arrival, needs=needs, attempts_used=attempt)
        return self.finish(key, now) + super().submit(again, now)


@LONG_SEARCH
@pytest.mark.parametrize("careless", [_TakesEveryPermitForGranted, _ForgetsTheGuard, _PermitsRetries])
def test_the_search_finds_a_scheduler_that_loses_a_permit(careless: Callable[..., PlacingScheduler]) -> None:
    assert _finds_a_violation(lambda: careless(settings=mesh_settings()))


@contextmanager
def _ladders_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    honest = ResolvedRoute.__init__

    def unguarded(self: ResolvedRoute, route: Route, *, cloud_fallback: bool) -> None:
        del cloud_fallback
        honest(self, route, cloud_fallback=True)

    with monkeypatch.context() as patch:
        patch.setattr(ResolvedRoute, "__init__", unguarded)
        yield


@LONG_SEARCH
def test_the_search_finds_a_ladder_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    with _ladders_without_a_guard(monkeypatch):
        assert _finds_a_violation(_honest)


@LONG_SEARCH
def test_the_search_finds_a_gate_that_lets_everybody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = capability.gate

    def open_gate(candidate: Any, needs: Any) -> str:
        word = honest(candidate, needs)
        return "" if word == "remote" else word

    with monkeypatch.context() as patch:
        patch.setattr(capability, "gate", open_gate)
        assert _finds_a_violation(_honest)


def _member(model: str, *, remote: bool, pool: str = "") -> Candidate:
    return Candidate(
        model=model,
        pool=pool or model,
        runner=f"on-{model}",
        incarnation="a",
        readiness=Readiness.READY,
        slots=1,
        operations=frozenset(Operation),
        remote=remote,
        host="h",
    )


def _ask(target: str, *, asks_remote: bool, tenant: str = "on_request") -> Ask:
    return Ask(target=target, asks_remote=asks_remote, tenant=tenant, priority=Priority.NORMAL, session=b"")


LOCAL, CLOUD = _member("m0", remote=False), _member("m1", remote=True)
LADDER = Route(name="r0", candidates=("m0", "m1"))
CLOUD_FIRST = Route(name="r1", candidates=("m1", "m0"))


def test_the_world_sees_the_placements_that_are_permitted() -> None:
    """Otherwise the search above could not fail."""
    story: list[Step] = [
        _ask("m1", asks_remote=True),
        Finish(0, after_content=True),
        _ask("m1", asks_remote=False, tenant="always"),
    ]
    world = _live(_honest, [LOCAL, CLOUD], [], allows_fallback=False, story=story)
    assert world.remote_placements == 2


@pytest.mark.parametrize("reason", [reason for reason in FAILURES if reason is not Reason.INVALID_ARGUMENT])
@pytest.mark.parametrize("allows_fallback", [True, False])
@pytest.mark.parametrize("asks_remote", [True, False])
def test_after_a_failed_attempt_a_route_leaves_the_premises_only_where_guard_and_request_let_it(
    reason: Reason, allows_fallback: bool, asks_remote: bool
) -> None:
    story: list[Step] = [_ask("route/r0", asks_remote=asks_remote), Fail(0, reason), Pass(1.0)]
    world = _live(_honest, [LOCAL, CLOUD], [LADDER], allows_fallback=allows_fallback, story=story)
    assert world.remote_placements == (1 if allows_fallback and asks_remote else 0)


@pytest.mark.parametrize("allows_fallback", [True, False])
def test_an_explicit_primary_off_the_premises_is_never_stripped(allows_fallback: bool) -> None:
    story: list[Step] = [_ask("route/r1", asks_remote=True)]
    world = _live(_honest, [LOCAL, CLOUD], [CLOUD_FIRST], allows_fallback=allows_fallback, story=story)
    assert world.remote_placements == 1


@pytest.mark.parametrize(
    ("tenant", "asks_remote", "placed"),
    [("never", True, 0), ("never", False, 0), ("on_request", True, 1), ("on_request", False, 0), ("always", False, 1)],
)
def test_the_settings_of_the_tenant_and_the_request_make_the_permit(
    tenant: str, asks_remote: bool, placed: int
) -> None:
    world = _live(
        _honest, [CLOUD], [], allows_fallback=True, story=[_ask("m1", asks_remote=asks_remote, tenant=tenant)]
    )
    assert world.remote_placements == placed

"""Durable requests: served after callers, with a share of their own, never shed, and never in a caller's way."""

import math
from typing import Any

import pytest
from scheduler_harness import Mesh, arrival, candidate, placed, refusals, rejected, scheduler

from router_svc.policy.decisions import Decision, Waits
from router_svc.policy.endpoints.candidates import Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.pool_settings import Settings, TenantSettings
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority

DURABLE = Priority.DURABLE


class Load:
    """One slot, and waiting requests per priority class; each served request is replaced by one of its kind."""

    def __init__(self, mesh: Mesh, *priorities: Priority, waiting: int = 4, target: str = "m") -> None:
        self.mesh = mesh
        self.now = 0.0
        self.priorities: dict[int, Priority] = {}
        self.targets: dict[int, str] = {}
        self.running: list[int] = []
        self.served: list[Priority] = []
        self.refused: dict[int, Reason] = {}
        for _ in range(waiting):
            for band in priorities:
                self.ask(band, target)

    def ask(self, band: Priority, target: str = "m", **fields: Any) -> list[Decision]:
        key = len(self.priorities) + 1
        self.priorities[key], self.targets[key] = band, target
        fields = {"tenant": "durable" if band is DURABLE else "caller", "prompt_tokens": 10, **fields}
        decisions = self.mesh.submit(arrival(key, target, priority=band, arrived_at=self.now, **fields), self.now)
        self.hear(decisions)
        return decisions

    def serve(self, grants: int) -> list[Priority]:
        """Ends the running request so many times, a tenth of a second each; returns the granted requests."""
        already = len(self.served)
        for _ in range(grants):
            self.now += 0.1
            for key in self.running[:]:
                self.running.remove(key)
                self.hear(self.mesh.finish(key, self.now))
                self.ask(self.priorities[key], self.targets[key])
        return self.served[already:]

    def hear(self, decisions: list[Decision]) -> None:
        self.refused |= rejected(decisions)
        for key in placed(decisions):
            self.running.append(key)
            self.served.append(self.priorities[key])


def mesh_of(*candidates: Any, settings: Settings | None = None, **limits: Any) -> Mesh:
    wide: dict[str, Any] = {"queue_depth_per_runner": 1000, "queue_timeout_seconds": 1e6}
    return scheduler(*(candidates or (candidate(),)), settings=settings, **{**wide, **limits})


@pytest.mark.parametrize(("share", "of_thousand"), [(0.1, 100), (0.3, 300), (0.5, 500), (0.0, 0)])
def test_durable_requests_get_their_share_of_grants_while_callers_wait(share: float, of_thousand: int) -> None:
    load = Load(mesh_of(durable_share=share), Priority.NORMAL, DURABLE)
    load.serve(20)
    assert load.serve(1000).count(DURABLE) == pytest.approx(of_thousand, abs=1)


def test_durable_share_holds_for_any_waiting_classes_and_lower_ones_keep_theirs() -> None:
    load = Load(mesh_of(lower_class_every=8), *CALLER_CLASSES, DURABLE, waiting=20)
    load.serve(100)
    served = load.serve(1000)
    assert served.count(DURABLE) >= 98
    high = served.count(Priority.HIGH)
    assert high >= 650
    assert min(served.count(Priority.NORMAL), served.count(Priority.LOW)) >= high // 7 - 2, "one to seven of high"


def test_durable_requests_of_a_pool_get_their_share_beside_a_route_using_it() -> None:
    mesh = mesh_of()
    mesh.apply(MeshChange(routes={"r": Route(name="r", candidates=("m",))}), 0.0)
    load = Load(mesh, Priority.HIGH, target="route/r")
    for _ in range(4):
        load.ask(DURABLE)
    load.serve(20)
    assert load.serve(1000).count(DURABLE) == pytest.approx(100, abs=2)


def test_durable_requests_in_ten_queues_share_the_quota_of_one() -> None:
    mesh = mesh_of()
    routes = {f"r{number}": Route(name=f"r{number}", candidates=("m",)) for number in range(10)}
    mesh.apply(MeshChange(routes=routes), 0.0)
    load = Load(mesh, Priority.HIGH)
    for name in routes:
        load.ask(DURABLE, f"route/{name}")
        load.ask(DURABLE, f"route/{name}")
    load.serve(200)
    assert load.serve(1000).count(DURABLE) == pytest.approx(100, abs=12)


def test_durable_requests_use_all_idle_slots() -> None:
    load = Load(mesh_of(candidate(slots=3), durable_share=0.0), DURABLE, waiting=10)
    assert len(load.running) == 3
    assert load.serve(10) == [DURABLE] * 30


def test_durable_request_has_no_queue_timeout() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0, overload_after_seconds=10.0)
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2, priority=DURABLE), 0.0)
    mesh.submit(arrival(3), 0.0)
    refused: dict[int, Reason] = {}
    for second in range(0, 10_000, 10):
        refused |= rejected(mesh.tick(float(second)))
    assert refused == {3: Reason.QUEUE_TIMEOUT}
    assert placed(mesh.finish(1, 10_000.0)) == {2: "a"}


def test_durable_request_has_no_load_timeout() -> None:
    mesh = scheduler(candidate(readiness=Readiness.LOADING), max_load_pause_seconds=60.0)
    mesh.submit(arrival(1, priority=DURABLE), 0.0)
    assert [rejected(mesh.tick(float(second))) for second in range(0, 3600, 20)] == [{}] * 180


def test_durable_request_has_only_its_own_deadline_and_no_route_budget() -> None:
    mesh = mesh_of(candidate("a", "m"))
    mesh.apply(MeshChange(routes={"r": Route(name="r", candidates=("m",), budget_seconds=20.0)}), 0.0)
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2, "route/r", priority=DURABLE), 0.0)
    mesh.submit(arrival(3, "route/r"), 0.0)
    mesh.submit(arrival(4, "route/r", priority=DURABLE, deadline_at=40.0), 0.0)
    assert rejected(mesh.tick(25.0)) == {3: Reason.DEADLINE_EXCEEDED}
    assert rejected(mesh.tick(45.0)) == {4: Reason.DEADLINE_EXCEEDED}
    (granted,) = mesh.finish(1, 50.0)
    assert (granted.key, granted.deadline_at) == (2, None)  # type: ignore[union-attr]  # only a grant has both


def test_durable_and_caller_queue_limits_are_separate() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=2)
    mesh.submit(arrival(1), 0.0)
    for key in range(10, 60):
        assert rejected(mesh.submit(arrival(key, priority=DURABLE), 0.0)) == {}
    callers = [rejected(mesh.submit(arrival(key, priority=Priority.LOW), 0.0)) for key in (2, 3)]
    assert callers == [{}, {}]
    refused = refusals(mesh.submit(arrival(4, priority=Priority.LOW), 0.0))[4]
    assert (refused.metadata["queueDepth"], refused.metadata["maxDepth"]) == ("2", "2")
    instead = rejected(mesh.submit(arrival(5, priority=Priority.HIGH), 0.0))
    assert instead == {3: Reason.QUEUE_FULL}, "a caller makes room, and no durable request"
    assert rejected(mesh.submit(arrival(60, priority=DURABLE), 0.0)) == {}
    assert mesh.queues()[0].waiting == 2
    assert mesh.waiting == 53


def test_waiting_durable_requests_are_limited_across_all_queues() -> None:
    mesh = scheduler(candidate("a", "m"), candidate("b", "n"), max_durable_waiting=3)
    for key, target in ((1, "m"), (2, "n"), (3, "m"), (4, "n"), (5, "m")):
        assert rejected(mesh.submit(arrival(key, target, priority=DURABLE), 0.0)) == {}
    refused = refusals(mesh.submit(arrival(6, "n", priority=DURABLE), 0.0))[6]
    message = "3 durable requests wait, which is the limit"
    assert (refused.reason, refused.message) == (Reason.QUEUE_FULL, message)
    assert rejected(mesh.submit(arrival(7, "n"), 0.0)) == {}
    mesh.finish(3, 1.0)
    assert rejected(mesh.submit(arrival(8, "n", priority=DURABLE), 1.0)) == {}


def test_queue_with_only_durable_requests_is_not_overloaded() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=1000, queue_timeout_seconds=30.0, overload_after_seconds=10.0)
    running = 1
    mesh.submit(arrival(1, priority=DURABLE), 0.0)
    for key in range(2, 200):
        mesh.submit(arrival(key, priority=DURABLE), 0.0)
    for minute in range(1, 20):
        mesh.tick(60.0 * minute)
        (running,) = placed(mesh.finish(running, 60.0 * minute))
    asked = arrival(1000, arrived_at=1200.0, deadline_at=1300.0)
    (word,) = mesh.submit(asked, 1200.0)
    assert isinstance(word, Waits)
    assert word.position == 1
    assert word.eta_seconds is None, "what durable requests wait says nothing about callers"


def test_caller_status_has_pace_and_position_among_callers_only() -> None:
    with_durable, without = (Load(mesh_of(), Priority.NORMAL, *durable) for durable in ((DURABLE,), ()))
    words = []
    for load in (with_durable, without):
        load.serve(300)
        (word,) = load.ask(Priority.NORMAL, tenant="new")
        assert isinstance(word, Waits)
        words.append(word)
    told, alone = words
    assert told.position == alone.position
    assert told.eta_seconds is not None
    assert alone.eta_seconds is not None
    assert alone.eta_seconds <= told.eta_seconds <= math.ceil(alone.eta_seconds * 1.2)


def test_caller_is_placed_immediately_past_durable_requests_that_cannot_use_the_slot() -> None:
    mesh = mesh_of(candidate(slots=2), settings=Settings(tenants={"t": TenantSettings(max_in_flight=1)}))
    mesh.submit(arrival(1, priority=DURABLE, tenant="t"), 0.0)
    mesh.submit(arrival(2, priority=DURABLE, tenant="t"), 0.0)
    for key in range(10, 40):
        assert placed(mesh.submit(arrival(key, priority=Priority.LOW), 0.0)) == {key: "a"}
        mesh.finish(key, 0.0)
    assert placed(mesh.finish(1, 1.0)) == {2: "a"}, "its share is due, and its tenant has room again"


def test_failed_durable_request_is_retried_without_a_timeout() -> None:
    mesh = scheduler(candidate("a"), candidate("b", "m2", pool="m"), queue_timeout_seconds=5.0)
    mesh.submit(arrival(1, priority=DURABLE), 0.0)
    for key in (2, 3):
        mesh.submit(arrival(key), 0.0)
    assert rejected(mesh.report_failed(1, 1, Reason.SERVER_DIED, 1.0)) == {}
    assert rejected(mesh.tick(100.0)) == {3: Reason.QUEUE_TIMEOUT}
    assert placed(mesh.finish(2, 101.0)) == {1: "b"}


def test_durable_request_gets_one_status() -> None:
    mesh = mesh_of()
    mesh.submit(arrival(1), 0.0)
    (word,) = mesh.submit(arrival(2, priority=DURABLE), 0.0)
    assert isinstance(word, Waits)
    mesh.submit(arrival(3), 0.0)
    told = [each.key for second in range(1, 20) for each in mesh.tick(float(second)) if isinstance(each, Waits)]
    assert 2 not in told


def test_durable_requests_are_not_urgent() -> None:
    mesh = mesh_of()
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2, priority=DURABLE), 0.0)
    assert (mesh.needs_ticks, mesh.is_hurried) == (True, False)
    mesh.submit(arrival(3), 0.0)
    assert mesh.is_hurried

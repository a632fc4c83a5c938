"""Who is served next: tenants by what they had, a tenant's classes, caps, and no model before another's door."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import Mesh, arrival, candidate, placed, plain, rejected, scheduler

from router_svc.policy.decisions import Decision, Served, WaitKind, Waits
from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.pool_settings import PoolSettings, Settings, TenantSettings
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority

TOOK = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100)


def serve_in_turn(mesh: Mesh, running: int, turns: int, served: Served | None = TOOK) -> list[int]:
    """Who is placed as one slot is given back again and again, a second each."""
    order = []
    for turn in range(turns):
        decisions = placed(mesh.finish(running, 100.0 + turn, served))
        if not decisions:
            break
        (running,) = decisions
        order.append(running)
    return order


def fill(mesh: Mesh, tenant: str, keys: range, now: float = 0.0, **changes: Any) -> None:
    for key in keys:
        mesh.submit(arrival(key, tenant=tenant, arrived_at=now, prompt_tokens=100, **changes), now)


def test_tenant_with_twice_the_weight_gets_twice_as_much() -> None:
    mesh = scheduler(
        candidate(), queue_depth_per_runner=200, settings=Settings(tenants={"big": TenantSettings(weight=2.0)})
    )
    fill(mesh, "big", range(1, 61))
    fill(mesh, "small", range(100, 160))
    order = serve_in_turn(mesh, 1, 45)
    assert sum(key < 100 for key in order) == pytest.approx(30, abs=1)


def test_actual_cost_counts_instead_of_the_estimate() -> None:
    """Both ask for the same, but the answers of one are a tenth as long as thought: it gets more of them."""
    mesh = scheduler(candidate(), queue_depth_per_runner=400)
    for key in range(1, 200):
        tenant = "long" if key % 2 else "short"
        mesh.submit(arrival(key, tenant=tenant, max_output_tokens=1000, prompt_tokens=10), 0.0)
    running, answered = 1, {"long": 0, "short": 0}
    for turn in range(110):
        tenant = "long" if running % 2 else "short"
        answered[tenant] += 1
        tokens = 1000 if tenant == "long" else 100
        took = Served(prompt_tokens=10, cached_tokens=10, output_tokens=tokens)
        (running,) = placed(mesh.finish(running, float(turn), took))
    assert answered["short"] > 5 * answered["long"]


def test_cached_prompt_tokens_are_free() -> None:
    cached = Served(prompt_tokens=10_000, cached_tokens=10_000, output_tokens=10)
    mesh = scheduler(candidate(), queue_depth_per_runner=100)
    fill(mesh, "cached", range(1, 30), max_output_tokens=10)
    fill(mesh, "other", range(50, 80), max_output_tokens=10)
    running, order = 1, []
    for turn in range(33):
        (running,) = placed(mesh.finish(running, float(turn), cached if running < 50 else TOOK))
        order.append(running)
    assert sum(key < 50 for key in order) > 2 * sum(key >= 50 for key in order)


def test_earlier_deadline_goes_first_within_a_tenant() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    mesh.submit(arrival(3, deadline_at=500.0), 0.0)
    mesh.submit(arrival(4, deadline_at=300.0), 0.0)
    assert serve_in_turn(mesh, 1, 3) == [4, 3, 2]


def test_tenant_that_says_high_gets_no_more_than_its_share() -> None:
    """Two tenants, one slot: the one that said high with each request got 23 of 25 turns."""
    mesh = scheduler(candidate(), queue_depth_per_runner=200)
    fill(mesh, "greedy", range(1, 31), priority=Priority.HIGH)
    fill(mesh, "honest", range(100, 130))
    assert sum(key >= 100 for key in serve_in_turn(mesh, 1, 25)) >= 12


def test_tenant_that_says_high_gets_no_earlier_turn_than_one_that_began_to_wait_before() -> None:
    """New tenants begin with equal accounts, so a class that decided between those would order all of them."""
    mesh = scheduler(candidate())
    mesh.submit(arrival(1, tenant="first"), 0.0)
    for key, band in ((2, Priority.LOW), (3, Priority.NORMAL), (4, Priority.HIGH)):
        mesh.submit(arrival(key, tenant=band.name, priority=band), 0.0)
    assert serve_in_turn(mesh, 1, 3) == [2, 3, 4]


ASKED = st.tuples(st.sampled_from("abc"), st.sampled_from(CALLER_CLASSES), st.sampled_from(("", "x", "y")))


@given(st.lists(st.one_of(ASKED, st.none()), max_size=60))
def test_turns_of_tenants_do_not_depend_on_the_classes_of_requests(
    steps: list[tuple[str, Priority, str] | None],
) -> None:
    """`steps`: a request of a tenant with a class and a tool, or None: one ends."""

    def turns(*, with_classes: bool) -> list[str]:
        mesh = scheduler(
            candidate(tools=frozenset("xy")),
            queue_depth_per_runner=1000,
            lower_class_patience_seconds=3.0,
            # An overloaded queue refuses requests whose turn would come too late, and which those are depends on both.
            overload_after_seconds=math.inf,
        )
        tenants: dict[int, str] = {}
        order: list[int] = []
        for now, step in enumerate([*steps, *[None] * len(steps)]):
            if step is not None:
                tenant, band, tool = step
                tenants[now] = tenant
                asked = arrival(
                    now,
                    tenant=tenant,
                    priority=band if with_classes else Priority.NORMAL,
                    tools=frozenset(tool),
                    arrived_at=float(now),
                    prompt_tokens=100 * ord(tenant),
                    max_output_tokens=1,
                )
                order += placed(mesh.submit(asked, float(now)))
            elif order:
                order += placed(mesh.finish(order[-1], float(now), TOOK))
        assert sorted(order) == sorted(tenants), "all were served"
        return [tenants[key] for key in order]

    assert turns(with_classes=True) == turns(with_classes=False)


def test_system_class_precedes_all_others() -> None:
    mesh = scheduler(candidate())
    for key, band in ((1, Priority.NORMAL), (2, Priority.HIGH), (3, Priority.SYSTEM), (4, Priority.LOW)):
        mesh.submit(arrival(key, priority=band), 0.0)
    assert serve_in_turn(mesh, 1, 3) == [3, 2, 4]


def test_every_eighth_grant_goes_to_a_lower_class_that_waited_long_enough() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=200, lower_class_every=8, lower_class_patience_seconds=5.0)
    fill(mesh, "t", range(1, 61), priority=Priority.HIGH)
    fill(mesh, "t", range(100, 110), priority=Priority.LOW)
    order = serve_in_turn(mesh, 1, 40)
    low = [turn for turn, key in enumerate(order) if key >= 100]
    assert low == [7, 15, 23, 31, 39]


def test_lower_class_that_has_not_waited_long_gets_no_reserved_grant() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=200, lower_class_patience_seconds=1000.0)
    fill(mesh, "t", range(1, 31), priority=Priority.HIGH)
    fill(mesh, "t", range(100, 110), priority=Priority.LOW)
    assert all(key < 100 for key in serve_in_turn(mesh, 1, 29))


def test_tenant_at_its_cap_waits_with_that_status_and_blocks_no_other() -> None:
    settings = Settings(tenants={"acme": TenantSettings(max_in_flight=2)})
    mesh = scheduler(candidate(slots=4), settings=settings)
    assert [len(placed(mesh.submit(arrival(key, tenant="acme"), 0.0))) for key in (1, 2, 3)] == [1, 1, 0]
    word = plain(mesh.submit(arrival(4, tenant="acme"), 0.0))
    assert word == [Waits(key=4, position=2, kind=WaitKind.TENANT, reason="tenant acme has 2 of 2 requests running")]
    assert placed(mesh.submit(arrival(5, tenant="other"), 0.0)) == {5: "a"}
    assert placed(mesh.finish(1, 1.0)) == {3: "a"}


def test_tenant_that_fails_over_at_its_cap_does_not_block_itself() -> None:
    settings = Settings(tenants={"acme": TenantSettings(max_in_flight=1)})
    members = [candidate(name, pool="p", model=f"m-{name}") for name in "ab"]
    mesh = scheduler(*members, settings=settings)
    mesh.submit(arrival(1, "p", tenant="acme"), 0.0)
    assert placed(mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.1)).keys() == {1}


def test_requests_of_a_pool_at_its_cap_wait_with_that_status() -> None:
    mesh = scheduler(candidate(slots=4), settings=Settings(pools={"m": PoolSettings(max_in_flight=1)}))
    mesh.submit(arrival(1), 0.0)
    word = plain(mesh.submit(arrival(2), 0.0))
    assert word == [Waits(key=2, position=1, kind=WaitKind.POOL, reason="pool m has 1 of 1 requests running")]
    assert placed(mesh.finish(1, 1.0)) == {2: "a"}


def test_models_sharing_a_runner_are_ordered_by_tenant_account() -> None:
    mesh = scheduler(*(candidate("a", model, slots=4, runner_max_requests=1) for model in "mn"))
    for key in (1, 2, 3, 4):
        mesh.submit(arrival(key, "m", tenant="loud"), 0.0)
    mesh.submit(arrival(5, "n", tenant="quiet", arrived_at=9.0), 9.0)
    assert placed(mesh.finish(1, 10.0, TOOK)) == {2: "a"}
    assert placed(mesh.finish(2, 11.0, TOOK)) == {5: "a"}
    assert placed(mesh.finish(5, 12.0, TOOK)) == {3: "a"}


def test_reported_positions_match_the_service_order() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=100)
    fill(mesh, "first", range(1, 2))
    words = []
    for key in range(2, 26):
        tenant = "xyz"[key % 3]
        words += mesh.submit(arrival(key, tenant=tenant, arrived_at=float(key), prompt_tokens=100), float(key))
    words += mesh.tick(29.0)
    told = {word.key: word.position for word in words if isinstance(word, Waits)}
    order = serve_in_turn(mesh, 1, 24)
    assert len(order) == 24
    for key, position in told.items():
        assert order.index(key) + 1 == position, (key, position, order)
    assert len(told) == 24


def test_no_request_is_lost_when_a_queue_is_renamed() -> None:
    """A model joins a pool while requests wait for it by its own name: they move to the pool's queue."""
    mesh = scheduler(candidate("a", "m"))
    mesh.submit(arrival(1, "m"), 0.0)
    mesh.submit(arrival(2, "m"), 0.0)
    moved = [candidate("a", "m", pool="p"), candidate("b", "n", pool="p")]
    decisions = mesh.show(moved, 1.0)
    assert (placed(decisions), rejected(decisions)) == ({2: "b"}, {})


EVERY = 8

PATIENCE = 5.0


class Rush:
    """One slot; each served request ends after a tenth of a second, and others arrive for it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.key = 0
        self.now = 0.0
        self.what: dict[int, str] = {}
        self.running: list[int] = []
        self.served: list[str] = []

    def asks(self, what: str, target: str, priority: Priority, count: int = 1, tenant: str = "t") -> None:
        for _ in range(count):
            self.key += 1
            self.what[self.key] = what
            asked = arrival(self.key, target, tenant=tenant, priority=priority, arrived_at=self.now)
            self._hear(self.mesh.submit(asked, self.now))

    def goes_on(self) -> None:
        self.now += 0.1
        for key in self.running[:]:
            self.running.remove(key)
            self._hear(self.mesh.finish(key, self.now))

    def _hear(self, decisions: list[Decision]) -> None:
        for key in placed(decisions):
            self.running.append(key)
            self.served.append(self.what[key])


def roomy(settings: Settings | None = None, *others: Candidate) -> Mesh:
    limits = {"queue_depth_per_runner": 10_000, "queue_timeout_seconds": 1e6, "lower_class_every": EVERY}
    return scheduler(candidate("a", "m"), *others, settings=settings, **limits)


def longest_gap(served: list[str], what: str) -> int:
    """Grants in a row that went past it."""
    places = [-1, *(index for index, each in enumerate(served) if each == what), len(served)]
    return max(after - before for before, after in pairwise(places)) - 1


def test_low_priority_does_not_wait_behind_an_earlier_backlog_of_normal() -> None:
    """The one grant in eight used to go to the oldest request over all lower priority classes."""
    rush = Rush(roomy())
    rush.asks("high", "m", Priority.HIGH, 3)
    rush.asks("normal", "m", Priority.NORMAL, 2_000)
    rush.asks("low", "m", Priority.LOW, 2_000)
    for _ in range(500):
        rush.asks("high", "m", Priority.HIGH)
        rush.goes_on()
    after_patience = rush.served[int(PATIENCE / 0.1) + EVERY :]
    assert longest_gap(after_patience, "low") <= EVERY + 1
    assert longest_gap(after_patience, "normal") <= EVERY + 1
    assert Counter(after_patience)["high"] >= len(after_patience) * (EVERY - 2) // EVERY - EVERY


def test_low_priority_keeps_its_share_while_a_higher_class_waits_for_a_tenant_cap() -> None:
    """Normal counted as a lower priority class, and its grant reset the count of low."""
    settings = Settings(tenants={"capped": TenantSettings(max_in_flight=1)})
    rush = Rush(roomy(settings, candidate("b", "n")))
    rush.asks("capped", "n", Priority.HIGH, tenant="capped")
    rush.running.clear()
    rush.asks("capped", "m", Priority.HIGH, tenant="capped")
    rush.asks("normal", "m", Priority.NORMAL, 300)
    rush.asks("low", "m", Priority.LOW, 300)
    for _ in range(400):
        rush.goes_on()
    assert longest_gap(rush.served[int(PATIENCE / 0.1) + EVERY : 300], "low") <= EVERY


def test_high_class_route_does_not_starve_the_queue_of_a_pool_it_uses() -> None:
    """Passed over was counted per queue: a queue without any grant was never counted as passed over."""
    rush = Rush(roomy())
    rush.mesh.apply(MeshChange(routes={"r": Route(name="r", candidates=("m",))}), 0.0)
    rush.asks("route", "route/r", Priority.HIGH, 3)
    rush.asks("pool", "m", Priority.NORMAL, 300)
    for _ in range(400):
        rush.asks("route", "route/r", Priority.HIGH)
        rush.goes_on()
    after_patience = rush.served[int(PATIENCE / 0.1) + EVERY :]
    assert longest_gap(after_patience, "pool") <= EVERY
    assert Counter(after_patience)["route"] >= len(after_patience) * (EVERY - 1) // EVERY - EVERY


def test_many_queues_of_a_lower_class_share_the_quota_of_one_queue() -> None:
    rush = Rush(roomy())
    rush.mesh.apply(MeshChange(routes={f"r{n}": Route(name=f"r{n}", candidates=("m",)) for n in range(10)}), 0.0)
    rush.asks("high", "m", Priority.HIGH, 3)
    for number in range(10):
        rush.asks("low", f"route/r{number}", Priority.LOW, 100)
    for _ in range(500):
        rush.asks("high", "m", Priority.HIGH)
        rush.goes_on()
    counts = Counter(rush.served[100:])
    assert 0 < counts["low"] <= sum(counts.values()) // EVERY + 10

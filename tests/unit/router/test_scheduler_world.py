"""Bands, tenants, caps, routes, swaps on one GPU, failures and permits, in whatever order: what must never happen does
not, and once the mesh works nobody is forgotten.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import EVERYTHING, REMOTE, RUNNERS, TARGETS, TENANTS, World

from router_svc.policy.decisions import Decision, Placed
from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.pool import Endpoint, Pool
from router_svc.policy.queue.queues import TenantCaps
from router_svc.policy.request import Request
from router_svc.policy.request_table import RequestTable
from router_svc.policy.scheduler import Scheduler
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

FAILURES = (
    Reason.SERVER_DIED,
    Reason.NO_SLOT_AVAILABLE,
    Reason.CANCELLED,
    Reason.BACKEND_NOT_READY,
    Reason.TOOL_UNAVAILABLE,
)

WAKE_ENDS = (None, None, Reason.WAKE_FAILED, Reason.INSUFFICIENT_MEMORY)

SUBMIT = st.tuples(
    st.just("submit"),
    st.tuples(
        st.sampled_from(TARGETS),
        st.sampled_from(Priority),
        st.sampled_from(TENANTS),
        st.booleans(),
        st.sampled_from((None, None, 1.0, 40.0)),
    ),
)

STEPS = st.lists(
    st.one_of(
        SUBMIT,
        SUBMIT,
        SUBMIT,
        st.tuples(st.just("finish"), st.integers(0, 40)),
        st.tuples(st.just("fail"), st.tuples(st.integers(0, 5), st.sampled_from(FAILURES))),
        st.tuples(st.just("fleet"), st.tuples(st.sampled_from(EVERYTHING), st.sampled_from(Readiness))),
        st.tuples(st.just("restart"), st.sampled_from((*RUNNERS, "g"))),
        st.tuples(st.just("wake"), st.tuples(st.integers(0, 5), st.sampled_from(WAKE_ENDS))),
        st.tuples(st.just("guard"), st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from((0.25, 1.0, 6.0, 21.0))),
    ),
    max_size=60,
)


def step(world: World, kind: str, argument: object) -> None:
    match kind, argument:
        case "submit", (str(target), Priority() as priority, str(tenant), bool(remote), None | float() as seconds):
            world.submit(target, priority, tenant, allow_remote=remote, seconds=seconds)
        case "finish", int(key) if key in world.running.keys() | world.waiting:
            world.finish(key)
        case "fail", (int(index), Reason() as reason) if world.running:
            world.fail(sorted(world.running)[index % len(world.running)], reason)
        case "fleet", (str(model), Readiness() as readiness):
            world.readiness[model] = readiness
            world.show()
        case "restart", str(runner):
            world.restart(runner)
        case "wake", (int(index), None | Reason() as reason) if world.waking:
            world.end_wake(sorted(world.waking)[index % len(world.waking)], reason)
        case "guard", bool(on):
            world.set_guard(cloud_fallback=on)
        case "wait", float(seconds):
            world.wait(seconds)


@given(STEPS)
def test_no_history_exceeds_a_cap_slot_count_or_permit(steps: list[tuple[str, object]]) -> None:
    world = World(queue_timeout_seconds=30.0)
    for kind, argument in steps:
        step(world, kind, argument)
    world.become(Readiness.DOWN)
    assert not world.waiting, "somebody waits for runners that are all down"


@given(STEPS)
def test_no_request_wakes_models_endlessly(steps: list[tuple[str, object]]) -> None:
    world = World(queue_timeout_seconds=1e6)
    for kind, argument in steps:
        step(world, kind, argument)
    for _ in range(2 * len(EVERYTHING)):
        for key in sorted(world.running):
            world.finish(key)
        world.become(Readiness.ASLEEP)
    assert not world.waiting, "a request wakes models for ever"


@given(STEPS)
def test_waiting_requests_are_served_or_refused_with_a_reason_once_the_mesh_recovers(
    steps: list[tuple[str, object]],
) -> None:
    world = World(queue_timeout_seconds=1e6)
    for kind, argument in steps:
        step(world, kind, argument)
    world.recover()
    world.serve_all(seconds=400.0)
    assert not world.waiting, "somebody waits for ever in a mesh that works"
    assert world.over == world.submitted.keys(), "a request was never over"


SEEDS = (8, *range(30))

"""The eighth first, as it finds what few others do."""

Plant = Callable[[pytest.MonkeyPatch], None]


def ignore_tenant_caps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantCaps, "may_run", lambda _caps, _tenant: True)


def ignore_pool_caps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "is_at_its_cap", property(lambda _pool: False))
    patch.setattr(Pool, "has_free", property(lambda pool: any(group.open for group in pool._groups.values())))


def ignore_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Endpoint, "is_full", property(lambda _seat: False))


def ignore_the_runners_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Endpoint, "runner_is_full", property(lambda _seat: False))


def ignore_permits(patch: pytest.MonkeyPatch) -> None:
    """Every request gets the permit that only some have."""
    submit = Scheduler.submit

    def permitted(mesh: Scheduler, arrival: Request, now: float) -> list[Decision]:
        return submit(mesh, replace(arrival, needs=replace(arrival.needs, allow_remote=True)), now)

    patch.setattr(Scheduler, "submit", permitted)


def ignore_the_guard(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.apply

    def unguarded(mesh: Scheduler, change: MeshChange, now: float) -> list[Decision]:
        return apply(mesh, replace(change, cloud_fallback=None if change.cloud_fallback is None else True), now)

    patch.setattr(Scheduler, "apply", unguarded)


def place_twice(patch: pytest.MonkeyPatch) -> None:
    submit = Scheduler.submit

    def doubled(mesh: Scheduler, arrival: Request, now: float) -> list[Decision]:
        decisions = submit(mesh, arrival, now)
        return decisions + [decision for decision in decisions if isinstance(decision, Placed)]

    patch.setattr(Scheduler, "submit", doubled)


def leak_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CandidateIndex, "release", lambda _index, _candidate: None)


def forget_who_timed_out(patch: pytest.MonkeyPatch) -> None:
    expire = RequestTable.expire

    def silently(room: RequestTable, now: float) -> list[Decision]:
        expire(room, now)
        return []

    patch.setattr(RequestTable, "expire", silently)


def run(seed: int) -> None:
    """A busy half minute with requests of every kind for every target."""
    chance = random.Random(seed)
    world = World(queue_timeout_seconds=5.0)
    for _ in range(120):
        target, priority, tenant = chance.choice(TARGETS), chance.choice(tuple(Priority)), chance.choice(TENANTS)
        world.submit(target, priority, tenant, allow_remote=chance.random() < 0.5)
        if chance.random() < 0.2:
            world.set_guard(cloud_fallback=chance.random() < 0.5)
        if chance.random() < 0.1:
            world.readiness["g1"] = world.readiness["m-a"] = chance.choice((Readiness.DOWN, Readiness.READY))
            world.show()
        if chance.random() < 0.3:
            world.wait(0.5)
        for model in sorted(world.waking):
            world.end_wake(model)
        if world.running and chance.random() < 0.5:
            world.finish(chance.choice(sorted(world.running)))


def run_all(seeds: Iterable[int] = SEEDS) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize(
    "seeds", [(3, 8), pytest.param(SEEDS, marks=pytest.mark.nightly("statistics of the simulator"))], ids=len
)
def test_no_violation_is_found_without_a_planted_fault(seeds: tuple[int, ...]) -> None:
    run_all(seeds)


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        (ignore_tenant_caps, "a tenant has more running than it may"),
        (ignore_pool_caps, "a pool has more running than it may"),
        (ignore_slots, "a slot was used twice"),
        (ignore_the_runners_limit, "a runner works on too many requests"),
        (ignore_permits, "left the premises without a permit"),
        (ignore_the_guard, "fell back off the premises though the mesh does not"),
        (place_twice, "a decision about a request that does not wait"),
        (leak_slots, "the scheduler counts other slots than the callers hold"),
        (forget_who_timed_out, "a request was lost or counted twice"),
    ],
)
def test_each_planted_fault_is_detected(plant: Plant, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=finding):
        run_all()


def test_test_world_contains_a_reachable_remote_model() -> None:
    world = World()
    world.submit(REMOTE, Priority.NORMAL, "light", allow_remote=True)
    assert [placed.candidate.model for placed in world.running.values()] == [REMOTE]

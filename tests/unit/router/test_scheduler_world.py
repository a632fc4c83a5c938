"""Bands, tenants, caps, routes, swaps on one GPU, failures and permits, in whatever order: what must never happen does
not, and once the mesh works nobody is forgotten.
"""

from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import EVERYTHING, RUNNERS, TARGETS, TENANTS, World

from router_svc.policy.endpoints.candidates import Readiness
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

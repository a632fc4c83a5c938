"""Routes: declared, checked, told, kept, and in the way of what they name."""

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import (
    ROUTE,
    ROUTE_ACTIVE,
    ROUTE_INACTIVE,
    RunningRegistry,
    SomeRunner,
    a_route,
    an_agent,
    by_mesh,
    declare,
    in_phase,
    manifest,
)

from weft.api.registry.v1 import (
    route_pb2,
    runner_pb2,
)
from weft.kernel.errors.reasons import Reason

HIBERNATING = runner_pb2.InstanceState.PHASE_HIBERNATING
READY = runner_pb2.InstanceState.PHASE_READY


async def test_route_keep_alive_distinguishes_forever_from_zero(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    route = route_pb2.RouteManifest(name="q1", candidates=["m1"])
    route.keep_alive.FromSeconds(-30)
    await mesh.apply(declared(route=route))
    assert (await mesh.route("q1")).manifest.keep_alive.ToSeconds() == -1
    route.keep_alive.FromSeconds(0)
    await mesh.apply(declared(route=route))
    assert (await mesh.route("q1")).manifest.HasField("keep_alive")
    assert (await mesh.route("q1")).manifest.keep_alive.ToNanoseconds() == 0


async def test_route_changes_are_published_in_order_and_recorded(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    watch = await mesh.watch()
    assert await mesh.apply(a_route("q1"), dry_run=True) == ["route q1 created"]
    assert await mesh.apply(a_route("q1")) == ["route q1 created"]
    assert await mesh.apply(a_route("q1")) == ["route q1 unchanged"]
    changed = declared(route=route_pb2.RouteManifest(name="q1", candidates=["m1"], pin_primary=True))
    assert await mesh.apply(changed) == ["route q1 configured"]
    await runner.close()
    await mesh.delete(ROUTE, "q1")
    assert await watch.read_changes(6) == [
        "route q1 active",
        "route q1 active",
        "runner r1 inactive",
        "model m1 inactive",
        "route q1 inactive",
        "route q1 gone",
    ]
    assert await mesh.events(ROUTE) == ["route q1 created", "route q1 configured", "route q1 deleted"]
    with refused(Reason.NOT_FOUND):
        await mesh.route("q1")
    with refused(Reason.NOT_FOUND):
        await mesh.delete(ROUTE, "q1")


async def test_route_follows_sleep_and_wake_of_its_model(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(in_phase(READY))
    await mesh.apply(a_route("q1"))
    watch = await mesh.watch()
    await runner.beat(in_phase(HIBERNATING))
    assert await watch.read_changes(3) == ["runner r1 active", "model m1 hibernating", "route q1 hibernating"]
    await runner.beat(in_phase(READY))
    assert await watch.read_changes(3) == ["runner r1 active", "model m1 active", "route q1 active"]


async def test_route_of_a_pool_changes_when_the_last_member_leaves(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", pool="big"),)).open()
    await mesh.apply(a_route("q1", "big"))
    watch = await mesh.watch()
    await mesh.apply(declare(manifest("m1", pool="small")), adopt=True)
    assert await watch.read_changes(2) == ["model m1 active", "route q1 inactive"]
    await mesh.apply(declare(manifest("m2", pool="big", wake=by_mesh())))
    assert await watch.read_changes(2) == ["model m2 hibernating", "route q1 hibernating"]


async def test_unknown_candidate_is_rejected_by_name(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, agents=(an_agent("a1"),)).open()
    await mesh.apply(a_route("q0"))
    for candidate in (
        "nothing",
        "a1",
        "q0",
        "r1",
    ):
        with refused(Reason.MODEL_NOT_FOUND) as errors:
            await mesh.apply(declare("m2"), a_route("q1", "m1", candidate))
        assert errors[0].metadata == {"route": "q1", "candidate": candidate, "declaration": "1"}
        assert f"there is no model or pool {candidate}; " in errors[0].message
        with refused(Reason.MODEL_NOT_FOUND):
            await mesh.model("m2")


@pytest.mark.slow("steps hours of a registry's life")
async def test_route_outlives_its_candidates_and_becomes_active_when_they_return(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await mesh.apply(a_route("q1"))
    await runner.close()
    await mesh.advance(4 * 3600.0 + 10)
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.model("m1")
    assert (await mesh.route("q1")).status == ROUTE_INACTIVE
    await SomeRunner(mesh, incarnation="life-2").open()
    assert (await mesh.route("q1")).status == ROUTE_ACTIVE

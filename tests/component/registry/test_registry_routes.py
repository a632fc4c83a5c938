"""Routes: declared, checked, told, kept, and in the way of what they name."""

from pathlib import Path

import pytest
from kit.refusals import refused
from kit.resources import declared, records
from registry_harness import (
    AGENT,
    MODEL,
    ROUTE,
    ROUTE_ACTIVE,
    ROUTE_INACTIVE,
    RUNNER,
    RunningRegistry,
    SomeRunner,
    a_route,
    an_agent,
    by_mesh,
    declare,
    in_phase,
    manifest,
    running_registry,
)

from weft.api.registry.v1 import (
    route_pb2,
    runner_pb2,
)
from weft.kernel.reasons import Reason

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


@pytest.mark.parametrize("candidate", ["nothing", "a1", "q0", "r1"])
async def test_unknown_candidate_is_rejected_by_name(candidate: str, mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, agents=(an_agent("a1"),)).open()
    await mesh.apply(a_route("q0"))
    with refused(Reason.MODEL_NOT_FOUND) as errors:
        await mesh.apply(declare("m2"), a_route("q1", "m1", candidate))
    assert errors[0].metadata == {"route": "q1", "candidate": candidate, "declaration": "1"}
    assert f"there is no model or pool {candidate}; " in errors[0].message
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.model("m2")


async def test_resources_referenced_by_a_route_cannot_be_deleted(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", pool="big"),)).open()
    await mesh.apply(declare(manifest("m2", pool="big")), a_route("over-pool", "big"), a_route("over-model", "m2"))
    with refused(Reason.RESOURCE_IN_USE) as errors:
        await mesh.delete(MODEL, "m2")
    assert errors[0].metadata["routes"] == "over-model"
    await mesh.delete(ROUTE, "over-model")
    await mesh.delete(MODEL, "m2")
    # Now m1 is the last member of the pool that the other route names.
    for kind, name in ((MODEL, "m1"), (RUNNER, "r1")):
        with refused(Reason.RESOURCE_IN_USE) as errors:
            await mesh.delete(kind, name)
        assert errors[0].metadata["routes"] == "over-pool"
    await mesh.apply(declared(agent=an_agent("a1", "m1")))
    with refused(Reason.RESOURCE_IN_USE) as errors:
        await mesh.delete(MODEL, "m1")
    assert errors[0].message == (
        "the model 'm1' is in use by agents: a1; by routes: over-pool; delete them or point them elsewhere"
    )
    await mesh.delete(ROUTE, "over-pool")
    await mesh.delete(AGENT, "a1")
    await mesh.delete(MODEL, "m1")


async def test_routes_share_the_namespace(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", pool="big"),), agents=(an_agent("a1"),)).open()
    await mesh.apply(a_route("q1"))
    for name in ("m1", "r1", "a1", "big"):
        with refused(Reason.ALREADY_EXISTS) as errors:
            await mesh.apply(a_route(name, "m1"))
        assert repr(name) in errors[0].message
    for wanted in (declare("q1"), declare(manifest("m2", pool="q1")), declared(agent=an_agent("q1"))):
        with refused(Reason.ALREADY_EXISTS) as errors:
            await mesh.apply(wanted)
        assert errors[0].metadata["owner_kind"] == "route"
    for clash in (
        SomeRunner(mesh, "q1", models=()),
        SomeRunner(mesh, "r2", models=("q1",)),
        SomeRunner(mesh, "r2", models=(manifest("m2", pool="q1"),)),
        SomeRunner(mesh, "r2", models=(), agents=(an_agent("q1"),)),
    ):
        with refused(Reason.ALREADY_EXISTS):
            await clash.open()
    with refused(Reason.INVALID_ARGUMENT):
        await mesh.apply(a_route("q2"), declare("q2"))
    with refused(Reason.INVALID_ARGUMENT):
        await mesh.apply(a_route("q2", "m1"), declare(manifest("m2", pool="q2")))
    assert records((await mesh.watch()).snapshot.snapshot.resources, "route")[0].manifest.name == "q1"


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


def _route(**fields: object) -> route_pb2.RouteManifest:
    return route_pb2.RouteManifest(**{"name": "q1", "candidates": ["m1"], **fields})  # type: ignore[arg-type]


def _with_budget(seconds: float) -> route_pb2.RouteManifest:
    route = _route()
    route.budget.FromNanoseconds(int(seconds * 1e9))
    return route


def _with_keep_alive(seconds: int) -> route_pb2.RouteManifest:
    route = _route()
    route.keep_alive.FromSeconds(seconds)
    return route


@pytest.mark.parametrize(
    ("route", "field"),
    [
        (_route(name=""), "name"),
        (_route(name="a/b"), "name"),
        (_route(candidates=[]), "candidates"),
        (_route(candidates=[f"m{number}" for number in range(17)]), "candidates"),
        (_route(candidates=["m1", "not a name"]), "candidates[1]"),
        (_route(candidates=["m1", "m2", "m1"]), "candidates[2]"),
        (_route(description="x" * 1025), "description"),
        (_route(description="\x1b[31m"), "description"),
        (_with_budget(0), "budget"),
        (_with_budget(-1), "budget"),
        (_with_budget(86_400.001), "budget"),
        (_with_keep_alive(366 * 86_400 + 1), "keep_alive"),
    ],
)
async def test_route_over_a_limit_is_rejected_by_field(
    route: route_pb2.RouteManifest, field: str, mesh: RunningRegistry
) -> None:
    await mesh.apply(*(declare(f"m{number}") for number in range(17)))
    with refused(field=f"declarations[0].route.{field}"):
        await mesh.apply(declared(route=route))


@pytest.mark.parametrize("seconds", [1e-9, 0.5, 86_400.0])
async def test_budget_range_is_inclusive(seconds: float, mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m1"), declared(route=_with_budget(seconds)))
    assert (await mesh.route("q1")).manifest.budget.ToNanoseconds() == round(seconds * 1e9)


async def test_total_route_size_is_limited_so_snapshots_can_be_sent(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_manifest_bytes=4_000) as mesh:
        long = [
            declared(route=route_pb2.RouteManifest(name=f"q{number}", candidates=["m1"], description="x" * 1_000))
            for number in range(4)
        ]
        await mesh.apply(declare("m1"), *long[:3])
        with refused(Reason.TOO_MANY_RESOURCES):
            await mesh.apply(long[3])
        await mesh.delete(ROUTE, "q0")
        await mesh.apply(long[3])

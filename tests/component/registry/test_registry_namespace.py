"""One namespace: whoever has a name keeps it against every kind."""

from kit.refusals import refused
from kit.resources import declared
from registry_harness import MODEL_ACTIVE, POOL, RunningRegistry, SomeRunner, a_route, an_agent, declare, manifest
from test_registry_aliases import a_workflow

from weft.kernel.reasons import Reason


async def test_name_of_a_live_session_is_rejected_for_every_kind_without_partial_writes(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1", manifest("m2", pool="p1")), agents=(an_agent("a1"),)).open()
    watch = await mesh.watch()
    for second, owner_kind, name in (
        ({"name": "x", "models": ("m1",)}, "model", "m1"),
        ({"name": "m1", "models": ()}, "model", "m1"),
        ({"name": "x", "models": ("r1",)}, "runner", "r1"),
        ({"name": "x", "models": ("a1",)}, "agent", "a1"),
        ({"name": "p1", "models": ()}, "pool", "p1"),
        ({"name": "x", "models": (manifest("m9", pool="r1"),)}, "runner", "r1"),
        ({"name": "x", "models": (manifest("m9", pool="a1"),)}, "agent", "a1"),
        ({"name": "x", "models": ("m9",), "agents": (an_agent("a1", "m9"),)}, "agent", "a1"),
        ({"name": "x", "models": ("m9",), "agents": (an_agent("m2", "m9"),)}, "model", "m2"),
        ({"name": "x", "models": ("m9",), "agents": (an_agent("p1", "m9"),)}, "pool", "p1"),
        ({"name": "x", "models": ("m9",), "agents": (an_agent("r1", "m9"),)}, "runner", "r1"),
    ):
        with refused(Reason.ALREADY_EXISTS) as errors:
            await SomeRunner(mesh, **second).open()
        assert errors[0].metadata == {"owner_kind": owner_kind, owner_kind: name}
        assert (await mesh.watch()).snapshot == watch.snapshot


async def test_dead_session_holding_the_name_in_another_kind_is_deleted_with_all_its_rows(
    mesh: RunningRegistry,
) -> None:
    lost = await SomeRunner(mesh, models=("m1", "m2")).open()
    await mesh.advance(90.0)
    watch = await mesh.watch()
    await SomeRunner(mesh, name="m1", models=("m3",)).open()
    assert await watch.read_changes(5) == [
        "model m1 gone",
        "model m2 gone",
        "runner r1 gone",
        "runner m1 active",
        "model m3 active",
    ]
    with refused(Reason.SESSION_UNKNOWN):
        await lost.beat()


async def test_declared_resource_keeps_its_name_without_a_runner(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m1"), declared(agent=an_agent("a1")), a_route("q1"))
    for thief in (
        SomeRunner(mesh, name="m1", models=()),
        SomeRunner(mesh, name="a1", models=()),
        SomeRunner(mesh, name="q1", models=()),
        SomeRunner(mesh, models=("a1",)),
        SomeRunner(mesh, models=(manifest("m2", pool="q1"),)),
        SomeRunner(mesh, models=("m2",), agents=(an_agent("m1", "m2"),)),
    ):
        with refused(Reason.ALREADY_EXISTS):
            await thief.open()


async def test_declarations_share_the_namespace_of_published_and_declared_resources(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", pool="p1"),), agents=(an_agent("a1"),)).open()
    await mesh.apply(a_route("q1"), a_workflow("w1"))
    for declaration, owner_kind in (
        (declare("a1"), "agent"),
        (declare("r1"), "runner"),
        (declare("q1"), "route"),
        (declare("w1"), "workflow"),
        (declare(manifest("m9", pool="a1")), "agent"),
        (declare(manifest("m9", pool="r1")), "runner"),
        (declare(manifest("m9", pool="q1")), "route"),
        (declared(agent=an_agent("m1")), "model"),
        (declared(agent=an_agent("r1")), "runner"),
        (declared(agent=an_agent("p1")), "pool"),
        (a_route("a1"), "agent"),
        (a_route("p1"), "pool"),
        (a_route("w1"), "workflow"),
        (a_workflow("m1"), "model"),
        (a_workflow("q1"), "route"),
    ):
        with refused(Reason.ALREADY_EXISTS) as errors:
            await mesh.apply(declaration)
        assert errors[0].metadata["owner_kind"] == owner_kind


async def test_names_published_together_must_not_conflict(mesh: RunningRegistry) -> None:
    for runner, field in (
        (SomeRunner(mesh, name="m1"), "models[0].name"),
        (SomeRunner(mesh, models=(manifest("m1", pool="r1"),)), "models[0].pool_name"),
        (SomeRunner(mesh, agents=(an_agent("m1"),)), "agents[0].name"),
        (SomeRunner(mesh, agents=(an_agent("a1"), an_agent("r1"))), "agents[1].name"),
        (SomeRunner(mesh, agents=(an_agent("a1"), an_agent("a1"))), "agents[1].name"),
        (SomeRunner(mesh, models=(manifest("m1", pool="a1"),), agents=(an_agent("a1"),)), "agents[0].name"),
    ):
        with refused(field=field):
            await runner.open()


async def test_declaration_pinned_to_another_runner_rejects_this_one(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m1", runner="r2"))
    with refused(Reason.ALREADY_EXISTS) as errors:
        await SomeRunner(mesh).open()
    assert "'r2'" in errors[0].message
    await SomeRunner(mesh, name="r2").open()
    assert (await mesh.model("m1")).runner == "r2"


async def test_model_pinned_elsewhere_moves_to_its_runner_while_the_old_one_lives(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    await mesh.apply(declare("m1", runner="r2"), adopt=True)
    model = await mesh.model("m1")
    assert (model.runner, model.status, model.declared_runner) == ("", 2, "r2")
    await SomeRunner(mesh, name="r2").open()
    model = await mesh.model("m1")
    assert (model.runner, model.status) == ("r2", MODEL_ACTIVE)


async def test_pool_cannot_be_deleted(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    with refused(Reason.INVALID_ARGUMENT) as errors:
        await mesh.delete(POOL, "m1")
    assert "a pool is defined by its models" in errors[0].message

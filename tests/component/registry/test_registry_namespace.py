"""One namespace: whoever has a name keeps it against every kind."""

from typing import Any

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import (
    MODEL_ACTIVE,
    POOL,
    RunningRegistry,
    SomeRunner,
    a_route,
    an_agent,
    an_alias,
    declare,
    manifest,
)
from test_registry_aliases import a_workflow

from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.kernel.errors.reasons import Reason


async def test_runner_with_a_name_of_a_live_session_is_rejected_without_partial_writes(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1", manifest("m2", pool="p1")), agents=(an_agent("a1"),)).open()
    watch = await mesh.watch()
    for name, owner_kind in (("m1", "model"), ("p1", "pool"), ("a1", "agent")):
        with refused(Reason.ALREADY_EXISTS) as errors:
            await SomeRunner(mesh, name=name, models=("m9",)).open()
        assert errors[0].metadata == {"owner_kind": owner_kind, owner_kind: name}
        assert (await mesh.watch()).snapshot == watch.snapshot


async def test_item_with_a_name_of_a_live_session_is_left_out_and_the_others_are_published(
    mesh: RunningRegistry,
) -> None:
    await SomeRunner(mesh, models=("m1", manifest("m2", pool="p1")), agents=(an_agent("a1"),)).open()
    cases: tuple[tuple[Any, ...], ...] = (
        (("m1",), (), "model", "m1"),
        (("r1",), (), "model", "r1"),
        (("a1",), (), "model", "a1"),
        ((manifest("m8", pool="r1"),), (), "model", "m8"),
        ((manifest("m8", pool="a1"),), (), "model", "m8"),
        ((), (an_agent("a1", "m9"),), "agent", "a1"),
        ((), (an_agent("m2", "m9"),), "agent", "m2"),
        ((), (an_agent("p1", "m9"),), "agent", "p1"),
        ((), (an_agent("r1", "m9"),), "agent", "r1"),
    )
    for number, (models, agents, kind, name) in enumerate(cases):
        second = SomeRunner(mesh, name="x", models=(*models, "m9"), agents=agents, incarnation=f"life-{number}")
        await second.open()
        assert [item.partition(":")[0] for item in second.left_out] == [f"{kind} {name}"]
        assert "is taken" in second.left_out[0]
        assert (await mesh.model("m9")).runner == "x"
        assert (await mesh.model("m1")).runner == "r1"
        await second.close()


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
    ):
        with refused(Reason.ALREADY_EXISTS):
            await thief.open()
    for thief in (
        SomeRunner(mesh, models=("a1",)),
        SomeRunner(mesh, models=(manifest("m2", pool="q1"),)),
        SomeRunner(mesh, models=("m2",), agents=(an_agent("m1", "m2"),)),
    ):
        assert len((await thief.open()).left_out) == 1
        await thief.close()


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


async def test_later_one_of_conflicting_names_published_together_is_left_out(mesh: RunningRegistry) -> None:
    cases = (
        (SomeRunner(mesh, name="m1"), "model m1: model.name: must not be the name of the runner"),
        (SomeRunner(mesh, models=(manifest("m1", pool="r1"),)), "model m1: model.pool_name"),
        (SomeRunner(mesh, agents=(an_agent("m1"),)), "agent m1: agent.name: must not be"),
        (SomeRunner(mesh, agents=(an_agent("a1"), an_agent("r1"))), "agent r1: agent.name: must not be"),
        (SomeRunner(mesh, agents=(an_agent("a1"), an_agent("a1"))), "agent a1: its name appears twice"),
        (SomeRunner(mesh, models=("m1", "m1")), "model m1: its name appears twice"),
        (SomeRunner(mesh, models=(manifest("m1", pool="a1"),), agents=(an_agent("a1"),)), "agent a1: agent.name"),
    )
    for number, (runner, said) in enumerate(cases):
        runner.incarnation = f"life-{number}"
        [item] = (await runner.open()).left_out
        assert item.startswith(said)
        await runner.close()


async def test_declaration_pinned_to_another_runner_rejects_this_one(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m1", runner="r2"))
    assert "'r2'" in (await SomeRunner(mesh).open()).left_out[0]
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


async def test_listed_model_does_not_take_the_name_of_what_is_declared(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1",)).open()
    await mesh.apply(an_alias("chat"), an_alias("any", pattern="m*"), a_route("way", "m1"), declare("mine"))
    names = ("chat", "chat:latest", "way", "mine", "m2")
    listing = await SomeRunner(mesh, name="box", models=names, listed=names).open()
    assert [item.partition(": ")[0] for item in listing.left_out] == ["model chat", "model chat:latest", "model way"]
    assert "which a server lists, is that of an alias" in listing.left_out[0]
    await listing.beat()
    # The negative control: a runner's own model has precedence over an alias.
    assert (await SomeRunner(mesh, name="own", models=("chat",)).open()).left_out == []


@pytest.mark.parametrize("declared_later", [an_alias("chat"), a_route("chat", "m1")])
async def test_declaration_takes_its_name_from_a_listed_model(
    mesh: RunningRegistry, declared_later: ResourceDocument
) -> None:
    await SomeRunner(mesh, models=("m1",)).open()
    listing = await SomeRunner(mesh, name="box", models=("chat", "m2"), listed=("chat", "m2")).open()
    await listing.beat()
    await mesh.apply(declared_later)
    with refused(Reason.SESSION_UNKNOWN):
        await listing.beat()
    assert [item.partition(": ")[0] for item in (await listing.open()).left_out] == ["model chat"]
    shown = (await mesh.runner("box")).capability.left_out
    assert [(item.kind, item.name) for item in shown] == [("model", "chat")]
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.model("chat")
    await listing.beat()


async def test_alias_of_a_listed_model_leaves_it_its_name(mesh: RunningRegistry) -> None:
    listing = await SomeRunner(mesh, name="box", models=("chat",), listed=("chat",)).open()
    await mesh.apply(an_alias("tagged", "chat", pattern="chat:latest"))
    await listing.beat()
    assert (await listing.open()).left_out == []

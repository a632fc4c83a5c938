"""What operators declare, over what runners publish."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.refusals import refused
from kit.resources import declared, manifest_in
from registry_harness import (
    AGENT,
    AGENT_INACTIVE,
    MODEL,
    MODEL_ACTIVE,
    MODEL_INACTIVE,
    PUBLIC,
    ROUTE,
    RUNNER,
    VIRTUAL,
    RunningRegistry,
    SomeRunner,
    a_route,
    an_agent,
    an_alias,
    by_mesh,
    declare,
    manifest,
    running_registry,
)
from test_registry_aliases import a_workflow

from weft.api.registry.v1 import declaration_service_pb2
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.route_pb2 import RouteManifest
from weft.api.registry.v1.trial_pb2 import TrialManifest
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

FOUR_HOURS = 4 * 3600.0
ApplyRequest = declaration_service_pb2.ApplyRequest
RunnerDeclaration = declaration_service_pb2.RunnerDeclaration
PoolDeclaration = declaration_service_pb2.PoolDeclaration


async def test_declared_model_exists_without_a_runner_and_is_inactive(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    assert await mesh.apply(declare("m1")) == ["model m1 created"]
    model = await mesh.model("m1")
    assert (model.kind, model.status, model.runner) == (PUBLIC, MODEL_INACTIVE, "")
    assert not model.HasField("last_heartbeat_time")
    assert await watch.read_changes(1) == ["model m1 inactive"]
    assert await mesh.apply(declare("m1")) == ["model m1 unchanged"]


async def test_runner_publishing_a_declared_name_serves_it_and_the_declaration_wins(mesh: RunningRegistry) -> None:
    await mesh.apply(declare(manifest("m1", pool="p1", context_tokens=0)))
    await SomeRunner(mesh, models=(manifest("m1", pool="other", context_tokens=512, remote=True),)).open()
    model = await mesh.model("m1")
    assert (model.kind, model.status, model.runner) == (PUBLIC, MODEL_ACTIVE, "r1")
    assert (model.manifest.pool_name, model.manifest.context_tokens, model.manifest.remote) == ("p1", 512, True)
    assert model.HasField("last_heartbeat_time")


async def test_applying_the_current_state_of_any_row_changes_nothing(mesh: RunningRegistry) -> None:
    await mesh.apply(declare(manifest("public", context_tokens=0)), declared(agent=an_agent("judge", "public")))
    await SomeRunner(
        mesh,
        models=(manifest("public", context_tokens=512, remote=True), manifest("virtual", wake=by_mesh())),
        agents=(an_agent("a1", "virtual"),),
    ).open()
    watch = await mesh.watch()
    public, virtual = await mesh.model("public"), await mesh.model("virtual")
    outcomes = await mesh.apply(
        declare(public.manifest, runner=public.declared_runner),
        declare(virtual.manifest, runner=virtual.declared_runner),
        declared(agent=(await mesh.agent("judge")).manifest),
        declared(agent=(await mesh.agent("a1")).manifest),
        declared(runner=RunnerDeclaration(name="r1")),
        declared(pool=PoolDeclaration(name="virtual", members=["virtual"])),
    )
    assert {outcome.rpartition(" ")[2] for outcome in outcomes} == {"unchanged"}
    assert (await mesh.watch()).snapshot == watch.snapshot
    assert (await mesh.model("virtual")).kind == VIRTUAL
    assert await mesh.apply(declare(virtual.manifest, runner="r1")) == ["model virtual unchanged"]


async def test_live_virtual_row_that_differs_is_rejected_unless_adopted(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, agents=(an_agent("a1"),)).open()
    for declaration in (
        declare(manifest("m1", pool="p1")),
        declare("m1", runner="r2"),
        declared(agent=an_agent("a1", prompt="Be long.")),
    ):
        with refused(Reason.ALREADY_EXISTS) as errors:
            await mesh.apply(declaration)
        assert "'r1'" in errors[0].message
        assert "--adopt" in errors[0].message
    created = (await mesh.model("m1")).create_time
    await mesh.advance(10.0)
    assert await mesh.apply(declare(manifest("m1", pool="p1")), adopt=True) == ["model m1 configured"]
    model = await mesh.model("m1")
    assert (model.kind, model.runner, model.manifest.pool_name) == (PUBLIC, "r1", "p1")
    assert model.create_time == created


@pytest.mark.slow("kills or restarts a service")
async def test_adopted_row_survives_the_expiry_of_its_runner_and_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, clock=clock) as mesh:
        await SomeRunner(mesh, models=("m1", "m2"), agents=(an_agent("a1"), an_agent("a2"))).open()
        assert await mesh.apply(declare("m1"), declared(agent=an_agent("a1")), adopt=True) == [
            "model m1 configured",
            "agent a1 configured",
        ]
        await mesh.advance(90.0 + FOUR_HOURS)
        assert (await mesh.model("m1")).status == MODEL_INACTIVE
        assert (await mesh.agent("a1")).status == AGENT_INACTIVE
        assert (await mesh.events(MODEL, "m1"))[-1] == "model m1 withdrawn", "it has not expired"
        with refused(Reason.MODEL_NOT_FOUND):
            await mesh.model("m2")
        with refused(Reason.NOT_FOUND):
            await mesh.agent("a2")
        before = (await mesh.model("m1"), await mesh.agent("a1"))
    async with running_registry(tmp_path, clock=clock) as mesh:
        assert (await mesh.model("m1"), await mesh.agent("a1")) == before
        await SomeRunner(mesh).open()
        assert (await mesh.model("m1")).status == MODEL_ACTIVE


async def test_one_invalid_declaration_applies_nothing(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        await SomeRunner(mesh).open()
        watch, events = await mesh.watch(), await mesh.events()
        for bad, reason in (
            (declare("../etc"), Reason.INVALID_ARGUMENT),
            (declare("fine"), Reason.INVALID_ARGUMENT),
            (declare("r1"), Reason.ALREADY_EXISTS),
            (declare(manifest("m1", pool="p")), Reason.ALREADY_EXISTS),
            (declared(agent=an_agent("a1", "nobody")), Reason.MODEL_NOT_FOUND),
            (declared(agent=an_agent("a1", pool="nobody")), Reason.MODEL_NOT_FOUND),
            (declared(runner=RunnerDeclaration(name="nobody")), Reason.NOT_FOUND),
            (declared(pool=PoolDeclaration(name="nobody")), Reason.NOT_FOUND),
            (declared(pool=PoolDeclaration(name="m1", members=["m1", "m2"])), Reason.INVALID_ARGUMENT),
            (ResourceDocument(), Reason.INVALID_ARGUMENT),
        ):
            for dry_run in (False, True):
                with refused(reason):
                    await mesh.apply(declare("fine"), bad, declare("fine-too"), dry_run=dry_run)
                assert (await mesh.watch()).snapshot == watch.snapshot
                assert await mesh.events() == events
    async with running_registry(tmp_path) as mesh:
        with refused(Reason.MODEL_NOT_FOUND):
            await mesh.model("fine")


async def test_duplicate_names_in_one_call_are_rejected(mesh: RunningRegistry) -> None:
    for first, second in (
        (declare("x"), declare("x")),
        (declare("x"), declared(agent=an_agent("x"))),
        (declare(manifest("m1", pool="x")), declared(agent=an_agent("x"))),
        (declared(agent=an_agent("x")), declared(pool=PoolDeclaration(name="x"))),
        (declared(pool=PoolDeclaration(name="x")), declared(pool=PoolDeclaration(name="x"))),
        (declared(runner=RunnerDeclaration(name="x")), declare("x")),
        (a_route("x"), declare("x")),
        (a_route("x", "m1"), declare(manifest("m1", pool="x"))),
    ):
        with refused(Reason.INVALID_ARGUMENT) as errors:
            await mesh.apply(first, second)
        assert isinstance(errors[0], FieldError)
        assert errors[0].field.startswith("declarations[")


async def test_delete_with_an_unknown_kind_or_hostile_name_is_rejected(mesh: RunningRegistry) -> None:
    for kind, name, field in (
        ("", "m1", "kind"),
        ("models", "m1", "kind"),
        ("model", "../m1", "name"),
        ("model", "", "name"),
    ):
        with refused(field=field):
            await mesh.delete(kind, name)


async def test_rejected_declaration_is_identified_by_its_position(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    with refused(Reason.ALREADY_EXISTS) as errors:
        await mesh.apply(declare("fine"), declare("r1"))
    assert errors[0].metadata["declaration"] == "1"
    with refused(field="declarations[1].model.manifest.name"):
        await mesh.apply(declare("fine"), declare(manifest("m 1")))


async def test_dry_run_returns_the_real_results_and_changes_nothing(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    batch = (declare("m1"), declare("m2"), declared(agent=an_agent("a1", "m2")))
    watch = await mesh.watch()
    dry = await mesh.declarations.Apply(ApplyRequest(declarations=batch, dry_run=True, adopt=True))
    assert (await mesh.watch()).snapshot == watch.snapshot
    real = await mesh.declarations.Apply(ApplyRequest(declarations=batch, adopt=True))
    assert dry == real
    assert (await mesh.watch()).snapshot != watch.snapshot


async def test_results_include_before_and_after(mesh: RunningRegistry) -> None:
    first, second = declare(manifest("m1", wake=by_mesh())), declare(manifest("m1", pool="p1"), runner="r1")
    (created,) = (await mesh.declarations.Apply(ApplyRequest(declarations=[first]))).results
    assert not created.HasField("before")
    (configured,) = (await mesh.declarations.Apply(ApplyRequest(declarations=[second]))).results
    assert manifest_in(configured.before).wake.by_mesh.wake_on_lan.mac_address == "02:00:00:00:00:01"
    assert configured.after == second
    (unchanged,) = (await mesh.declarations.Apply(ApplyRequest(declarations=[second]))).results
    assert unchanged.before == unchanged.after == second


async def test_agents_can_reference_models_and_pools_of_the_same_call_in_any_order(mesh: RunningRegistry) -> None:
    outcomes = await mesh.apply(
        declared(agent=an_agent("a1", "m1")),
        declared(agent=an_agent("a2", pool="p1")),
        declared(pool=PoolDeclaration(name="p1", members=["m2", "m1"])),
        declare(manifest("m1", pool="p1")),
        declare(manifest("m2", pool="p1")),
    )
    assert outcomes[0] == "agent a1 created"
    assert (await mesh.pool("p1")).size == 2


async def test_batch_is_validated_against_its_resulting_state(mesh: RunningRegistry) -> None:
    await mesh.apply(declare(manifest("m1", pool="p1")))
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.apply(declare("m1"), declared(agent=an_agent("a1", pool="p1")))
    assert await mesh.apply(declare("m1"), declared(agent=an_agent("p1", "m1"))) == [
        "model m1 configured",
        "agent p1 created",
    ]


async def test_delete_removes_declared_and_published_rows_and_a_new_session_republishes_its_own(
    mesh: RunningRegistry,
) -> None:
    runner = await SomeRunner(mesh, agents=(an_agent("a1"),)).open()
    await mesh.apply(declare("m1"), adopt=True)
    with refused(Reason.RESOURCE_IN_USE) as errors:
        await mesh.delete(MODEL, "m1")
    assert errors[0].metadata == {"model": "m1", "agents": "a1"}
    watch = await mesh.watch()
    await mesh.delete(AGENT, "a1")
    await mesh.delete(MODEL, "m1")
    assert await watch.read_changes(2) == ["agent a1 gone", "model m1 gone"]
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.delete(MODEL, "m1")
    await runner.beat()
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.model("m1")
    await SomeRunner(mesh, incarnation="life-2", session_id=runner.session_id).open()
    assert (await mesh.model("m1")).kind == VIRTUAL


async def test_deleting_a_runner_ends_its_session_and_rows_but_keeps_declarations(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh, models=("m1", "m2"), agents=(an_agent("a1", "m2"),)).open()
    await mesh.apply(declare("m1"), adopt=True)
    watch = await mesh.watch()
    await mesh.delete(RUNNER, "r1")
    assert await watch.read_changes(4) == ["agent a1 gone", "model m2 gone", "runner r1 gone", "model m1 inactive"]
    with refused(Reason.SESSION_UNKNOWN):
        await runner.beat()
    await runner.open()
    assert (await mesh.model("m1")).status == MODEL_ACTIVE


TRIAL = TrialManifest(name="user", candidate="m2", against="m1", tenant="acme", share_percent=10)


async def test_resource_that_another_names_cannot_be_deleted_before_it(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m3"))
    for kind, name, user_kind, user in (
        (MODEL, "m1", AGENT, declared(agent=an_agent("user", "m1"))),
        (MODEL, "m1", ROUTE, a_route("user")),
        (MODEL, "m1", "workflow", a_workflow("user")),
        (MODEL, "m1", "alias", an_alias("user")),
        (MODEL, "m1", "trial", declared(trial=TRIAL)),
        (MODEL, "m2", "trial", declared(trial=TRIAL)),
        (AGENT, "coder", "alias", an_alias("user", "agent/coder")),
        (ROUTE, "way", "alias", an_alias("user", "route/way")),
        ("workflow", "turbo", "alias", an_alias("user", "workflow/turbo")),
    ):
        await mesh.apply(declare("m1"), declare("m2"))
        await mesh.apply(declared(agent=an_agent("coder", "m3")), a_route("way", "m3"), a_workflow("turbo", "m3"), user)
        with refused(Reason.RESOURCE_IN_USE) as errors:
            await mesh.delete(kind, name)
        users = "aliases" if user_kind == "alias" else f"{user_kind}s"
        assert errors[0].metadata[users] == "user"
        assert f"is in use by {users}: user; delete them or point them elsewhere" in errors[0].message
        await mesh.delete(user_kind, "user")
        await mesh.delete(kind, name)


async def test_last_member_of_a_pool_with_agents_cannot_be_deleted(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", pool="p1"),)).open()
    await SomeRunner(mesh, name="r2", models=(manifest("m2", pool="p1"),)).open()
    await mesh.apply(declared(agent=an_agent("a1", pool="p1")))
    await mesh.delete(MODEL, "m1")
    for kind, name in ((MODEL, "m2"), (RUNNER, "r2")):
        with refused(Reason.RESOURCE_IN_USE) as errors:
            await mesh.delete(kind, name)
        assert errors[0].metadata["agents"] == "a1"
    assert (await mesh.model("m2")).status == MODEL_ACTIVE


async def test_total_manifest_size_is_limited_so_snapshots_can_be_sent(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_manifest_bytes=4_000) as mesh:
        agents = [an_agent(f"a{number}", prompt="\u00e9" * 500) for number in range(3)]
        routes = [
            declared(route=RouteManifest(name=f"q{number}", candidates=["m1"], description="x" * 1_000))
            for number in range(3)
        ]
        fits = [declare("m1"), *(declared(agent=agent) for agent in agents[:2]), routes[0]]
        await mesh.apply(*fits)
        for _ in range(3):
            for more in (declared(agent=agents[2]), routes[1]):
                with refused(Reason.TOO_MANY_RESOURCES) as errors:
                    await mesh.apply(more)
                assert errors[0].metadata["limit"] == "4000"
            runner = await SomeRunner(mesh, models=(), agents=(agents[2],)).open()
            assert "the mesh may have 4000 bytes" in runner.left_out[0]
            assert len(await mesh.apply(*fits)) == 4
        await mesh.delete(AGENT, "a0")
        await mesh.apply(routes[1])
        await mesh.delete(ROUTE, "q0")
        await mesh.apply(routes[2])


async def test_declaration_limits_are_enforced(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_models=2, max_agents=1, max_declarations=3) as mesh:
        with refused(Reason.INVALID_ARGUMENT):
            await mesh.apply(*(declare(f"m{number}") for number in range(4)))
        with refused(Reason.TOO_MANY_RESOURCES) as errors:
            await mesh.apply(*(declare(f"m{number}") for number in range(3)))
        assert errors[0].metadata == {"resource": "models", "limit": "2"}
        await mesh.apply(declare("m1"), declare("m2"))
        assert await mesh.apply(declare("m1")) == ["model m1 unchanged"]
        with refused(Reason.TOO_MANY_RESOURCES):
            await mesh.apply(declared(agent=an_agent("a1")), declared(agent=an_agent("a2")))
        runner = await SomeRunner(mesh, models=("m3",)).open()
        assert runner.left_out == [
            "model m3: the mesh may have 2 models and has 2; delete some that are not needed any more"
        ]
        assert await mesh.listed("agent") == []


@pytest.mark.parametrize(
    ("kind", "plural", "declaring"),
    [("alias", "aliases", an_alias), ("route", "routes", a_route), ("workflow", "workflows", a_workflow)],
)
async def test_number_of_declared_documents_is_limited(
    tmp_path: Path, kind: str, plural: str, declaring: Callable[[str], ResourceDocument]
) -> None:
    limits: Any = {f"max_{plural}": 2}
    async with running_registry(tmp_path, **limits) as mesh:
        await mesh.apply(declare("m1"), declaring("one"), declaring("two"))
        with refused(Reason.TOO_MANY_RESOURCES) as errors:
            await mesh.apply(declaring("three"))
        assert errors[0].metadata == {"resource": plural, "limit": "2"}
        assert await mesh.apply(declaring("two")) == [f"{kind} two unchanged"]
        await mesh.delete(kind, "one")
        await mesh.apply(declaring("three"))


async def test_conditional_apply_requires_the_expected_state(mesh: RunningRegistry) -> None:
    read, mine, theirs = (declare(manifest("m1", context_tokens=size)) for size in (512, 1024, 2048))
    agent = declared(agent=an_agent("judge", "m1"))
    await mesh.apply(read, agent)
    mine_and_agent = ApplyRequest(declarations=[mine, agent], expected=[read, agent])
    answer = await mesh.declarations.Apply(mine_and_agent)
    assert [each.outcome for each in answer.results] == [
        declaration_service_pb2.ApplyResult.OUTCOME_CONFIGURED,
        declaration_service_pb2.ApplyResult.OUTCOME_UNCHANGED,
    ]
    with refused(Reason.RESOURCE_CHANGED) as errors:
        await mesh.declarations.Apply(ApplyRequest(declarations=[theirs], expected=[read]))
    assert errors[0].metadata["model"] == "m1"
    assert (await mesh.model("m1")).manifest.context_tokens == 1024
    gone = declared(agent=an_agent("other", "m1"))
    with refused(Reason.RESOURCE_CHANGED):  # what was deleted is not created again
        await mesh.declarations.Apply(ApplyRequest(declarations=[gone], expected=[gone]))


async def test_a_default_that_is_given_or_left_out_is_no_change_of_what_was_read(mesh: RunningRegistry) -> None:
    given, left_out = an_agent("judge", "m1"), an_agent("judge", "m1")
    given.behaviour.stop_on_decision_request = True
    left_out.ClearField("behaviour")
    await mesh.apply(declare("m1"), declared(agent=given))
    changed = declared(agent=an_agent("judge", "m1"))
    await mesh.declarations.Apply(ApplyRequest(declarations=[changed], expected=[declared(agent=left_out)]))


async def test_expected_document_must_match_the_kind_and_name_of_its_declaration(mesh: RunningRegistry) -> None:
    one, two = declare("m1"), declare("m2")
    for expected in ([two], [one, two]):
        with refused(Reason.INVALID_ARGUMENT) as errors:
            await mesh.declarations.Apply(ApplyRequest(declarations=[one], expected=expected))
        assert errors[0].metadata["field"].startswith("expected")


async def test_virtual_row_that_matches_the_expected_state_is_adopted(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", context_tokens=512),)).open()
    read, mine = declare(manifest("m1", context_tokens=512)), declare(manifest("m1", context_tokens=256))
    await mesh.declarations.Apply(ApplyRequest(declarations=[mine], expected=[read], adopt=True))
    assert (await mesh.model("m1")).kind == PUBLIC
    with refused(Reason.RESOURCE_CHANGED):
        await mesh.declarations.Apply(ApplyRequest(declarations=[read], expected=[read], adopt=True))


async def test_agent_with_a_misspelled_model_lists_close_matches(mesh: RunningRegistry) -> None:
    """The words had two spaces, and named no close ones."""
    await mesh.apply(declare("qwen"))
    with refused(Reason.MODEL_NOT_FOUND) as errors:
        await mesh.apply(declared(agent=an_agent("judge", "qwne")))
    assert errors[0].message == (
        "the target of the agent 'judge' is neither in the mesh nor in this call: there is no model qwne; "
        "did you mean qwen?"
    )

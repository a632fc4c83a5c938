"""What nobody in good faith sends: each a clear error that names the field, and nothing half-written."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import (
    AGENT,
    MODEL,
    RUNNER,
    RunningRegistry,
    SomeRunner,
    a_route,
    an_agent,
    declare,
    manifest,
    ready,
)

from weft.api.registry.v1 import (
    declaration_service_pb2,
    join_token_service_pb2,
    registry_service_pb2,
    runner_pb2,
)
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason

Send = Callable[[RunningRegistry, Any], Awaitable[object]]

HOSTILE_NAMES = ("../../etc/passwd", "m1\x1b[2J")
"""`test_names.py` has every kind of them."""
LETTERS_OF_ANOTHER_SCRIPT = "m\u043edel"
"""A request may name a model by them, as `ascii_name` makes them distinct ASCII names; nothing is registered so."""
EVERY_NAME = (*HOSTILE_NAMES, LETTERS_OF_ANOTHER_SCRIPT)


def _instance(name: str) -> runner_pb2.Capability:
    return runner_pb2.Capability(
        instances=[runner_pb2.InstanceState(model=name, phase=runner_pb2.InstanceState.PHASE_READY)]
    )


def _pool(name: str, *members: str) -> ResourceDocument:
    return declared(pool=declaration_service_pb2.PoolDeclaration(name=name, members=members))


def _events(name: str) -> registry_service_pb2.ListEventsRequest:
    return registry_service_pb2.ListEventsRequest(kind=MODEL, name=name)


NAMING: dict[str, Send] = {
    "runner.name": lambda mesh, name: SomeRunner(mesh, name=name, models=()).open(),
    "runner.incarnation": lambda mesh, name: SomeRunner(mesh, name="x", models=(), incarnation=f" {name}").open(),
    "declarations[1].model.manifest.name": lambda mesh, name: mesh.apply(declare("fine"), declare(name)),
    "declarations[0].model.runner": lambda mesh, name: mesh.apply(declare("fine", runner=name)),
    "declarations[1].agent.name": lambda mesh, name: mesh.apply(declare("fine"), declared(agent=an_agent(name))),
    "declarations[1].route.candidates[1]": lambda mesh, name: mesh.apply(declare("fine"), a_route("q", "fine", name)),
    "declarations[0].runner.name": lambda mesh, name: mesh.apply(
        declared(runner=declaration_service_pb2.RunnerDeclaration(name=name))
    ),
    "declarations[0].pool.name": lambda mesh, name: mesh.apply(_pool(name)),
    "declarations[0].pool.members[1]": lambda mesh, name: mesh.apply(_pool("m1", "m1", name)),
    "name": lambda mesh, name: mesh.delete(MODEL, name),
    "id": lambda mesh, name: mesh.tokens.RevokeJoinToken(join_token_service_pb2.RevokeJoinTokenRequest(id=name)),
    "page_token": lambda mesh, name: mesh.registry.ListResources(
        registry_service_pb2.ListResourcesRequest(kind="model", page_token=name)
    ),
}


async def _require_refusal(mesh: RunningRegistry, send: Send, value: Any, field: str) -> str:
    """That `value` is refused by this field and nothing has changed; the message."""
    before = await mesh.watch()
    with refused(Reason.INVALID_ARGUMENT) as errors:
        await send(mesh, value)
    before.call.cancel()
    after = await mesh.watch()
    after.call.cancel()
    assert isinstance(errors[0], FieldError)
    assert errors[0].field == field
    assert after.snapshot == before.snapshot
    return errors[0].message


async def test_hostile_names_are_rejected_in_every_field(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    for field, send in NAMING.items():
        for name in HOSTILE_NAMES if field == "name" else EVERY_NAME:
            message = await _require_refusal(mesh, send, name, field)
            assert name not in message


async def test_item_with_a_hostile_name_is_left_out_and_the_rest_is_published(mesh: RunningRegistry) -> None:
    for number, name in enumerate(EVERY_NAME):
        for models, agents, field in (
            ((name,), (), "model.name"),
            ((manifest("other", pool=name),), (), "model.pool_name"),
            ((), (an_agent(name, "fine"),), "agent.name"),
            ((), (an_agent("a", name),), "agent.model"),
            ((), (an_agent("a", pool=name),), "agent.pool"),
        ):
            if not name and field not in ("model.name", "agent.name"):
                continue
            life = f"life-{number}-{field}"
            runner = SomeRunner(mesh, name="x", models=("fine", *models), agents=agents, incarnation=life)
            await runner.open()
            [item] = runner.left_out
            assert field in item
            assert item.isprintable()
            assert (await mesh.model("fine")).runner == "x"
            await runner.close()


async def test_hostile_names_in_reports_are_left_out_and_in_event_filters_rejected(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    for name in EVERY_NAME:
        await runner.beat(_instance(name))
        report = (await mesh.runner("r1")).capability
        assert [item.kind for item in report.left_out] == ["instance"]
        assert not report.instances
    for name in HOSTILE_NAMES:
        await _require_refusal(mesh, lambda mesh, name: mesh.registry.ListEvents(_events(name)), name, "name")
    await runner.beat(ready())


async def test_lookup_of_a_hostile_name_finds_nothing_and_does_not_echo_it(mesh: RunningRegistry) -> None:
    for name in EVERY_NAME:
        for ask, reason in (
            (mesh.model, Reason.MODEL_NOT_FOUND),
            (mesh.runner, Reason.NOT_FOUND),
            (mesh.agent, Reason.NOT_FOUND),
            (mesh.pool, Reason.NOT_FOUND),
        ):
            with refused(reason) as errors:
                await ask(name)
            assert name not in errors[0].message


@pytest.mark.slow("steps hours of a registry's life")
async def test_names_are_case_sensitive(mesh: RunningRegistry) -> None:
    assert await mesh.apply(declare("m1"), declare("M1")) == ["model m1 created", "model M1 created"]


async def test_colored_engine_output_is_sanitized_instead_of_rejected(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(detail="\x1b[31mout of memory\x1b[0m\r\n\0at layer 7"))
    (instance,) = (await mesh.runner("r1")).capability.instances
    assert instance.detail == " [31mout of memory [0m \n at layer 7"


async def test_delete_requires_the_matching_kind(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    for kind, name in ((AGENT, "m1"), (RUNNER, "m1")):
        with refused(Reason.NOT_FOUND):
            await mesh.delete(kind, name)
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.delete(MODEL, "r1")

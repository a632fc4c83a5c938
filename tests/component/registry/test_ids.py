"""Ids of models, agents and routes: taken by every rpc that takes names, and never a name themselves."""

from collections.abc import Awaitable, Callable
from typing import Any

from kit.refusals import refused
from kit.resources import declared
from registry_harness import AGENT, MODEL, ROUTE, RunningRegistry, SomeRunner, a_route, an_agent, declare, manifest

from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import registry_service_pb2 as pb
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import is_resource_id

ID = "model-0123456789abcdef01234567"
Call = Callable[[RunningRegistry, str], Awaitable[Any]]


async def some_mesh(mesh: RunningRegistry) -> dict[str, str]:
    """Ids by name."""
    await SomeRunner(mesh, models=(manifest("published"),)).open()
    await mesh.apply(declare("declared"), declared(agent=an_agent("judge", "declared")), a_route("way", "declared"))
    return {
        "published": (await mesh.model("published")).id,
        "declared": (await mesh.model("declared")).id,
        "judge": (await mesh.agent("judge")).id,
        "way": (await mesh.route("way")).id,
    }


async def _members(mesh: RunningRegistry, text: str) -> str:
    return (await mesh.registry.GetModelMembers(pb.GetModelMembersRequest(name=text))).pool.name


async def _event(mesh: RunningRegistry, kind: str, text: str) -> str:
    return (await mesh.events(kind, text))[-1].split()[1]


READS: dict[str, tuple[str, Call]] = {
    "GetModel of a runner": ("published", lambda mesh, text: _name(mesh.model(text))),
    "GetModel": ("declared", lambda mesh, text: _name(mesh.model(text))),
    "GetModelMembers": ("declared", _members),
    "GetAgent": ("judge", lambda mesh, text: _name(mesh.agent(text))),
    "GetRoute": ("way", lambda mesh, text: _name(mesh.route(text))),
    "ListEvents of a model": ("declared", lambda mesh, text: _event(mesh, MODEL, text)),
    "ListEvents of an agent": ("judge", lambda mesh, text: _event(mesh, AGENT, text)),
}


async def _name(found: Awaitable[Any]) -> str:
    return str((await found).manifest.name)


async def test_id_is_accepted_in_place_of_a_name(mesh: RunningRegistry) -> None:
    ids = await some_mesh(mesh)
    for rpc, (name, call) in READS.items():
        assert is_resource_id(ids[name])
        assert (await call(mesh, ids[name]), await call(mesh, name)) == (name, name), rpc


async def test_agents_and_routes_can_reference_an_id_and_store_the_name(mesh: RunningRegistry) -> None:
    ids = await some_mesh(mesh)
    await mesh.apply(
        declared(agent=an_agent("second", ids["published"])), a_route("road", ids["published"], "declared")
    )
    assert (await mesh.agent("second")).manifest.model == "published"
    assert list((await mesh.route("road")).manifest.candidates) == ["published", "declared"]


async def test_load_by_id_loads_the_named_model(mesh: RunningRegistry) -> None:
    ids = await some_mesh(mesh)
    operations: Any = operation_service_pb2_grpc.OperationServiceStub(mesh.channel)
    action = operation_pb2.OperationAction(load_model=operation_pb2.LoadModel(model=ids["published"]))
    created = await operations.CreateOperation(
        operation_service_pb2.CreateOperationRequest(request_id="one", action=action)
    )
    assert created.operation.action.load_model.model == "published"


async def test_resource_deleted_by_id_is_gone_and_gets_a_new_id_when_recreated(mesh: RunningRegistry) -> None:
    ids = await some_mesh(mesh)
    for kind, name in ((ROUTE, "way"), (AGENT, "judge"), (MODEL, "declared")):
        await mesh.delete(kind, ids[name])
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.model("declared")
    await mesh.clock.advance(1.0)
    await mesh.apply(declare("declared"))
    assert (await mesh.model("declared")).id != ids["declared"]
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.model(ids["declared"])


async def test_names_that_look_like_an_id_are_rejected(mesh: RunningRegistry) -> None:
    await some_mesh(mesh)
    for declaration in (
        declare(ID),
        declare(manifest("m1", pool=ID)),
        declared(agent=an_agent(ID.replace("model", "agent"), "declared")),
        a_route(ID.replace("model", "route"), "declared"),
    ):
        with refused(Reason.INVALID_ARGUMENT) as errors:
            await mesh.apply(declaration)
        assert "form of an id" in errors[0].message
    assert "form of an id" in (await SomeRunner(mesh, name="r2", models=(manifest(ID),)).open()).left_out[0]
    # Other names that begin so are names.
    await mesh.apply(declare("model-0123456789abcdef0123456"), declare("model-7b"))

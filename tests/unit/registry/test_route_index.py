"""Routes by what they name, and whether what a reference names is there."""

import pytest

from registry_svc.mesh.domain import Status
from registry_svc.mesh.indexes import PoolIndex, RouteIndex
from registry_svc.mesh.policy.declarations import Target, exists
from weft.api.registry.v1 import model_pb2, route_pb2
from weft.documents.kind import PointsTo


def model(name: str, pool: str = "") -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(name=name, pool_name=pool, operations=[model_pb2.MODEL_OPERATION_CHAT])


def route(name: str, *candidates: str) -> route_pb2.Route:
    return route_pb2.Route(manifest=route_pb2.RouteManifest(name=name, candidates=candidates))


def test_route_is_found_by_each_of_its_names_until_changed_or_removed() -> None:
    index = RouteIndex(PoolIndex())
    index.put(route("q1", "m1", "big"))
    index.put(route("q2", "big"))
    assert (index.naming(["m1"]), index.naming(["big", "other"])) == ({"q1"}, {"q1", "q2"})
    index.put(route("q1", "m2"))
    assert (index.naming(["m1"]), index.naming(["m2"]), index.naming(["big"])) == (set(), {"q1"}, {"q2"})
    index.drop("q2")
    index.drop("never-there")
    assert index.naming(["big"]) == set()
    assert len(index) == 1
    assert (index.get("q1") is not None, index.get("q2")) == (True, None)


def test_status_is_reported_only_when_it_changes() -> None:
    pools = PoolIndex()
    index = RouteIndex(pools)
    index.put(route("q1", "m1"))
    for status, is_news in ((None, True), (None, False), (Status.ACTIVE, True), (Status.ACTIVE, False)):
        if status is not None:
            pools.put(model("m1"), status)
        found = index.get("q1")
        assert found is not None
        assert Status(found.status) is (status or Status.INACTIVE)
        assert index.note_status(found) is is_news
    # A new declaration of the same name is told whatever its status.
    index.put(route("q1", "m1"))
    found = index.get("q1")
    assert found is not None
    assert index.note_status(found)


def test_pool_takes_precedence_over_a_model_with_its_name_and_a_model_is_not_its_pool() -> None:
    pools = PoolIndex()
    pools.put(model("m1", "big"), Status.INACTIVE)
    pools.put(model("m2", "big"), Status.ACTIVE)
    index = RouteIndex(pools)
    assert index.status(route("q", "m1").manifest) is Status.INACTIVE
    assert index.status(route("q", "big").manifest) is Status.ACTIVE
    assert index.status(route("q", "nothing").manifest) is Status.INACTIVE
    pools.put(model("m3", "m1"), Status.HIBERNATING)
    assert index.status(route("q", "m1").manifest) is Status.HIBERNATING


@pytest.mark.parametrize(
    ("to", "leaving", "arriving", "is_there"),
    [
        (PointsTo.MODEL, (), {}, True),
        (PointsTo.MODEL, ("big",), {}, False),
        (PointsTo.POOL, ("m1",), {}, True),
        (PointsTo.POOL, ("m1", "m2"), {}, False),
        # A member that the call moves to another pool does not keep the one that it leaves.
        (PointsTo.POOL, ("m1",), {"m2": "other"}, False),
        (PointsTo.POOL, ("m1", "m2"), {"m3": "big"}, True),
        (PointsTo.MODEL_OR_POOL, ("big",), {}, True),
        (PointsTo.MODEL_OR_POOL, ("big", "m1", "m2"), {}, False),
    ],
)
def test_reference_is_broken_only_when_the_last_named_resource_is_removed(
    to: PointsTo, leaving: tuple[str, ...], arriving: dict[str, str], is_there: bool
) -> None:
    target = Target(name="big", model_known=True, pool_members=("m1", "m2"))
    assert exists(target, to, arriving=arriving, leaving=leaving) is is_there

"""Pools kept current one model at a time are the pools one would count afresh."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_svc.mesh.indexes import PoolIndex, RouteIndex, TargetIndex
from registry_svc.mesh.policy.declarations import Target, exists
from registry_svc.mesh.states import Status
from weft.api.registry.v1 import agent_pb2, model_pb2, route_pb2
from weft.documents.kind import PointsTo

NAMES = ("a", "b", "c", "p")


def manifest(name: str, pool: str = "") -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(name=name, pool_name=pool, operations=[model_pb2.MODEL_OPERATION_CHAT])


puts = st.tuples(st.sampled_from(NAMES), st.sampled_from(("", "p", "a")), st.sampled_from(Status))

drops = st.tuples(st.sampled_from(NAMES), st.none(), st.none())


def counted(models: dict[str, tuple[str, Status]], pool: str) -> tuple[dict[str, Status], bool, Status]:
    members = {name: status for name, (named, status) in models.items() if (named or name) == pool}
    found = set(members.values())
    status = next((one for one in (Status.ACTIVE, Status.HIBERNATING) if one in found), Status.INACTIVE)
    return members, any(named == pool for named, _ in models.values()), status


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.one_of(puts, drops), max_size=30))
def test_pool_index_equals_a_full_count_and_reports_every_transition(
    script: list[tuple[str, str | None, Status | None]],
) -> None:
    index, models = PoolIndex(), dict[str, tuple[str, Status]]()
    for name, pool, status in script:
        before = {each: counted(models, each)[2] for each in NAMES}
        if pool is None or status is None:
            turned = index.drop(name)
            models.pop(name, None)
        else:
            turned = index.put(manifest(name, pool), status)
            models[name] = (pool, status)
        for each in NAMES:
            assert (dict(index.members(each)), index.is_explicit(each), index.status(each)) == counted(models, each)
            assert (each in turned) == (counted(models, each)[2] is not before[each])
        assert len(index) == len(models)
        assert sorted(index.names()) == sorted({named or name for name, (named, _) in models.items()})


def agent(name: str, target: str, *, pool: bool = False) -> agent_pb2.AgentManifest:
    if pool:
        return agent_pb2.AgentManifest(name=name, pool=target)
    return agent_pb2.AgentManifest(name=name, model=target)


def test_change_updates_agents_of_the_model_its_pool_and_its_siblings() -> None:
    pools = PoolIndex()
    targets = TargetIndex(pools)
    assert targets.affected(["m1"], ["p"]) == set()
    for name, pool in (("m1", "p"), ("m2", "p"), ("m3", "")):
        pools.put(manifest(name, pool), Status.ACTIVE)
    targets.put(agent("by-model", "m1"), Status.ACTIVE)
    targets.put(agent("by-sibling", "m2"), Status.ACTIVE)
    targets.put(agent("by-pool", "p", pool=True), Status.ACTIVE)
    targets.put(agent("elsewhere", "m3"), Status.ACTIVE)
    assert targets.affected(["m1"], []) == {"by-model"}
    assert targets.affected(["m1"], ["p"]) == {"by-model", "by-sibling", "by-pool"}
    targets.drop("by-sibling")
    assert targets.affected([], ["p"]) == {"by-model", "by-pool"}


def test_agents_of_a_large_pool_are_found_through_the_smaller_side() -> None:
    pools = PoolIndex()
    targets = TargetIndex(pools)
    for number in range(1_000):
        pools.put(manifest(f"m{number}", "p"), Status.ACTIVE)
    targets.put(agent("a1", "m7"), Status.ACTIVE)
    targets.put(agent("a2", "elsewhere"), Status.ACTIVE)
    assert targets.affected([], ["p"]) == {"a1"}


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
    ("to", "leaving", "arriving", "is_reachable"),
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
    to: PointsTo, leaving: tuple[str, ...], arriving: dict[str, str], is_reachable: bool
) -> None:
    target = Target(name="big", model_known=True, pool_members=("m1", "m2"))
    assert exists(target, to, arriving=arriving, leaving=leaving) is is_reachable

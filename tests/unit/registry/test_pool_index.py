"""Pools kept current one model at a time are the pools one would count afresh."""

from hypothesis import given, settings
from hypothesis import strategies as st

from registry_svc.mesh.domain import Status
from registry_svc.mesh.indexes import PoolIndex, TargetIndex
from weft.api.registry.v1 import agent_pb2, model_pb2

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

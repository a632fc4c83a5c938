"""What a watcher knows after a snapshot and changes."""

from kit.resource_samples import some_agent, some_model, some_route, some_runner
from kit.resources import gone, put, snapshot

from weft.api.registry.v1 import model_pb2
from weft.api.registry.v1.registry_service_pb2 import Change, Snapshot, WatchedRunner, WatchResponse
from weft.documents.mesh_state import MeshState
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import PoolDocument

MODEL, AGENT, RUNNER, POOL = ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.RUNNER, ResourceKind.POOL


def _snapshot(*models: model_pb2.Model) -> WatchResponse:
    return WatchResponse(
        revision=1,
        snapshot=snapshot(*models, some_agent(), runners=[WatchedRunner(runner=some_runner())]),
    )


def _solo(name: str) -> model_pb2.Model:
    return model_pb2.Model(manifest=model_pb2.ModelManifest(name=name), status=model_pb2.Model.STATUS_ACTIVE)


def test_snapshot_contains_everything_including_pools() -> None:
    state = MeshState()
    changed = state.fold(_snapshot(some_model("qwen"), _solo("big"), _solo("tiny")))
    assert {(POOL, "big"), (POOL, "tiny"), (MODEL, "qwen"), (AGENT, "coder"), (RUNNER, "r1")} <= changed
    (big,) = [pool for pool in state.documents(POOL) if pool.name == "big"]
    assert isinstance(big, PoolDocument)
    assert list(big.declared.members) == ["big", "qwen"], "a solo model with the name of an explicit pool joins it"
    assert big.observed is not None
    assert (big.observed.explicit, big.observed.size, big.observed.active_count) == (True, 2, 2)


def test_runner_change_also_changes_its_models() -> None:
    state = MeshState()
    state.fold(_snapshot(some_model("qwen")))
    change = Change(runner=WatchedRunner(runner=some_runner(phase="LOADING")))
    changed = state.fold(WatchResponse(revision=2, change=change))
    assert changed == {(RUNNER, "r1"), (MODEL, "qwen")}
    document = state.document((MODEL, "qwen"))
    assert document is not None
    assert document.conditions[-1].reason == "Loading"


def test_model_that_changes_its_pool_changes_both_pools() -> None:
    state = MeshState()
    state.fold(_snapshot(some_model("qwen")))
    changed = state.fold(WatchResponse(revision=2, change=put(_solo("qwen"))))
    assert changed == {(MODEL, "qwen"), (POOL, "big"), (POOL, "qwen")}
    assert state.document((POOL, "big")) is None


def test_deleted_resource_is_gone() -> None:
    state = MeshState()
    state.fold(_snapshot(some_model("qwen")))
    for change, key in [
        (gone("agent", "coder"), (AGENT, "coder")),
        (gone("model", "qwen"), (MODEL, "qwen")),
        (Change(deleted_runner="r1"), (RUNNER, "r1")),
    ]:
        assert key in state.fold(WatchResponse(revision=2, change=change))
        assert state.document(key) is None


def test_second_snapshot_reports_resources_removed_meanwhile() -> None:
    state = MeshState()
    state.fold(_snapshot(some_model("qwen")))
    assert (MODEL, "qwen") in state.fold(_snapshot())
    assert state.documents(MODEL) == []


def test_routes_are_added_changed_and_removed() -> None:
    state = MeshState()
    state.fold(WatchResponse(revision=1, snapshot=snapshot(some_route("a"))))
    assert [route.name for route in state.documents(ResourceKind.ROUTE)] == ["a"]
    assert state.fold(WatchResponse(revision=2, change=put(some_route("b")))) == {(ResourceKind.ROUTE, "b")}
    assert state.document((ResourceKind.ROUTE, "b")) is not None
    assert state.fold(WatchResponse(revision=3, change=gone("route", "b"))) == {(ResourceKind.ROUTE, "b")}
    assert state.document((ResourceKind.ROUTE, "b")) is None
    assert (ResourceKind.ROUTE, "a") in state.fold(WatchResponse(revision=4, snapshot=Snapshot()))
    assert state.documents(ResourceKind.ROUTE) == []

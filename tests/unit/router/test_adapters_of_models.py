"""Adapters of a model in the scheduler: models of their own that share its engine, its slots and its memory."""

from typing import Any

from scheduler_harness import Mesh, arrival, asleep, candidate, failed, placed, rejected, scheduler, woken

from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder
from weft.kernel.errors.reasons import Reason

GIB = 1 << 30
ON_HOST: dict[str, Any] = {"host": "gpu", "memory_bytes": 5 * GIB, "usual_load_seconds": 4.0}
ADAPTED: dict[str, Any] = {"host": "gpu", "base_model": "smol"}


def family(of: Any = candidate, slots: int = 2, runner: str = "a") -> list[Candidate]:
    """A model and two adapters of it."""
    adapters = [of(runner, name, slots=slots, **ADAPTED) for name in ("pirate", "poet")]
    return [of(runner, "smol", slots=slots, **ON_HOST), *adapters]


def memory(*loaded: str, total: int = 8) -> dict[str, HostMemory]:
    holders = tuple(MemoryHolder(name=model, is_model=True, held_bytes=5 * GIB) for model in loaded)
    free = (total - 5 * len(loaded)) * GIB
    return {"gpu": HostMemory(host="gpu", total_bytes=total * GIB, free_bytes=free, holders=holders)}


def test_model_and_its_adapters_share_the_slots_of_one_engine() -> None:
    mesh = scheduler(*family(slots=2))
    assert 1 in placed(mesh.submit(arrival(1, "smol"), 0.0))
    assert 2 in placed(mesh.submit(arrival(2, "pirate"), 0.0))
    assert placed(mesh.submit(arrival(3, "poet"), 0.0)) == {}, "both slots are taken by its model and another adapter"
    assert placed(mesh.submit(arrival(4, "smol"), 0.0)) == {}
    assert len(placed(mesh.finish(2, 1.0))) == 1
    assert len(placed(mesh.finish(1, 2.0))) == 1


def test_models_without_adapters_share_no_slots() -> None:
    mesh = scheduler(candidate("a", "smol"), candidate("a", "other"))
    assert 1 in placed(mesh.submit(arrival(1, "smol"), 0.0))
    assert 2 in placed(mesh.submit(arrival(2, "other"), 0.0))


def test_adapter_request_wakes_its_model_once_and_is_placed_when_both_are_ready() -> None:
    mesh = scheduler(*family(asleep))
    assert woken(mesh.submit(arrival(1, "pirate"), 0.0)) == ["smol"]
    assert woken(mesh.submit(arrival(2, "poet"), 0.1)) == []
    assert woken(mesh.submit(arrival(3, "smol"), 0.2)) == []
    decisions = mesh.wake_finished("smol", None, 4.0)
    decisions += mesh.show(family(slots=3), 4.0)
    assert set(placed(decisions)) == {1, 2, 3}


def test_failed_wake_of_the_model_ends_the_wait_for_its_adapters() -> None:
    mesh = scheduler(*family(asleep))
    mesh.submit(arrival(1, "pirate"), 0.0)
    assert rejected(mesh.wake_finished("smol", failed("no such file"), 1.0)) == {1: Reason.WAKE_FAILED}


def swap_mesh(**limits: Any) -> Mesh:
    """A host that holds either the model with its adapters or another one; the former is loaded."""
    mesh = scheduler(max_cold_wait_seconds=10.0, **limits)
    mesh.show([*family(), asleep("b", "llama", **ON_HOST)], 0.0, hosts=memory("smol"))
    return mesh


def test_memory_of_a_model_counts_once_for_any_number_of_adapters() -> None:
    mesh = scheduler()
    mesh.show([*family(), asleep("b", "llama", **ON_HOST)], 0.0, hosts=memory("smol", total=10))
    assert woken(mesh.submit(arrival(1, "llama"), 0.0)) == ["llama"], "five of ten GiB are free"


def test_model_with_a_busy_adapter_is_evicted_only_after_it_is_idle_and_takes_no_new_requests() -> None:
    mesh = swap_mesh()
    mesh.submit(arrival(1, "pirate"), 0.0)
    decisions = mesh.submit(arrival(2, "llama"), 0.0)
    for quarter in range(1, 44):
        decisions += mesh.tick(quarter / 4)
    assert woken(decisions) == []
    assert placed(mesh.submit(arrival(3, "poet", arrived_at=11.0), 11.0)) == {}, "it is held with its model"
    assert woken(mesh.finish(1, 12.0)) == ["llama"]


def test_swap_between_adapters_of_one_model_is_free() -> None:
    mesh = swap_mesh()
    for key in range(1, 9):
        assert key in placed(mesh.submit(arrival(key, ("pirate", "poet", "smol")[key % 3]), float(key)))
        mesh.finish(key, key + 0.5)


def test_adapter_without_its_base_model_in_the_mesh_is_served_separately() -> None:
    mesh = scheduler(asleep("a", "pirate", **ADAPTED))
    assert woken(mesh.submit(arrival(1, "pirate"), 0.0)) == ["pirate"]


def test_running_requests_are_counted_with_the_engine_once_the_base_is_known() -> None:
    mesh = scheduler(candidate("a", "smol", slots=1), candidate("a", "pirate", slots=1))
    assert 1 in placed(mesh.submit(arrival(1, "pirate"), 0.0))
    mesh.show([candidate("a", "smol", slots=1), candidate("a", "pirate", slots=1, base_model="smol")], 1.0)
    assert placed(mesh.submit(arrival(2, "smol"), 1.0)) == {}
    assert 2 in placed(mesh.finish(1, 2.0))

"""Loads for durable requests: into free memory, in place of unused models, and never at a caller's cost."""

from typing import Any

import pytest
from scheduler_harness import Mesh, arrival, asleep, candidate, placed, rejected, scheduler, woken

from router_svc.policy.decisions import Decision, Served, Waits, Wakes
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder
from weft.kernel.request import Priority

DURABLE = Priority.DURABLE
GIB = 1 << 30
ON_HOST: dict[str, Any] = {"host": "gpu", "memory_bytes": 5 * GIB, "usual_load_seconds": 4.0}
BOTH = ("qwen", "llama")
TOOK = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100)


def memory(*loaded: str, total: int = 8) -> dict[str, HostMemory]:
    holders = tuple(MemoryHolder(name=model, is_model=True, held_bytes=5 * GIB) for model in loaded)
    free = (total - 5 * len(loaded)) * GIB
    return {"gpu": HostMemory(host="gpu", total_bytes=total * GIB, free_bytes=free, holders=holders)}


def members(*ready: str) -> list[Candidate]:
    return [(candidate if model in ready else asleep)("run-" + model, model, **ON_HOST) for model in BOTH]


def host_with(*ready: str, total: int = 8, **limits: Any) -> Mesh:
    """A host that holds one of two models; with 12 GiB both."""
    mesh = scheduler(**{"queue_depth_per_runner": 1000, "durable_idle_seconds": 30.0, **limits})
    mesh.show(members(*ready), 0.0, hosts=memory(*ready, total=total))
    return mesh


def swap(mesh: Mesh, to: str, now: float) -> list[Decision]:
    """The model that is woken is loaded, and the other one is not any more."""
    return mesh.wake_finished(to, None, now) + mesh.show(members(to), now, hosts=memory(to))


def wakes_until(mesh: Mesh, begin: float, end: float) -> tuple[str, float] | None:
    """The first wake while nothing but time passes."""
    for quarter in range(int(begin * 4), int(end * 4)):
        for model in woken(mesh.tick(quarter / 4)):
            return model, quarter / 4
    return None


def test_model_that_fits_is_loaded_immediately_with_durable_priority() -> None:
    mesh = host_with("qwen", total=12)
    mesh.submit(arrival(1, "qwen"), 0.0)
    decisions = mesh.submit(arrival(2, "llama", priority=DURABLE), 0.0)
    (wakes,) = (each for each in decisions if isinstance(each, Wakes))
    assert (wakes.model, wakes.priority) == ("llama", DURABLE)


def test_model_unused_by_callers_for_a_while_is_evicted() -> None:
    mesh = host_with("qwen")
    mesh.submit(arrival(1, "qwen"), 0.0)
    mesh.finish(1, 10.0)
    assert woken(mesh.submit(arrival(2, "llama", priority=DURABLE), 11.0)) == []
    assert wakes_until(mesh, 11.0, 100.0) == ("llama", 40.0)


def test_model_loaded_but_not_yet_used_is_kept_for_the_same_time() -> None:
    mesh = host_with()
    mesh.show(members("qwen"), 100.0, hosts=memory("qwen"))
    mesh.submit(arrival(1, "llama", priority=DURABLE, arrived_at=101.0), 101.0)
    assert wakes_until(mesh, 101.0, 200.0) == ("llama", 130.0)


def test_no_bound_evicts_a_model_that_a_caller_uses_or_waits_for() -> None:
    mesh = host_with("qwen", max_cold_wait_seconds=5.0, queue_timeout_seconds=1e6)
    mesh.submit(arrival(1, "qwen"), 0.0)
    for key in range(2, 102):
        mesh.submit(arrival(key, "llama", priority=DURABLE), 0.0)
    assert wakes_until(mesh, 0.0, 1000.0) is None
    mesh.submit(arrival(200, "qwen", arrived_at=1000.0), 1000.0)
    assert placed(mesh.finish(1, 1001.0)) == {200: "run-qwen"}, "nothing is held for them either"


def test_low_priority_caller_would_have_it_evicted() -> None:
    """What the test above would see if durable requests were like any others."""
    mesh = host_with("qwen", max_cold_wait_seconds=5.0, queue_timeout_seconds=1e6)
    running = arrival(1, "qwen")
    mesh.submit(running, 0.0)
    mesh.submit(arrival(2, "llama", priority=Priority.LOW), 0.0)
    for quarter in range(40):
        mesh.tick(quarter / 4)
    mesh.submit(arrival(200, "qwen", arrived_at=10.0), 10.0)
    assert (placed(mesh.finish(1, 11.0)), mesh.waiting) == ({}, 2)


def test_swap_for_durable_requests_is_cancelled_when_a_caller_arrives() -> None:
    mesh = host_with("qwen")
    mesh.submit(arrival(1, "qwen", priority=DURABLE), 0.0)
    for key in range(2, 50):
        mesh.submit(arrival(key, "llama", priority=DURABLE), 0.0)
    for quarter in range(4 * 60):
        mesh.tick(quarter / 4)
    assert mesh.submit(arrival(100, "qwen", priority=DURABLE, arrived_at=60.0), 60.0)
    mesh.submit(arrival(101, "qwen", arrived_at=61.0), 61.0)
    decisions = mesh.finish(1, 62.0)
    assert (placed(decisions), woken(decisions)) == ({101: "run-qwen"}, [])


def test_caller_gets_its_model_back_after_the_minimum_turn() -> None:
    mesh = host_with("llama", min_turn_seconds=2.0, max_cold_wait_seconds=20.0)
    mesh.submit(arrival(1, "llama", priority=DURABLE), 0.0)
    for key in range(2, 50):
        mesh.submit(arrival(key, "llama", priority=DURABLE), 0.0)
    mesh.submit(arrival(100, "qwen", arrived_at=10.0), 10.0)
    for quarter in range(1, 8):
        mesh.tick(10.0 + quarter / 4)
    decisions = mesh.finish(1, 12.0)
    assert (placed(decisions), woken(decisions)) == ({}, ["qwen"])
    assert 100 in placed(swap(mesh, "qwen", 16.0))


def test_earlier_durable_requests_do_not_extend_a_callers_wait() -> None:
    """The bound on a caller's wait for a load counts from its own arrival, and what others lose by it counts."""
    mesh = host_with("qwen", max_cold_wait_seconds=20.0, queue_timeout_seconds=1e6)
    mesh.submit(arrival(1, "qwen"), 0.0)
    for key in range(2, 102):
        mesh.submit(arrival(key, "llama", priority=DURABLE), 0.0)
    for second in range(1, 100):
        mesh.tick(float(second))
    mesh.submit(arrival(200, "qwen", arrived_at=100.0), 100.0)
    mesh.submit(arrival(201, "llama", arrived_at=100.0), 100.0)
    mesh.tick(100.5)
    assert 200 in placed(mesh.finish(1, 101.0)), "qwen would be held if the wait of the durable ones counted for it"


def test_swap_between_durable_models_has_no_eta() -> None:
    mesh = host_with("qwen")
    mesh.submit(arrival(1, "qwen", priority=DURABLE), 0.0)
    mesh.finish(1, 2.0, TOOK)
    mesh.submit(arrival(2, "qwen", priority=DURABLE), 40.0)
    mesh.submit(arrival(3, "qwen", priority=DURABLE), 40.0)
    (word,) = (each for each in mesh.submit(arrival(4, "llama", priority=DURABLE), 40.0) if isinstance(each, Waits))
    assert (word.reason, word.eta_seconds) == ("VRAM: needs 5 GiB on gpu, held by qwen until idle", None)


@pytest.mark.slow("simulates minutes of two models")
def test_durable_requests_for_two_models_take_turns() -> None:
    mesh = host_with("qwen", queue_timeout_seconds=1e6)
    key, now, loaded, running = 0, 0.0, "qwen", list[int]()
    swaps: list[tuple[str, float]] = []
    for model in BOTH:
        for _ in range(4):
            key += 1
            running += placed(mesh.submit(arrival(key, model, priority=DURABLE, prompt_tokens=10), now))
    target = {each: BOTH[(each - 1) // 4] for each in range(1, 9)}
    for _ in range(1200):
        now += 0.5
        decisions = mesh.tick(now)
        for done in running[:]:
            running.remove(done)
            decisions += mesh.finish(done, now, TOOK)
            key += 1
            target[key] = target[done]
            asked = arrival(key, target[key], priority=DURABLE, prompt_tokens=10, arrived_at=now)
            decisions += mesh.submit(asked, now)
        for model in woken(decisions):
            swaps.append((model, now))
            now += 4.0
            decisions += swap(mesh, model, now)
            loaded = model
        running += placed(decisions)
        assert rejected(decisions) == {}
    assert [model for model, _ in swaps[:4]] == ["llama", "qwen", "llama", "qwen"]
    assert loaded in BOTH
    assert 4 <= len(swaps) <= 40, "they take turns, and the turns are worth the loads"

"""Models that have to take turns on one host: who waits, what for, and what becomes of the others."""

import itertools
from typing import Any

from scheduler_harness import Mesh, arrival, asleep, candidate, failed, placed, refusals, rejected, scheduler, woken

from router_svc.policy.decisions import Decision, Loads, Placed, Rejects, Waits
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder
from router_svc.policy.estimates import MAX_EVICTION_SECONDS
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

GIB = 1 << 30
ON_HOST: dict[str, Any] = {"host": "gpu", "memory_bytes": 5 * GIB, "usual_load_seconds": 4.0}


def memory(*loaded: str) -> dict[str, HostMemory]:
    holders = tuple(MemoryHolder(name=model, is_model=True, held_bytes=5 * GIB) for model in loaded)
    return {"gpu": HostMemory(host="gpu", total_bytes=8 * GIB, free_bytes=(8 - 5 * len(loaded)) * GIB, holders=holders)}


def one_at_a_time(ready: str = "qwen", **limits: Any) -> Mesh:
    """A host that holds one of two models."""
    mesh = scheduler(**limits)
    mesh.show(members(ready), 0.0, hosts=memory(ready))
    return mesh


def members(ready: str) -> list[Candidate]:
    return [(candidate if model == ready else asleep)("run-" + model, model, **ON_HOST) for model in ("qwen", "llama")]


def becomes(mesh: Mesh, ready: str, now: float) -> list[Decision]:
    return mesh.show(members(ready), now, hosts=memory(ready))


def words(decisions: list[Decision]) -> dict[int, str]:
    return {each.key: each.reason for each in decisions if isinstance(each, Waits)}


def test_model_being_evicted_takes_no_requests_and_the_other_is_woken_when_it_is_idle() -> None:
    mesh = one_at_a_time(max_cold_wait_seconds=10.0)
    mesh.submit(arrival(1, "qwen"), 0.0)
    mesh.submit(arrival(2, "llama"), 0.0)
    for quarter in range(1, 44):
        mesh.tick(quarter / 4)
    decisions = mesh.submit(arrival(3, "qwen", arrived_at=11.0), 11.0)
    assert words(decisions) == {3: "qwen is evicted for another model for a turn"}
    decisions = mesh.finish(1, 12.0)
    assert (placed(decisions), woken(decisions)) == ({}, ["llama"])


def test_insufficient_memory_is_temporary_and_not_a_failure() -> None:
    mesh = scheduler(asleep(**ON_HOST), memory_retry_seconds=5.0, queue_timeout_seconds=30.0, max_attempts=1)
    assert woken(mesh.submit(arrival(1), 0.0)) == ["m"]
    decisions = mesh.wake_finished("m", failed("a program holds it", Reason.INSUFFICIENT_MEMORY), 1.0)
    assert (rejected(decisions), woken(decisions)) == ({}, [])
    again = [(quarter / 4, model) for quarter in range(5, 60) for model in woken(mesh.tick(quarter / 4))]
    assert again == [(6.0, "m")]


def test_queue_timeout_runs_while_there_is_no_memory() -> None:
    mesh = scheduler(asleep(**ON_HOST), memory_retry_seconds=1000.0, queue_timeout_seconds=30.0)
    mesh.submit(arrival(1), 0.0)
    mesh.wake_finished("m", failed("a program holds it", Reason.INSUFFICIENT_MEMORY), 10.0)
    ended = next(quarter / 4 for quarter in range(41, 400) if rejected(mesh.tick(quarter / 4)))
    assert ended == 40.0, "it begins anew with the end of the wake"


def test_load_status_has_its_usual_duration() -> None:
    mesh = scheduler(asleep(usual_load_seconds=10.0))
    (word,) = (each for each in mesh.submit(arrival(1), 0.0) if isinstance(each, Loads))
    assert word.eta_seconds == 10.0
    (later,) = mesh.tick(4.0)
    assert isinstance(later, Loads)
    assert later.eta_seconds == 6.0


def test_failed_load_of_a_second_member_is_not_retried_immediately() -> None:
    pool = [candidate("a", "first", pool="p"), asleep("b", "second", pool="p")]
    mesh = scheduler(*pool, queue_depth_per_runner=100, failed_load_pause_seconds=30.0, queue_timeout_seconds=1e6)
    for key in range(1, 40):
        mesh.submit(arrival(key, "p"), 0.0)
    asked = []
    for quarter in range(1, 400):
        now = quarter / 4
        decisions = mesh.tick(now)
        while woken(decisions):
            asked.append(now)
            decisions = mesh.wake_finished("second", failed("no"), now)
    assert len(asked) >= 2
    assert all(later - sooner >= 30.0 for sooner, later in itertools.pairwise(asked))


def test_model_larger_than_its_host_is_refused_immediately_with_the_figures() -> None:
    """It used to be put off, as if memory might come, until the queue timeout."""
    mesh = scheduler()
    mesh.show([asleep("run-huge", "huge", host="gpu", memory_bytes=80 * GIB)], 0.0, hosts=memory())
    assert woken(mesh.submit(arrival(1, "huge"), 0.0)) == ["huge"]
    (refusal,) = mesh.wake_finished("huge", failed("no room", Reason.INSUFFICIENT_MEMORY), 0.1)
    assert isinstance(refusal, Rejects)
    assert (refusal.reason, refusal.message) == (
        Reason.INSUFFICIENT_MEMORY,
        "huge needs 80 GiB, and gpu has 8 GiB in all; use a smaller model or a shorter context",
    )
    assert refusal.metadata["most_bytes"] == str(8 * GIB)
    assert mesh.waiting == 0


def test_model_that_fits_its_host_waits_while_there_is_no_memory() -> None:
    mesh = scheduler()
    mesh.show([asleep("run-llama", "llama", **ON_HOST)], 0.0, hosts=memory())
    mesh.submit(arrival(1, "llama"), 0.0)
    assert rejected(mesh.wake_finished("llama", failed("no room", Reason.INSUFFICIENT_MEMORY), 0.1)) == {}
    assert mesh.waiting == 1


def test_gate_of_a_held_model_names_the_model_loaded_in_its_place() -> None:
    """The explanation used to say "held for another model"."""
    mesh = one_at_a_time(max_cold_wait_seconds=1.0)
    mesh.submit(arrival(1, "qwen"), 0.0)
    mesh.submit(arrival(2, "llama"), 0.0)
    for quarter in range(1, 20):
        mesh.tick(quarter / 4)
    (word,) = (each for each in mesh.submit(arrival(3, "qwen", arrived_at=5.0), 5.0) if isinstance(each, Waits))
    assert [each.gate for each in word.considered] == ["held for llama to be loaded"]


def test_queue_timeout_is_paused_while_a_planned_load_waits_for_evictions() -> None:
    """It ran on until the load began, so that requests died just before what they had waited for."""
    mesh = one_at_a_time(max_cold_wait_seconds=20.0, queue_timeout_seconds=30.0)
    mesh.submit(arrival(1, "qwen"), 0.0)
    mesh.submit(arrival(2, "llama"), 0.0)
    for quarter in range(1, 200):
        assert rejected(mesh.tick(quarter / 4)) == {}
    assert woken(mesh.finish(1, 50.0)) == ["llama"]


def test_queue_timeout_applies_while_no_load_is_planned() -> None:
    mesh = one_at_a_time(max_cold_wait_seconds=60.0, queue_timeout_seconds=30.0)
    mesh.submit(arrival(1, "qwen", priority=Priority.HIGH), 0.0)
    mesh.submit(arrival(2, "llama", priority=Priority.LOW), 0.0)
    mesh.submit(arrival(3, "qwen", priority=Priority.HIGH, arrived_at=10.0), 10.0)
    ended = [quarter / 4 for quarter in range(41, 150) if 2 in rejected(mesh.tick(quarter / 4))]
    assert ended == [30.0]


def test_repeatedly_failing_loads_do_not_extend_the_queue_timeout_indefinitely() -> None:
    """Each load restarted the queue timeout."""
    mesh = scheduler(queue_timeout_seconds=30.0, max_load_pause_seconds=120.0)
    mesh.show([asleep("run-llama", "llama", **ON_HOST)], 0.0, hosts=memory())
    decided, now = mesh.submit(arrival(1, "llama"), 0.0), 0.0
    while mesh.waiting and now < 1000.0:
        now += 0.25
        if woken(decided):
            mesh.wake_finished("llama", failed("no room", Reason.INSUFFICIENT_MEMORY), now)
        decided = mesh.tick(now)
    assert 120.0 <= now <= 151.0


def test_first_load_delayed_by_the_registry_is_not_learned_as_slow() -> None:
    """The runner reported how long the engine takes only at the end of the load, and an older report counted."""
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    mesh.wake_finished("m", None, 100.0)
    mesh.show([candidate(usual_load_seconds=2.0)], 100.0)
    mesh.finish(1, 101.0)
    mesh.show([asleep(usual_load_seconds=2.0)], 102.0)
    (word,) = (each for each in mesh.submit(arrival(2, arrived_at=110.0), 110.0) if isinstance(each, Loads))
    assert word.eta_seconds == 2.0 + MAX_EVICTION_SECONDS


def test_unowned_memory_does_not_count_as_a_pending_eviction() -> None:
    """A deleted model held the memory; the requests behind it got no status that said so."""
    mesh = scheduler(max_cold_wait_seconds=20.0, queue_timeout_seconds=30.0)
    gone = MemoryHolder(name="deleted", is_model=True, held_bytes=5 * GIB, unowned=True)
    book = {"gpu": HostMemory(host="gpu", total_bytes=8 * GIB, free_bytes=3 * GIB, holders=(gone,))}
    mesh.show([asleep("run-llama", "llama", **ON_HOST)], 0.0, hosts=book)
    assert words(mesh.submit(arrival(1, "llama"), 0.0)) == {1: "VRAM: needs 5 GiB on gpu, held by deleted (unowned)"}
    ticks = ((quarter / 4, refusals(mesh.tick(quarter / 4))) for quarter in range(1, 140))
    ((at, refused),) = ((at, refused) for at, refused in ticks if refused)
    assert (at, refused[1].reason) == (30.0, Reason.QUEUE_TIMEOUT)
    assert "held by deleted (unowned)" in refused[1].message


def test_load_waiting_for_unowned_memory_starts_when_it_is_freed() -> None:
    mesh = scheduler()
    gone = MemoryHolder(name="deleted", is_model=True, held_bytes=5 * GIB, unowned=True)
    book = {"gpu": HostMemory(host="gpu", total_bytes=8 * GIB, free_bytes=3 * GIB, holders=(gone,))}
    llama = [asleep("run-llama", "llama", **ON_HOST)]
    mesh.show(llama, 0.0, hosts=book)
    assert woken(mesh.submit(arrival(1, "llama"), 0.0)) == []
    assert woken(mesh.show(llama, 10.0, hosts=memory())) == ["llama"]


def test_request_waits_for_a_wake_started_before_its_maximum_wait_and_for_no_further_one() -> None:
    mesh = scheduler(queue_timeout_seconds=5.0, max_load_pause_seconds=10.0, memory_retry_seconds=2.0)
    mesh.show([asleep("run-llama", "llama", **ON_HOST)], 0.0, hosts=memory())
    assert woken(mesh.submit(arrival(1, "llama"), 0.0)) == ["llama"]
    for quarter in range(1, 160):
        assert rejected(mesh.tick(quarter / 4)) == {}, "its wake has a bound of its own"
    assert rejected(mesh.wake_finished("llama", failed("no room", Reason.INSUFFICIENT_MEMORY), 40.0)) == {}
    ended, quarter = dict[int, Reason](), 160
    while not ended:
        quarter += 1
        ended = rejected(mesh.tick(quarter / 4))
    assert (ended, quarter / 4 <= 41.0) == ({1: Reason.QUEUE_TIMEOUT}, True)


def test_request_placed_again_keeps_its_time_spent_waiting_for_loads() -> None:
    """What it had waited for a load was forgotten with every attempt that its runner did not take."""
    mesh = scheduler(queue_timeout_seconds=5.0, max_load_pause_seconds=10.0, max_bounces=100, stale_view_bounces=100)
    mesh.show([asleep("run-llama", "llama")], 0.0)
    now, decided = 0.0, mesh.submit(arrival(1, "llama"), 0.0)
    while not rejected(decided) and now < 100.0:
        now += 3.0
        mesh.wake_finished("llama", None, now)
        granted = mesh.show([candidate("run-llama", "llama")], now)
        attempt = next((each.attempt for each in granted if isinstance(each, Placed)), None)
        if attempt is not None:
            mesh.report_failed(1, attempt, Reason.BACKEND_NOT_READY, now)
        decided = [*mesh.show([asleep("run-llama", "llama")], now), *mesh.tick(now + 0.25)]
    assert (rejected(decided), now <= 21.0) == ({1: Reason.QUEUE_TIMEOUT}, True)

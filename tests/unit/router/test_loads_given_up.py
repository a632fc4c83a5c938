"""A load under way whose memory another holder took meanwhile: the requests that wait for it, and those behind it."""

from typing import Any

from scheduler_harness import Mesh, arrival, asleep, candidate, failed, placed, refusals, rejected, scheduler, woken

from router_svc.policy.decisions import Decision, StopsWaking, Waits, Wakes
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

GIB = 1 << 30
LIMITS = SchedulerLimits()
TAKEN_AT = 0.5
STUCK_AT = TAKEN_AT + LIMITS.min_turn_seconds
SMALL = asleep("run-small", "small", host="gpu", memory_bytes=GIB)


def book(*holders: MemoryHolder) -> dict[str, HostMemory]:
    """A host of 6 GiB."""
    held = sum(holder.held_bytes for holder in holders)
    return {"gpu": HostMemory(host="gpu", total_bytes=6 * GIB, free_bytes=6 * GIB - held, holders=holders)}


def program(gib: int, **other: Any) -> MemoryHolder:
    return MemoryHolder(name="train.py", is_model=False, held_bytes=gib * GIB, **other)


def mesh_of_two() -> Mesh:
    """A large and a small model, both asleep, and no holder of memory."""
    mesh = scheduler(queue_timeout_seconds=30.0)
    mesh.show([asleep("run-large", "large", host="gpu", memory_bytes=5 * GIB), SMALL], 0.0, hosts=book())
    return mesh


def shown(mesh: Mesh, hosts: dict[str, HostMemory], now: float) -> list[Decision]:
    """The registry's book says this."""
    return mesh.apply(MeshChange(hosts=hosts), now)


def given_up(decisions: list[Decision]) -> list[str]:
    return [each.model for each in decisions if isinstance(each, StopsWaking)]


def test_load_that_lost_its_memory_to_a_program_is_cancelled_once_and_queued() -> None:
    mesh = mesh_of_two()
    assert woken(mesh.submit(arrival(1, "large"), 0.0)) == ["large"]
    assert given_up(shown(mesh, book(program(4)), TAKEN_AT)) == [], "it may be for a moment only"
    assert given_up(mesh.tick(STUCK_AT - 0.25)) == []
    assert given_up(mesh.tick(STUCK_AT)) == ["large"]
    assert given_up(mesh.tick(STUCK_AT + 0.25)) == []
    no_memory = failed("others hold it", Reason.INSUFFICIENT_MEMORY)
    assert rejected(mesh.wake_finished("large", no_memory, STUCK_AT + 0.5)) == {}
    later = [decision for quarter in range(20, 60) for decision in mesh.tick(quarter / 4)]
    assert woken(later) == [], "not while the program is there"
    told = {each.reason for each in later if isinstance(each, Waits)}
    assert told == {"VRAM: needs 5 GiB on gpu, held by train.py (a program)"}
    assert woken(shown(mesh, book(), 16.0)) == ["large"]


def test_load_started_with_unknown_size_is_cancelled_like_any_other() -> None:
    """It was begun moments after its runner came, and blocked every load that came after it."""
    mesh = scheduler(queue_timeout_seconds=30.0)
    mesh.show([asleep("run-large", "large", host="gpu"), SMALL], 0.0, hosts=book(program(4)))
    assert woken(mesh.submit(arrival(1, "large"), 0.0)) == ["large"], "the ledger decides"
    large = asleep("run-large", "large", host="gpu", memory_bytes=5 * GIB, readiness=Readiness.LOADING)
    mesh.show([large, SMALL], TAKEN_AT)
    assert woken(mesh.submit(arrival(2, "small"), 1.0)) == [], "at the ledger it would wait behind the large one"
    assert [given_up(mesh.tick(quarter / 4)) for quarter in range(5, 11)] == [[]] * 5 + [["large"]]
    no_memory = failed("others hold it", Reason.INSUFFICIENT_MEMORY)
    assert woken(mesh.wake_finished("large", no_memory, STUCK_AT + 0.25)) == ["small"]


def test_host_loss_during_a_pending_load_does_not_prevent_its_cancellation() -> None:
    mesh = mesh_of_two()
    mesh.submit(arrival(1, "large"), 0.0)
    shown(mesh, book(program(4)), TAKEN_AT)
    mesh.show([asleep("run-large", "large", readiness=Readiness.DOWN), SMALL], TAKEN_AT)
    assert given_up(mesh.tick(STUCK_AT)) == ["large"]


def test_refusal_without_memory_lists_the_holders() -> None:
    """Its refusal said that no slot came free, while a program held the memory."""
    mesh = mesh_of_two()
    shown(mesh, book(program(4)), 0.0)
    mesh.submit(arrival(1, "large"), 0.0)
    (refusal,) = [each for quarter in range(1, 200) for each in refusals(mesh.tick(quarter / 4)).values()]
    assert refusal.reason is Reason.QUEUE_TIMEOUT
    assert refusal.message == (
        "large was not loaded in 30 s; it waited for VRAM: needs 5 GiB on gpu, held by train.py (a program)"
    )


def test_load_without_demand_is_cancelled_too() -> None:
    """At the ledger it would keep programs waiting behind it for as long as a load may wait."""
    mesh = mesh_of_two()
    mesh.submit(arrival(1, "large"), 0.0)
    shown(mesh, book(program(4)), TAKEN_AT)
    mesh.finish(1, 1.0)
    assert mesh.needs_ticks
    assert [model for quarter in range(5, 20) for model in given_up(mesh.tick(quarter / 4))] == ["large"]
    mesh.wake_finished("large", failed("no", Reason.INSUFFICIENT_MEMORY), 6.0)
    assert not mesh.needs_ticks


def test_model_that_fits_is_not_delayed_by_a_load_without_memory() -> None:
    mesh = mesh_of_two()
    mesh.submit(arrival(1, "large"), 0.0)
    shown(mesh, book(program(4)), TAKEN_AT)
    assert woken(mesh.submit(arrival(2, "small"), 1.0)) == [], "at the ledger, too, it would wait behind the large one"
    mesh.tick(STUCK_AT)
    no_memory = failed("others hold it", Reason.INSUFFICIENT_MEMORY)
    assert woken(mesh.wake_finished("large", no_memory, STUCK_AT + 0.25)) == ["small"]


def test_load_with_a_lease_or_memory_being_released_is_not_cancelled() -> None:
    own = MemoryHolder(name="large", is_model=True, held_bytes=5 * GIB)
    leaving = program(4, is_leaving=True)
    for holders in ((own,), (leaving,), ()):
        mesh = mesh_of_two()
        mesh.submit(arrival(1, "large"), 0.0)
        shown(mesh, book(*holders), TAKEN_AT)
        assert [given_up(mesh.tick(quarter / 4)) for quarter in range(3, 40)] == [[]] * 37


def test_unloading_holder_is_reported_as_unloading() -> None:
    pinned = MemoryHolder(name="old", is_model=True, held_bytes=4 * GIB, pinned=True, is_leaving=True)
    for leaving in (program(4, is_leaving=True), pinned):
        mesh = mesh_of_two()
        shown(mesh, book(leaving), 0.0)
        (word,) = (each for each in mesh.submit(arrival(1, "large"), 1.0) if isinstance(each, Waits))
        assert word.reason == f"VRAM: needs 5 GiB on gpu, held by {leaving.name} (unloading)"


def test_brief_memory_shortage_cancels_no_load() -> None:
    mesh = mesh_of_two()
    mesh.submit(arrival(1, "large"), 0.0)
    for second in range(1, 20):
        decisions = shown(mesh, book(*[program(4)][: second % 2]), float(second))
        decisions += [decision for quarter in range(1, 4) for decision in mesh.tick(second + quarter / 4)]
        assert given_up(decisions) == []


LOADS_AT = 0.5
TWO_DEVICES: dict[str, Any] = {"host": "gpus", "memory_bytes": 5 * GIB, "usual_load_seconds": 4.0}


def on_two_devices(llama: Readiness) -> list[Candidate]:
    """Two models of one runner, which may use one device, and a third one on the other."""
    return [
        candidate("first", "qwen", **TWO_DEVICES),
        asleep("first", "llama", **{**TWO_DEVICES, "readiness": llama}),
        candidate("second", "gemma", **TWO_DEVICES),
    ]


def book_of_two_devices(*loaded: str) -> dict[str, HostMemory]:
    holders = tuple(MemoryHolder(name=model, is_model=True, held_bytes=5 * GIB) for model in loaded)
    return {
        "gpus": HostMemory(host="gpus", total_bytes=15 * GIB, free_bytes=(15 - 5 * len(loaded)) * GIB, holders=holders)
    }


def stuck_on_its_device(**limits: Any) -> Mesh:
    """A load that fits by the book is under way since 0.0, and its runner waits for memory."""
    mesh = scheduler(queue_timeout_seconds=100.0, max_cold_wait_seconds=20.0, **limits)
    mesh.show(on_two_devices(Readiness.ASLEEP), 0.0, hosts=book_of_two_devices("qwen", "gemma"))
    mesh.submit(arrival(1, "qwen"), 0.0)
    mesh.submit(arrival(2, "gemma"), 0.0)
    assert woken(mesh.submit(arrival(3, "llama"), 0.0)) == ["llama"]
    mesh.show(on_two_devices(Readiness.LOADING), LOADS_AT)
    return mesh


def test_load_without_memory_despite_a_fitting_ledger_evicts_models_of_its_runner() -> None:
    """Its runner may use one device of two. A model that was never idle there kept it waiting for minutes."""
    mesh = stuck_on_its_device()
    ends = [quarter / 4 for quarter in range(3, 40) if given_up(mesh.tick(quarter / 4))]
    assert ends == [LOADS_AT + LIMITS.lease_patience_seconds]
    no_memory = failed("waited too long", Reason.INSUFFICIENT_MEMORY)
    mesh.wake_finished("llama", no_memory, 10.0)
    mesh.show(on_two_devices(Readiness.ASLEEP), 10.0)
    again = [decision for quarter in range(41, 100) for decision in mesh.tick(quarter / 4)]
    assert woken(again) == [], "qwen is in use"
    assert placed(mesh.submit(arrival(4, "gemma", arrived_at=25.0), 25.0)) == {}, "it has one slot"
    assert placed(mesh.finish(2, 25.0)) == {4: "second"}, "who is not on its device goes on"
    assert placed(mesh.submit(arrival(5, "qwen", arrived_at=25.0), 25.0)) == {}
    (wakes,) = (each for each in mesh.finish(1, 26.0) if isinstance(each, Wakes))
    assert (wakes.model, wakes.priority) == ("llama", Priority.SYSTEM)


def test_ledger_is_trusted_if_the_runner_reports_nothing_about_the_load() -> None:
    """The registry may be away: then no lease is granted, and no model is held for that."""
    mesh = stuck_on_its_device()
    mesh.show(on_two_devices(Readiness.ASLEEP), 0.6)
    assert [given_up(mesh.tick(quarter / 4)) for quarter in range(3, 80)] == [[]] * 77


def test_ledger_is_trusted_again_after_the_doubt_period() -> None:
    mesh = stuck_on_its_device(book_doubt_seconds=30.0)
    assert any(given_up(mesh.tick(quarter / 4)) for quarter in range(3, 40))
    mesh.wake_finished("llama", failed("no", Reason.INSUFFICIENT_MEMORY), 10.0)
    mesh.show(on_two_devices(Readiness.ASLEEP), 10.0)
    begun_at = next(quarter / 4 for quarter in range(41, 400) if woken(mesh.tick(quarter / 4)))
    assert begun_at == LOADS_AT + LIMITS.lease_patience_seconds + 30.0

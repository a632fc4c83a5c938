"""Models that share a host in turns, step by step."""

import itertools
from typing import Any

import pytest
from load_harness import STEP_SECONDS, LoadWorld, ModelSpec
from scheduler_harness import Mesh, arrival, asleep, candidate, placed, rejected, scheduler, woken

from router_svc.policy.decisions import Decision, Served, Waits, Wakes
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder
from weft.kernel.requests.request_values import Priority


def test_cold_request_is_served_within_the_bound_under_constant_load_on_another_model() -> None:
    world = LoadWorld([ModelSpec(name="busy", slots=2), ModelSpec(name="cold", load_seconds=3.0)], {"host-a": 6.0})
    world.make_ready("busy")
    for step in range(int(80 / STEP_SECONDS)):
        for _ in range(2):
            world.arrive("busy", tenant="many", priority=Priority.HIGH)
        if step == 40:
            world.arrive("cold", tenant="one", priority=Priority.LOW)
        world.step()
    (begun,) = world.models["cold"].begun_at
    longest = world.limits.max_cold_wait_seconds + world.models["busy"].spec.service_seconds
    assert 0 < begun - 40 * STEP_SECONDS <= longest + 2 * STEP_SECONDS
    assert any("held by busy until idle" in word for word in world.words["cold"])
    assert world.models["busy"].ready_since is not None, "the busy model came back"


def test_idle_model_is_evicted_immediately() -> None:
    world = LoadWorld([ModelSpec(name="idle"), ModelSpec(name="wanted")], {"host-a": 6.0})
    world.make_ready("idle")
    world.run(5)
    world.arrive("wanted")
    world.step()
    assert world.models["wanted"].begun_at == [world.now - STEP_SECONDS]
    assert world.models["idle"].ready_since is None


def test_recently_used_model_is_kept_briefly() -> None:
    world = LoadWorld([ModelSpec(name="used", service_seconds=0.5), ModelSpec(name="wanted")], {"host-a": 6.0})
    world.make_ready("used")
    world.arrive("used")
    world.run(0.75)
    asked_at = world.now
    world.arrive("wanted")
    world.run(3)
    (begun,) = world.models["wanted"].begun_at
    assert 0 < begun - asked_at <= world.limits.min_turn_seconds


def test_pinned_model_keeps_its_memory_and_the_status_reports_it() -> None:
    world = LoadWorld([ModelSpec(name="qwen", pinned=True), ModelSpec(name="llama", gib=5.125)], {"host-a": 8.0})
    world.make_ready("qwen")
    world.arrive("llama")
    world.run(60)
    assert world.models["llama"].begun_at == []
    assert world.words["llama"] == ["VRAM: needs 5.1 GiB on host-a, held by qwen (pinned)"]


def test_program_keeps_its_memory_and_the_load_starts_when_it_ends() -> None:
    world = LoadWorld([ModelSpec(name="llama", gib=5.125)], {"host-a": 8.0}, programs={"train.py": 6.0})
    world.arrive("llama")
    world.run(60)
    assert world.models["llama"].begun_at == []
    assert world.words["llama"] == ["VRAM: needs 5.1 GiB on host-a, held by train.py (a program)"]
    world.programs.clear()
    world.step()
    assert world.models["llama"].begun_at == [world.now - STEP_SECONDS]


def test_two_models_that_fit_are_loaded_side_by_side_without_holds() -> None:
    world = LoadWorld([ModelSpec(name="a"), ModelSpec(name="b")], {"host-a": 8.0})
    world.arrive("a")
    world.arrive("b")
    world.step()
    assert [world.models[name].begun_at for name in ("a", "b")] == [[0.0], [0.0]]
    assert not world.plan.hold
    world.run(20)
    assert world.swaps == 0


def test_model_that_fits_is_not_delayed_by_one_that_does_not() -> None:
    specs = [ModelSpec(name="busy", gib=5.0, slots=4), ModelSpec(name="large", gib=6.0), ModelSpec(name="small", gib=2)]
    world = LoadWorld(specs, {"host-a": 8.0})
    world.make_ready("busy")
    for _ in range(40):
        world.arrive("busy", priority=Priority.HIGH)
    world.arrive("large")
    world.run(1)
    world.arrive("small")
    world.step()
    assert world.models["small"].begun_at == [world.now - STEP_SECONDS]
    assert world.models["large"].begun_at == []


def test_hold_is_lifted_when_no_request_waits_for_the_other_model() -> None:
    specs = [ModelSpec(name="busy", service_seconds=30.0, slots=2), ModelSpec(name="cold")]
    world = LoadWorld(specs, {"host-a": 6.0})
    world.make_ready("busy")
    world.arrive("busy")
    world.step()
    world.arrive("cold")
    world.run(25)
    assert world.models["busy"].held
    world.models["cold"].queue.clear()
    world.step()
    assert not world.plan.hold
    world.arrive("busy")
    world.step()
    assert len(world.models["busy"].running) == 2


def test_loaded_model_has_its_turn_before_it_is_evicted() -> None:
    specs = [ModelSpec(name="a", load_seconds=3.0, slots=2), ModelSpec(name="b", load_seconds=3.0, slots=2)]
    world = LoadWorld(specs, {"host-a": 6.0})
    for _ in range(int(120 / STEP_SECONDS)):
        world.arrive("a", tenant="a")
        world.arrive("b", tenant="b")
        world.step()
    starts = sorted(world.models["a"].begun_at + world.models["b"].begun_at)
    turn = world.limits.swap_quantum_ratio * 3.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts[1:])]
    assert len(starts) >= 6
    assert min(gaps) >= 3.0 + turn


def test_less_served_tenant_gets_its_model_before_the_queue_is_worth_a_load() -> None:
    """Fairness begins the swap: one short request against the long queue of a tenant that was served far more."""
    begun = {}
    for had in (0.0, 100_000.0):
        world = LoadWorld(
            [ModelSpec(name="a", slots=2, load_seconds=8.0), ModelSpec(name="b", load_seconds=8.0)], {"host-a": 6.0}
        )
        world.make_ready("a")
        world.models["a"].ready_since = -100.0
        world.accounts["greedy"] = had
        for _ in range(200):
            world.arrive("a", tenant="greedy")
        world.arrive("b", tenant="modest")
        world.run(40)
        begun[had] = world.models["b"].begun_at[0]
    assert begun[100_000.0] <= 1.0 + 2 * STEP_SECONDS
    assert begun[0.0] >= 15.0


def test_of_two_models_that_do_not_both_fit_that_of_the_less_served_tenant_is_loaded_first() -> None:
    world = LoadWorld([ModelSpec(name="a"), ModelSpec(name="b")], {"host-a": 6.0})
    world.accounts["greedy"] = 1_000.0
    world.arrive("a", tenant="greedy")
    world.arrive("b", tenant="modest")
    world.step()
    assert [world.models[name].begun_at for name in ("a", "b")] == [[], [0.0]]


def test_low_priority_model_is_evicted_for_a_high_one_only_after_its_minimum_turn() -> None:
    specs = [ModelSpec(name="a", load_seconds=8.0, slots=2), ModelSpec(name="b", load_seconds=8.0)]
    world = LoadWorld(specs, {"host-a": 6.0})
    for _ in range(100):
        world.arrive("a", priority=Priority.LOW)
    world.run(8.25)
    for _ in range(10):
        world.arrive("b", priority=Priority.HIGH)
    world.run(12)
    (begun,) = world.models["b"].begun_at
    assert begun - 8.0 < world.limits.swap_quantum_ratio * 8.0


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


def test_bug_class_ordered_the_loads_of_new_tenants_with_equal_accounts() -> None:
    mesh = host_with("qwen")
    mesh.show(members(), 0.0, hosts=memory("a program"))
    mesh.submit(arrival(1, "llama", tenant="first", priority=Priority.LOW), 1.0)
    mesh.submit(arrival(2, "qwen", tenant="second", priority=Priority.HIGH), 2.0)
    assert woken(mesh.show(members(), 3.0, hosts=memory())) == ["llama"]


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

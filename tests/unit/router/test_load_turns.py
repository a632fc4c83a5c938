"""Models that share a host in turns, step by step."""

import itertools
import random

import pytest
from load_harness import STEP_SECONDS, LoadWorld, ModelSpec

from weft.kernel.request import Priority


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


@pytest.mark.parametrize("seconds", [150, pytest.param(600, marks=pytest.mark.nightly("statistics of the simulator"))])
def test_three_tenants_with_ten_to_one_to_one_load_get_equal_shares_with_few_swaps(seconds: int) -> None:
    world = LoadWorld([ModelSpec(name=name, slots=4) for name in ("a", "b", "c")], {"host-a": 6.0})
    chance = random.Random(1)
    order = chance.choices(("a", "b", "c"), weights=(10, 1, 1), k=int(5 * seconds / STEP_SECONDS))
    for step in range(int(seconds / STEP_SECONDS)):
        # Five times what one model serves: b and c want more than a third each, too.
        for model in order[step * 5 : step * 5 + 5]:
            world.arrive(model, tenant=model)
        world.step()
    shares = [sum(cost for tenant, cost in world.served if tenant == name) for name in ("a", "b", "c")]
    fifo_swaps = sum(earlier != later for earlier, later in itertools.pairwise(order))
    assert jain(shares) >= 0.9, shares
    assert world.swaps / len(world.served) <= fifo_swaps / len(order) / 2


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

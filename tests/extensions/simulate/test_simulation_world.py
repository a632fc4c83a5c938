"""The parts of the simulator: amounts, arrivals, hosts and their memory, fairness."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev
from typing import Any

import pytest
from kit.random_scenario import check_scenario, real_scheduler

from router_svc.policy.decisions import WakeFailure
from router_svc.policy.pool_settings import RemotePermission, Settings, TenantSettings
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.event_queue import EventQueue
from weft_extensions.simulate.figures import jain_index, max_min_shares
from weft_extensions.simulate.hosts import Instance, Phase, World
from weft_extensions.simulate.runners import Loader
from weft_extensions.simulate.scenario import (
    Amount,
    Delays,
    Failure,
    FailureMode,
    HostGroup,
    ModelKind,
    Pattern,
    Rate,
    Scenario,
    Tenant,
    TracedRequest,
    Traffic,
    seeded_random,
)
from weft_extensions.simulate.traffic import requests_of


def scenario(**changes: Any) -> Scenario:
    fields: dict[str, Any] = {
        "name": "small",
        "hosts": (HostGroup(name="h", memory_gib=10),),
        "models": (
            ModelKind(name="a", memory_gib=6, load_seconds=Amount(mean=3.0)),
            ModelKind(name="b", memory_gib=5, load_seconds=Amount(mean=2.0)),
            ModelKind(name="c", memory_gib=4, load_seconds=Amount(mean=1.0)),
        ),
        "tenants": (Tenant(name="t"),),
        "traffic": (Traffic(tenant="t", target="a", rate=Rate(per_second=1.0)),),
        "duration_seconds": 100.0,
        **changes,
    }
    return Scenario(**fields)


class Loads:
    """A loader and its world, stepped by hand."""

    def __init__(self, made: Scenario) -> None:
        self.events = EventQueue()
        self.world = World(made)
        self.changes: list[tuple[str, Phase]] = []
        self.loader = Loader(self.events, made.delays, made.seed, self.changed)

    def changed(self, instance: Instance) -> None:
        self.changes.append((instance.name, instance.phase))

    def wake(self, name: str, priority: Priority = Priority.NORMAL) -> WakeFailure | None:
        return self.loader.wake(self.world.instances[name], priority)

    def run(self) -> float:
        while self.events.next_at is not None:
            self.events.step()
        return self.events.now

    def phases(self) -> dict[str, Phase]:
        return {instance.name: instance.phase for instance in self.world}


def arrivals(rate: Rate, seconds: float = 10_000.0) -> list[float]:
    traffic = (Traffic(tenant="t", target="a", rate=rate),)
    return [each.arrival.arrived_at for each in requests_of(scenario(traffic=traffic, duration_seconds=seconds))]


def test_amounts_have_their_mean_and_variation_within_bounds() -> None:
    random = Random(1)
    drawn = [Amount(mean=200.0, variation=0.5).draw(random) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(200.0, rel=0.02)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(0.5, rel=0.05)
    clipped = [Amount(mean=200.0, variation=2.0, min=50.0, max=300.0).draw(random) for _ in range(1000)]
    assert (min(clipped), max(clipped)) == (50.0, 300.0)
    assert Amount(mean=7.0).draw(random) == 7.0


def test_draws_for_one_purpose_do_not_change_draws_for_another() -> None:
    first, other = seeded_random(1, "loads"), seeded_random(1, "times")
    values = [first.random() for _ in range(3)]
    other.random()
    again = seeded_random(1, "loads")
    assert [again.random() for _ in range(3)] == values
    assert seeded_random(2, "loads").random() != values[0]


@pytest.mark.parametrize("pattern", Pattern)
def test_arrivals_keep_their_mean_rate(pattern: Pattern) -> None:
    times = arrivals(Rate(per_second=2.0, pattern=pattern, factor=1.9, period_seconds=100.0, high_seconds=10.0))
    mean = 2.0 * (1.09 if pattern is Pattern.BURST else 1.0)
    assert len(times) / 10_000.0 == pytest.approx(mean, rel=0.05)
    assert times == sorted(times)


def test_bursts_occur_at_the_start_of_their_period() -> None:
    times = arrivals(
        Rate(per_second=1.0, pattern=Pattern.BURST, factor=10.0, period_seconds=100.0, high_seconds=10.0), 3000.0
    )
    high = sum(at % 100.0 < 10.0 for at in times) / 300.0
    low = sum(at % 100.0 >= 10.0 for at in times) / 2700.0
    assert high == pytest.approx(10.0, rel=0.1)
    assert low == pytest.approx(1.0, rel=0.1)


def test_constant_arrivals_are_evenly_spaced() -> None:
    gaps = {
        round(later - earlier, 6)
        for earlier, later in pairwise(arrivals(Rate(per_second=4.0, pattern=Pattern.CONSTANT), 10.0))
    }
    assert gaps == {0.25}


def test_arrivals_of_several_streams_are_merged_and_numbered_from_one() -> None:
    streams = tuple(Traffic(tenant="t", target=name, rate=Rate(per_second=3.0)) for name in ("a", "b"))
    requests = list(requests_of(scenario(traffic=streams, max_requests=50)))
    assert [each.arrival.key for each in requests] == list(range(1, 51))
    assert [each.arrival.arrived_at for each in requests] == sorted(each.arrival.arrived_at for each in requests)
    assert {each.arrival.spec.model for each in requests} == {"a", "b"}


@pytest.mark.parametrize(
    ("permission", "asked", "allowed"),
    [
        (RemotePermission.NEVER, True, False),
        (RemotePermission.ON_REQUEST, False, False),
        (RemotePermission.ON_REQUEST, True, True),
        (RemotePermission.ALWAYS, False, True),
    ],
)
def test_remote_models_are_allowed_only_by_both_request_and_tenant(
    permission: RemotePermission, asked: bool, allowed: bool
) -> None:
    settings = Settings(tenants={"t": TenantSettings(allow_remote=permission)})
    traffic = Traffic(tenant="t", target="a", rate=Rate(per_second=1.0), allow_remote=asked)
    (first, *_) = requests_of(scenario(settings=settings, traffic=(traffic,)))
    assert first.arrival.needs.allow_remote is allowed


def test_idle_model_is_evicted_and_the_load_starts_when_its_memory_is_free() -> None:
    loads = Loads(scenario())
    assert loads.wake("a") is None
    assert loads.run() == 3.0
    assert loads.wake("b") is None
    assert loads.run() == 3.0 + Delays().unload_seconds + 2.0
    assert loads.phases() == {"a": Phase.ASLEEP, "b": Phase.READY, "c": Phase.ASLEEP}
    assert (loads.loader.loads, loads.loader.swaps) == (2, 1)


def test_model_that_fits_evicts_no_other() -> None:
    loads = Loads(scenario())
    loads.wake("a")
    loads.wake("c")
    loads.run()
    assert loads.phases() == {"a": Phase.READY, "b": Phase.ASLEEP, "c": Phase.READY}
    assert loads.loader.swaps == 0


@pytest.mark.parametrize("why", ["works", "pinned", "of a higher band"])
def test_pinned_or_busy_models_are_not_evicted(why: str) -> None:
    models = scenario().models
    loads = Loads(scenario(models=(replace(models[0], pinned=why == "pinned"), *models[1:])))
    loads.wake("a")
    loads.run()
    resident = loads.world.instances["a"]
    resident.active = int(why == "works")
    resident.last_band = Priority.HIGH if why == "of a higher band" else Priority.LOW
    failure = loads.wake("b", Priority.NORMAL)
    assert failure is not None
    assert failure.reason is Reason.INSUFFICIENT_MEMORY
    assert loads.phases()["a"] is Phase.READY


def test_host_time_accounting_is_complete() -> None:
    made = scenario(failures=(Failure(mode=FailureMode.DIES, at_seconds=30.0, for_seconds=20.0),))
    simulation = check_scenario(made)
    host = simulation.world.hosts["h"]
    host.note(simulation.events.now)
    assert host.down_seconds == 20.0
    assert host.busy_seconds > host.load_seconds > 0
    assert host.busy_seconds + host.load_seconds + host.down_seconds <= simulation.events.now


def test_conversation_returning_to_its_model_has_a_cached_prompt() -> None:
    stream = Traffic(tenant="t", target="a", rate=Rate(per_second=0.2), sessions=2, session_cached_share=0.75)
    alone = replace(stream, sessions=0)
    longer = [scenario(traffic=(each,), duration_seconds=1000.0) for each in (stream, alone)]
    cached, fresh = (check_scenario(each).metrics.total() for each in longer)
    assert cached.served_cost < 0.9 * cached.offered_cost
    assert fresh.served_cost > 0.9 * fresh.offered_cost


def traced(*requests: tuple[float, int, tuple[int, ...]], **changes: Any) -> Scenario:
    trace = tuple(
        TracedRequest(at_seconds=at, prompt_tokens=tokens, output_tokens=1, blocks=blocks)
        for at, tokens, blocks in requests
    )
    fields = {"prefill_tokens_per_second": 512.0, "cache_tokens": 3 * 512, "loaded": True, **changes}
    traffic = Traffic(tenant="t", target="a", recorded=trace)
    return scenario(
        models=(ModelKind(name="a", **fields),),
        traffic=(traffic,),
        settings=Settings(tenants={"t": TenantSettings(allow_remote=RemotePermission.ALWAYS)}),
    )


@pytest.mark.parametrize("cache_tokens", [0, 3 * 512])
def test_engine_processes_one_prompt_after_the_other(cache_tokens: int) -> None:
    run = check_scenario(traced((1.0, 1024, (1, 2)), (1.5, 512, (3,)), cache_tokens=cache_tokens))
    total = run.metrics.total()
    assert list(total.first_tokens) == [2.0, 2.5]


def test_remote_model_processes_prompts_side_by_side() -> None:
    run = check_scenario(traced((1.0, 1024, (1, 2)), (1.5, 512, (3,)), remote=True, loaded=False))
    assert list(run.metrics.total().first_tokens) == [1.0, 2.0]


def test_engine_gets_its_next_prompt_at_the_moment_when_its_line_is_short() -> None:
    earlier = [(20.0 * number, 4096, tuple(range(8 * number, 8 * number + 8))) for number in range(20)]
    known = tuple(range(152, 160))
    made = traced(*earlier, (400.0, 5120, (*known, 1, 2)), (400.1, 4608, (*known, 3)), cache_tokens=512_000)
    made = replace(made, hosts=(HostGroup(name="h", count=2),), duration_seconds=500.0)
    simulation = Simulation(made, real_scheduler(made), explained=(22,))
    simulation.run()
    (placed_at,) = (at for at, text in simulation.decision_log.lines[22] if text.startswith("attempt"))
    assert 401.6 < placed_at < 401.85, "between two ticks, about 0.2 s before the prompt ahead ends"


def test_traced_prompts_share_full_blocks_until_the_cache_evicts_them() -> None:
    run = check_scenario(
        traced((1.0, 1100, (1, 2, 3)), (20.0, 1536, (1, 2, 4)), (40.0, 512, (5,)), (60.0, 1024, (1, 2)))
    )
    total = run.metrics.total()
    assert list(total.first_tokens) == pytest.approx([1100 / 512, 1.0, 1.0, 0.0])
    assert total.cached_tokens == 4 * 512


def test_prompts_of_a_trace_have_common_digests_as_far_as_they_have_common_blocks() -> None:
    made = traced((1.0, 2000, (1, 2, 3, 4)), (2.0, 2000, (1, 2, 5, 6)))
    one, other = (each.arrival.spec.prefix_digests for each in requests_of(made))
    assert len(one) == len(other) == 7
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 4 + [False] * 3


def test_more_load_shortens_the_time_between_traced_requests() -> None:
    made = traced((10.0, 512, (1,)), (20.0, 512, (2,))).at_load(2.0)
    assert [each.arrival.arrived_at for each in requests_of(made)] == [5.0, 10.0]


@pytest.mark.parametrize(
    ("shares", "index"), [((1.0, 1.0, 1.0), 1.0), ((1.0, 0.0), 0.5), ((4.0, 1.0, 1.0), 36 / 54), ((), 1.0)]
)
def test_jains_index_is_computed(shares: tuple[float, ...], index: float) -> None:
    assert jain_index(shares) == pytest.approx(index)


def test_max_min_shares_are_capped_at_the_offered_load_and_weighted() -> None:
    offered = {"little": 10.0, "much": 1000.0, "heavy": 1000.0}
    weights = {"little": 1.0, "much": 1.0, "heavy": 3.0}
    assert max_min_shares(offered, weights, 210.0) == {"little": 10.0, "much": 50.0, "heavy": 150.0}
    assert max_min_shares(offered, weights, 5000.0) == offered

"""What holds for loads whatever hosts, models and demand there are; the harness checks most of it at every step."""

from dataclasses import dataclass
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_harness import STEP_SECONDS, LoadWorld, ModelSpec

from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import Demand, LoadPlan, Resident
from weft.kernel.requests.request_values import Priority

LONG = pytest.mark.slow("simulates histories of two minutes in small steps")
HOST_GIB = 10.0
Value = TypeVar("Value")
BANDS = [Priority.HIGH, Priority.NORMAL, Priority.LOW]


@dataclass(frozen=True)
class Scenario:
    specs: list[ModelSpec]
    rates: list[float]
    """Seconds between two arrivals for each model."""
    priorities: list[Priority]
    stops: list[float]
    """When each model's arrivals stop."""
    book_steps: int
    loads_are_known: bool
    max_cold_wait_seconds: float

    def world(self) -> LoadWorld:
        hosts = sorted({spec.host for spec in self.specs})
        return LoadWorld(
            self.specs,
            dict.fromkeys(hosts, HOST_GIB),
            limits=SchedulerLimits(max_cold_wait_seconds=self.max_cold_wait_seconds),
            book_steps=self.book_steps,
            loads_are_known=self.loads_are_known,
        )

    def arrive(self, world: LoadWorld) -> None:
        for number, spec in enumerate(self.specs):
            count = world.now / self.rates[number]
            is_time = int(count) != int((world.now - STEP_SECONDS) / self.rates[number]) or world.now == 0
            if is_time and world.now < self.stops[number]:
                world.arrive(spec.name, tenant=f"tenant-{number % 3}", priority=self.priorities[number])


def some_specs(count: int, *, pinned: bool) -> st.SearchStrategy[list[ModelSpec]]:
    def spec(number: int) -> st.SearchStrategy[ModelSpec]:
        return st.builds(
            ModelSpec,
            name=st.just(f"m{number}"),
            host=st.sampled_from(["host-a", "host-a", "host-b"]),
            gib=st.sampled_from([2.0, 3.0, 4.0, 6.0, 9.0]),
            load_seconds=st.sampled_from([0.5, 2.0, 6.0]),
            service_seconds=st.sampled_from([0.25, 1.0, 4.0]),
            slots=st.integers(1, 4),
            pinned=st.booleans() if pinned else st.just(False),
        )

    return st.tuples(*(spec(number) for number in range(count))).map(list)


def _some(values: list[Value], count: int) -> st.SearchStrategy[list[Value]]:
    return st.lists(st.sampled_from(values), min_size=count, max_size=count)


@st.composite
def scenarios(draw: st.DrawFn, *, pinned: bool = False) -> Scenario:
    count = draw(st.integers(2, 5))
    return Scenario(
        specs=draw(some_specs(count, pinned=pinned)),
        rates=draw(_some([0.25, 0.5, 1.0, 3.0, 10.0, 40.0], count)),
        priorities=draw(_some(BANDS, count)),
        stops=draw(_some([5.0, 40.0, 90.0], count)),
        book_steps=draw(st.sampled_from([1, 2, 4])),
        loads_are_known=draw(st.booleans()),
        max_cold_wait_seconds=draw(st.sampled_from([5.0, 20.0])),
    )


class ColdWatch:
    """Checks that each cold queue waits no longer than the bound."""

    def __init__(self, world: LoadWorld) -> None:
        self._world = world
        self.longest = 0.0

    def look(self) -> None:
        world = self._world
        for state in world.models.values():
            if not state.queue or state.holds_memory:
                continue
            since = max(state.queue.oldest_arrived_at(), state.unloaded_at)
            waited = world.now - since
            self.longest = max(self.longest, waited)
            bound = self._bound(state.spec)
            assert waited <= bound, f"{state.spec.name} waits cold for {waited} s, its bound is {bound} s"

    def _bound(self, spec: ModelSpec) -> float:
        """The bound, and one turn of each other model of its host: the end of what runs, a load, the turn itself."""
        world, limits = self._world, self._world.limits
        slack = 4 * STEP_SECONDS
        others = [each.spec for each in world.models.values() if each.spec.host == spec.host and each.spec != spec]
        turns = sum(
            other.service_seconds
            + other.load_seconds
            + world.planner._costs.turn_seconds(world.candidate_of(other))
            + slack
            for other in others
        )
        return limits.max_cold_wait_seconds + turns + slack


@LONG
@given(scenario=scenarios())
def test_cold_wait_is_bounded_by_the_limit_plus_one_turn_per_other_queue(scenario: Scenario) -> None:
    world = scenario.world()
    watch = ColdWatch(world)
    while world.now < 120:
        scenario.arrive(world)
        world.step()
        watch.look()


@LONG
@given(scenario=scenarios(pinned=True))
def test_loads_fit_pinned_models_stay_and_holds_end_with_their_purpose(scenario: Scenario) -> None:
    world = scenario.world()
    for state in world.models.values():
        free = world.totals[state.spec.host] - sum(
            int(each.spec.gib * 1024**3)
            for each in world.models.values()
            if each.spec.host == state.spec.host and each.holds_memory
        )
        if state.spec.pinned and state.spec.gib * 1024**3 <= free:
            world.make_ready(state.spec.name)
    pinned = [state for state in world.models.values() if state.spec.pinned and state.holds_memory]
    while world.now < 100:
        scenario.arrive(world)
        world.step()
        assert all(state.ready_since is not None and not state.held for state in pinned)
    for state in world.models.values():
        state.queue.clear()
    world.run(15)
    assert not world.plan.hold
    assert not world.plan.gates


@LONG
@given(scenario=scenarios())
def test_wanted_model_is_not_held_before_its_minimum_turn_ends(scenario: Scenario) -> None:
    world = scenario.world()
    was_held: set[str] = set()
    while world.now < 90:
        scenario.arrive(world)
        world.step()
        for name, state in world.models.items():
            wanted = bool(state.running or state.queue)
            if state.held and name not in was_held and wanted and state.ready_since is not None:
                # One that was idle when it was chosen, and got a request since, is held already.
                assert world.now - STEP_SECONDS - state.ready_since >= world.limits.min_turn_seconds
        was_held = {name for name, state in world.models.items() if state.held}


@LONG
@given(scenario=scenarios())
def test_everything_is_served_when_arrivals_stop(scenario: Scenario) -> None:
    world = scenario.world()
    while world.now < 20:
        scenario.arrive(world)
        world.step()
    ends_at = world.now + 3_000
    while any(state.queue or state.running for state in world.models.values()):
        world.step()
        assert world.now < ends_at, {name: len(state.queue) for name, state in world.models.items()}


class _LetsNobodyIn:
    """A planner that never evicts: the check of the bound must find it."""

    def __init__(self, world: LoadWorld) -> None:
        self._planner = world.planner

    def review(self, demands: list[Demand], residents: dict[str, list[Resident]], *others: object) -> LoadPlan:
        if any(residents.values()):
            return LoadPlan()
        return self._planner.review(demands, residents, *others)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._planner, name)


def test_bound_check_detects_a_planner_that_never_evicts() -> None:
    world = LoadWorld([ModelSpec(name="a"), ModelSpec(name="b")], {"host-a": 6.0})
    world.planner = _LetsNobodyIn(world)  # type: ignore[assignment]
    world.make_ready("a")
    with pytest.raises(AssertionError, match="b waits cold"):
        watch_two(world)


def watch_two(world: LoadWorld) -> None:
    watch = ColdWatch(world)
    while world.now < 120:
        world.arrive("a")
        world.arrive("b")
        world.step()
        watch.look()

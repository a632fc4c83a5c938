"""Image and text models that share one GPU, in virtual time: even shares of its time, and few swaps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.random_scenario import real_scheduler

from router_svc.policy.port import SchedulerPort
from router_svc.policy.scheduler import Scheduler
from weft.kernel.errors.error_tree import FieldError
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.fifo_baseline import FifoScheduler
from weft_extensions.simulate.figures import Figures, figures_of
from weft_extensions.simulate.invariants import InvariantChecker
from weft_extensions.simulate.scenario import Scenario
from weft_extensions.simulate.scenario_file import load_scenario, parse_scenario
from weft_extensions.simulate.traffic import requests_of

SHARED = Path(__file__).parents[3] / "examples" / "scenarios" / "pictures-and-chat.yaml"


STATISTICS = pytest.mark.nightly("statistics of the simulator")
SHORT_SECONDS, LONG_SECONDS = 120.0, 1_800.0


def scenario(seconds: float) -> Scenario:
    return replace(load_scenario(SHARED), duration_seconds=seconds)


def run(
    seconds: float, make: Callable[[Scenario], SchedulerPort] = real_scheduler, *, is_checked: bool = False
) -> Figures:
    given = scenario(seconds)
    simulation = Simulation(given, make(given), checker=InvariantChecker(given) if is_checked else None)
    simulation.run()
    return figures_of(simulation)


def shares(figures: Figures) -> dict[str, float]:
    return {each.name: each.served_share or 0.0 for each in figures.tenants}


def fifo(given: Scenario) -> SchedulerPort:
    return FifoScheduler(given)


def images_are_free(given: Scenario) -> SchedulerPort:
    """The planted bug: the time of images is not charged, as if they were answers without tokens."""
    scheduler = Scheduler(given.limits, given.settings)
    scheduler._estimates.tokens_per_device_second = lambda *_: 0.001  # type: ignore[method-assign]
    scheduler._estimates.media_cost = lambda *_: 0.0  # type: ignore[method-assign]
    return scheduler


def images_cost_what_an_answer_on_a_laptop_does(given: Scenario) -> SchedulerPort:
    """The planted bug: a second of the device is charged at a fixed rate, whatever it is worth in tokens there."""
    scheduler = Scheduler(given.limits, given.settings)
    scheduler._estimates.note_exchange = lambda *_: None  # type: ignore[method-assign]
    return scheduler


@pytest.mark.parametrize(
    ("seconds", "fairness", "share", "fewest_served"),
    [(SHORT_SECONDS, 0.9, 0.0, 10), pytest.param(LONG_SECONDS, 0.95, 0.75, 50, marks=STATISTICS)],
)
def test_image_and_chat_tenants_get_even_shares_of_one_gpu_with_few_swaps(
    seconds: float, fairness: float, share: float, fewest_served: int
) -> None:
    ours, control = run(seconds, is_checked=True), run(seconds, fifo)
    assert ours.fairness >= fairness
    assert all(share <= each < 1.3 for each in shares(ours).values()), shares(ours)
    assert ours.swaps_per_1000 <= control.swaps_per_1000 / 2
    assert ours.total.served > control.total.served
    assert ours.cold_waits is not None
    assert ours.cold_waits.longest <= ours.cold_wait_bound_seconds
    assert {each.name for each in ours.targets if each.served > fewest_served} == {"qwen", "sdxl"}, "none starves"


@pytest.mark.parametrize("seconds", [SHORT_SECONDS, pytest.param(LONG_SECONDS, marks=STATISTICS)])
@pytest.mark.parametrize("planted", [images_are_free, images_cost_what_an_answer_on_a_laptop_does])
def test_uneven_shares_are_detected_if_images_are_charged_wrongly(
    planted: Callable[[Scenario], SchedulerPort], seconds: float
) -> None:
    """The control."""
    assert run(seconds, planted).fairness < 0.9


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "hosts": [{"name": "gpu"}],
        "models": [{"name": "sdxl", "operation": "image", "work_per_second": 5}],
        "tenants": [{"name": "t"}],
        "arrivals": [{"tenant": "t", "target": "sdxl", "rate": 1.0, "work": 20}],
        **changes,
    }


def test_requests_for_an_image_model_have_work() -> None:
    with pytest.raises(FieldError, match=r"arrivals.0.work: is required, sdxl does image"):
        parse_scenario(document(arrivals=[{"tenant": "t", "target": "sdxl", "rate": 1.0}]), "x")


def test_requests_for_a_language_model_have_tokens() -> None:
    with pytest.raises(FieldError, match=r"arrivals.0.work: sdxl answers with tokens"):
        parse_scenario(document(models=[{"name": "sdxl"}]), "x")


def test_image_duration_follows_its_work_and_the_model_speed() -> None:
    given = parse_scenario(document(), "x")
    kind = given.kind_of("sdxl")
    assert kind is not None
    assert (kind.prefill_seconds(1_000.0), kind.answer_seconds(50.0, 20.0)) == (0.0, 4.0)


def test_estimates_learn_the_speed_of_a_media_model_during_a_run() -> None:
    given = scenario(SHORT_SECONDS)
    scheduler = Scheduler(given.limits, given.settings)
    simulation = Simulation(given, scheduler)
    simulation.run()
    estimates = scheduler._estimates
    instance = next(each for each in simulation.world.instances.values() if each.kind.name == "sdxl")
    request = next(each.arrival for each in requests_of(given) if each.arrival.spec.work)
    request.spec = replace(request.spec, work=16.0)
    assert estimates.service_seconds(instance.candidate(), request) == pytest.approx(2.0, rel=0.05)

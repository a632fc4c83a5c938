"""What loads and requests take, learned from those that are over."""

from random import Random

import pytest
from load_harness import candidate
from scheduler_harness import arrival

from router_svc.policy.decisions import Served
from router_svc.policy.estimates import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_TOKENS_PER_SECOND,
    MAX_EVICTION_SECONDS,
    MAX_MEASURED_SECONDS,
    Averages,
    Estimates,
    estimate_error,
    wait_seconds,
)

MODEL = candidate("qwen")
ARRIVAL = arrival(1, "qwen", tenant="acme")


def answer(tokens: int) -> Served:
    return Served(prompt_tokens=10, cached_tokens=0, output_tokens=tokens)


def test_unmeasured_values_have_no_estimate() -> None:
    estimates = Estimates()
    assert estimates.load_seconds(MODEL) is None
    assert estimates.service_seconds(MODEL, ARRIVAL) is None
    assert estimates.mean_service_seconds(MODEL) is None
    assert estimates.tokens_per_second(MODEL) == DEFAULT_TOKENS_PER_SECOND
    assert estimates.output_tokens("qwen", "acme", None) == DEFAULT_OUTPUT_TOKENS
    assert wait_seconds(3, 2, None) is None


def test_load_estimate_is_the_runners_until_a_load_was_measured() -> None:
    estimates = Estimates()
    told = candidate("qwen", usual_load_seconds=47.0)
    assert estimates.load_seconds(told) == 47.0
    estimates.note_load(told, 20.0)
    assert estimates.load_seconds(told) == 20.0
    estimates.note_load(told, 40.0)
    assert estimates.load_seconds(told) == pytest.approx(26.0)


def test_memory_wait_during_a_load_is_not_counted_as_load_time() -> None:
    estimates = Estimates()
    estimates.note_load(candidate("qwen", usual_load_seconds=5.0), 300.0)
    assert estimates.load_seconds(MODEL) == 5.0 + MAX_EVICTION_SECONDS
    estimates.note_load(candidate("llama", usual_load_seconds=5.0), 7.0)
    assert estimates.load_seconds(candidate("llama")) == 7.0


def test_model_speed_is_estimated_per_host() -> None:
    estimates = Estimates()
    estimates.note_load(candidate("qwen", host="slow"), 90.0)
    estimates.note_load(candidate("qwen", host="fast"), 9.0)
    assert estimates.load_seconds(candidate("qwen", host="fast")) == 9.0
    assert estimates.load_seconds(candidate("qwen", host="new")) is None


def test_estimates_survive_a_new_runner_incarnation() -> None:
    estimates = Estimates()
    estimates.note_load(MODEL, 9.0)
    assert estimates.load_seconds(candidate("qwen", incarnation="2")) == 9.0


def test_answer_length_is_learned_per_tenant_with_the_pool_as_fallback() -> None:
    estimates = Estimates()
    for _ in range(30):
        estimates.note_served(MODEL, "acme", answer(1000), 10.0)
    estimates.note_served(MODEL, "beta", answer(10), 1.0)
    assert estimates.output_tokens("qwen", "acme", None) == pytest.approx(1000.0)
    assert estimates.output_tokens("qwen", "beta", None) == 10.0
    assert 10.0 < estimates.output_tokens("qwen", "new", None) < 1000.0
    assert estimates.output_tokens("qwen", "acme", 64) == 64.0
    assert estimates.output_tokens("qwen", "acme", 0) == 1.0


def test_service_time_is_first_token_time_plus_expected_tokens() -> None:
    estimates = Estimates()
    estimates.note_served(MODEL, "acme", answer(100), 12.0, 2.0)
    assert estimates.tokens_per_second(MODEL) == pytest.approx(10.0)
    assert estimates.service_seconds(MODEL, ARRIVAL) == pytest.approx(12.0)
    assert estimates.mean_service_seconds(MODEL) == 12.0


def test_implausible_measurement_is_ignored() -> None:
    estimates = Estimates()
    estimates.note_load(MODEL, -1.0)
    estimates.note_load(MODEL, MAX_MEASURED_SECONDS + 1)
    estimates.note_load(MODEL, float("nan"))
    estimates.note_served(MODEL, "acme", answer(0), 3.0)
    assert estimates.load_seconds(MODEL) is None
    assert estimates.mean_service_seconds(MODEL) is None


def test_instantaneous_answer_gives_a_finite_speed() -> None:
    estimates = Estimates()
    estimates.note_served(MODEL, "acme", answer(100), 0.0)
    assert DEFAULT_TOKENS_PER_SECOND < estimates.tokens_per_second(MODEL) < float("inf")


def test_table_evicts_the_least_recently_measured_entry() -> None:
    averages: Averages[str] = Averages(2)
    for key in ("a", "b", "a", "c"):
        averages.note(key, 1.0)
    assert (averages.get("a"), averages.get("b"), averages.get("c"), len(averages)) == (1.0, None, 1.0, 2)


def test_slot_wait_grows_with_queue_length_and_shrinks_with_slots() -> None:
    assert wait_seconds(0, 1, 4.0) == 2.0
    assert wait_seconds(3, 1, 4.0) == 14.0
    assert wait_seconds(3, 7, 4.0) == 2.0
    assert wait_seconds(3, 0, 4.0) is None


@pytest.mark.parametrize(
    ("estimated", "waited", "error"), [(10.0, 10.0, 0.0), (5.0, 10.0, 0.5), (30.0, 10.0, 2.0), (1.0, 0.2, 0.8)]
)
def test_estimate_error_is_relative_to_a_wait_of_at_least_one_second(
    estimated: float, waited: float, error: float
) -> None:
    assert estimate_error(estimated, waited) == pytest.approx(error)


def test_length_spread_is_zero_before_two_samples_and_for_equal_lengths() -> None:
    estimates = Estimates()
    assert estimates.spread("qwen") == 0.0
    for _ in range(20):
        estimates.note_served(MODEL, "acme", answer(100), 10.0)
        assert estimates.spread("qwen") == 0.0


def test_exponentially_distributed_lengths_have_full_spread() -> None:
    estimates, dice = Estimates(), Random(5)
    for _ in range(400):
        estimates.note_served(MODEL, "acme", answer(1 + round(dice.expovariate(1 / 200))), 10.0)
    assert estimates.spread("qwen") > 0.9
    assert estimates.spread("llama") == 0.0


def test_answers_truncated_at_a_maximum_have_less_spread() -> None:
    estimates, dice = Estimates(), Random(5)
    for _ in range(400):
        tokens = min(20, 1 + round(dice.expovariate(1 / 200)))
        estimates.note_served(MODEL, "acme", answer(tokens), 10.0, limit=20)
    assert 0.0 < estimates.spread("qwen") < 0.3


def test_single_very_long_answer_does_not_give_equal_lengths_a_full_spread() -> None:
    estimates = Estimates()
    for _ in range(64):
        estimates.note_served(MODEL, "acme", answer(100), 10.0)
    estimates.note_served(MODEL, "acme", answer(1_000_000), 10.0)
    assert estimates.spread("qwen") < 0.1

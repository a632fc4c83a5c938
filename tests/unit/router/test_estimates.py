"""What loads and requests take, learned from those that are over."""

from dataclasses import replace
from random import Random

import pytest
from load_harness import candidate
from scheduler_harness import arrival

from router_svc.policy.decisions import Placed, Served, Waits
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.estimates import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_TOKENS_PER_SECOND,
    DEFAULT_UNIT_SECONDS,
    MAX_EVICTION_SECONDS,
    MAX_MEASURED_SECONDS,
    Averages,
    Estimates,
    estimate_error,
    wait_seconds,
)
from router_svc.policy.router_request import UNITS, Request, WorkUnit
from router_svc.policy.scheduler import Scheduler
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

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


STEPS = WorkUnit.STEP_MEGAPIXELS

PAINTS = replace(candidate("sdxl", readiness=Readiness.READY), operations=frozenset({Operation.IMAGE}), slots=1)

CHATS = replace(candidate("qwen", readiness=Readiness.READY), operations=frozenset({Operation.CHAT}), slots=1)

DONE = Served(prompt_tokens=0, cached_tokens=0, output_tokens=0)


def image(key: int, work: float, tenant: str = "painter", at: float = 0.0) -> Request:
    return arrival(key, "sdxl", operation=Operation.IMAGE, tenant=tenant, arrived_at=at, work=work)


def chat(key: int, tenant: str = "writer", at: float = 0.0) -> Request:
    return arrival(key, "qwen", tenant=tenant, arrived_at=at)


def scheduler_with(*candidates: Candidate) -> Scheduler:
    scheduler = Scheduler()
    scheduler.apply(MeshChange(candidates=candidates, gone=()), 0.0)
    return scheduler


def test_every_media_operation_has_a_unit_and_a_default_speed() -> None:
    media = {UNITS.get(operation) for operation in (Operation.IMAGE, Operation.TRANSCRIPTION, Operation.SPEECH)}
    assert media == DEFAULT_UNIT_SECONDS.keys()


def test_image_time_follows_from_its_work_and_the_measured_speed() -> None:
    estimates = Estimates()
    assert estimates.service_seconds(PAINTS, image(1, 20.0)) is None
    estimates.note_media(PAINTS, STEPS, 20.0, 5.0, 5.0)
    assert estimates.service_seconds(PAINTS, image(1, 40.0)) == pytest.approx(10.0)
    assert estimates.mean_service_seconds(PAINTS) == 5.0
    assert estimates.tokens_per_second(PAINTS) == DEFAULT_TOKENS_PER_SECOND, "it has no speed in tokens"


def test_audio_chat_model_has_separate_speeds_for_input_and_output() -> None:
    estimates = Estimates()
    estimates.note_served(CHATS, "t", Served(prompt_tokens=1, cached_tokens=0, output_tokens=100), 2.0)
    estimates.note_media(CHATS, WorkUnit.AUDIO_SECONDS, 60.0, 6.0, 6.0)
    assert estimates.tokens_per_second(CHATS) == pytest.approx(50.0)
    heard = estimates.speed(CHATS, WorkUnit.AUDIO_SECONDS)
    assert heard is not None
    assert heard.seconds_of(30.0) == pytest.approx(3.0)


def test_device_time_is_valued_by_the_tokens_generated_in_it() -> None:
    estimates = Estimates()
    assert estimates.tokens_per_device_second(PAINTS) == DEFAULT_TOKENS_PER_SECOND
    for _ in range(200):
        estimates.note_exchange(CHATS, 400.0, 2.0)
    assert estimates.tokens_per_device_second(PAINTS) == pytest.approx(200.0, rel=0.05)


def test_remote_model_does_not_affect_the_device_time_value() -> None:
    estimates = Estimates()
    estimates.note_exchange(replace(CHATS, remote=True), 1e6, 1.0)
    assert estimates.tokens_per_device_second(PAINTS) == DEFAULT_TOKENS_PER_SECOND


def test_implausible_media_measurement_is_ignored() -> None:
    estimates = Estimates()
    estimates.note_media(PAINTS, STEPS, 0.0, 5.0, 5.0)
    estimates.note_media(PAINTS, STEPS, 10.0, float("nan"), 5.0)
    estimates.note_exchange(CHATS, 100.0, -1.0)
    assert estimates.speed(PAINTS, STEPS) is None
    assert estimates.tokens_per_device_second(CHATS) == DEFAULT_TOKENS_PER_SECOND


def account(scheduler: Scheduler, tenant: str) -> float:
    known = scheduler._queues.shares.known_account(tenant)
    assert known is not None
    return known


def test_tenants_are_charged_equally_for_seconds_of_images_and_answers() -> None:
    scheduler = scheduler_with(PAINTS, CHATS)
    now = 0.0
    for turn in range(50):
        scheduler.submit(image(2 * turn + 1, 30.0, at=now), now)
        scheduler.submit(chat(2 * turn + 2, at=now), now)
        now += 4.0
        scheduler.finish(2 * turn + 1, now, DONE)
        scheduler.finish(2 * turn + 2, now, Served(prompt_tokens=100, cached_tokens=0, output_tokens=300))
    assert account(scheduler, "painter") == pytest.approx(account(scheduler, "writer"), rel=0.15)


def test_claimed_recording_length_does_not_affect_the_charge() -> None:
    accounts = []
    for claimed in (1.0, 3_600.0):
        scheduler = scheduler_with(PAINTS)
        scheduler.submit(image(1, claimed), 0.0)
        scheduler.finish(1, 10.0, DONE)
        accounts.append(account(scheduler, "painter"))
    assert accounts[0] == pytest.approx(accounts[1])
    assert accounts[0] == pytest.approx(10.0 * DEFAULT_TOKENS_PER_SECOND)


def test_image_cancelled_by_its_caller_is_charged_for_its_time() -> None:
    scheduler = scheduler_with(PAINTS)
    scheduler.submit(image(1, 30.0), 0.0)
    scheduler.finish(1, 6.0, None, Reason.CANCELLED)
    assert account(scheduler, "painter") == pytest.approx(6.0 * DEFAULT_TOKENS_PER_SECOND)


def test_failed_attempt_costs_its_tenant_nothing() -> None:
    scheduler = scheduler_with(PAINTS)
    scheduler.submit(image(1, 30.0), 0.0)
    scheduler.report_failed(1, 1, Reason.SERVER_DIED, 5.0)
    assert account(scheduler, "painter") == pytest.approx(0.0)


def test_waiting_image_gets_an_estimate_based_on_those_ahead() -> None:
    scheduler = scheduler_with(PAINTS)
    scheduler.submit(image(1, 10.0), 0.0)
    scheduler.finish(1, 5.0, DONE)
    placed = scheduler.submit(image(2, 40.0), 5.0)
    assert isinstance(placed[0], Placed)
    waits = scheduler.submit(image(3, 10.0), 9.0)
    told = next(each for each in waits if isinstance(each, Waits))
    assert told.eta_seconds == pytest.approx(40.0 * 0.5 - 4.0)


def test_image_that_cannot_meet_its_deadline_is_refused_immediately() -> None:
    scheduler = scheduler_with(PAINTS)
    scheduler.submit(image(1, 10.0), 0.0)
    scheduler.finish(1, 5.0, DONE)
    decisions = scheduler.submit(replace(image(2, 10.0, at=5.0), own_deadline_at=9.0), 5.0)
    assert [getattr(each, "reason", None) for each in decisions] == [Reason.DEADLINE_UNREACHABLE]


def test_large_image_is_not_refused_by_costs_measured_on_small_ones_only() -> None:
    scheduler = scheduler_with(PAINTS)
    scheduler.submit(image(1, 0.01), 0.0)
    scheduler.finish(1, 1.0, DONE)
    # A hundred seconds a unit, of which nearly all is what any image costs.
    (decision,) = scheduler.submit(replace(image(2, 30.0, at=1.0), own_deadline_at=61.0), 1.0)
    assert isinstance(decision, Placed)
    assert Estimates().certain_service_seconds(PAINTS, image(3, 30.0)) is None

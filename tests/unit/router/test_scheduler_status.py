"""The status messages of waiting requests, and how often they are sent."""

from random import Random

import pytest
from scheduler_harness import arrival, candidate, placed, scheduler

from router_svc.policy.decisions import Decision, Served, Waits
from router_svc.policy.progress.status_notifier import shown_seconds
from weft.kernel.errors.reasons import Reason

TOOK = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100)


def waits(decisions: list[Decision]) -> dict[int, Waits]:
    return {decision.key: decision for decision in decisions if isinstance(decision, Waits)}


def test_only_the_first_status_has_the_considered_candidates() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    first = waits(mesh.submit(arrival(3), 0.0))[3]
    assert [(each.model, each.gate) for each in first.considered] == [("m", "its slot is busy")]
    mesh.finish(1, 0.5)
    later = waits(mesh.tick(1.0))[3]
    assert (later.position, later.considered) == (1, ())


def test_tick_sends_a_bounded_number_of_statuses_and_the_rest_on_later_ticks() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=100, max_notified_per_tick=10)
    for key in range(1, 42):
        mesh.submit(arrival(key), 0.0)
    mesh.finish(1, 0.5)
    rounds = [waits(mesh.tick(1.0 + quarter / 4)) for quarter in range(4)]
    assert [len(each) for each in rounds] == [10, 10, 10, 9]
    assert set().union(*rounds) == set(range(3, 42))


def test_request_gets_at_most_one_status_per_interval_at_any_queue_speed() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=200)
    for key in range(1, 101):
        mesh.submit(arrival(key), 0.0)
    running, heard = 1, 0
    for step in range(1, 81):
        now = step / 16
        running += 1
        mesh.finish(running - 1, now)
        heard += 100 in waits(mesh.tick(now))
    assert heard == 5


def test_eta_follows_measured_answers() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=1e6)
    mesh.submit(arrival(1), 0.0)
    assert waits(mesh.submit(arrival(2), 0.0))[2].eta_seconds is None
    mesh.report_first_content(1, 1.0)
    mesh.finish(1, 10.0, TOOK)
    assert waits(mesh.submit(arrival(3, arrived_at=10.0), 10.0))[3].eta_seconds == 11.0, "the second one has just begun"
    for key in range(4, 7):
        mesh.submit(arrival(key, arrived_at=10.0), 10.0)
    for key in (2, 3, 4):
        mesh.finish(key, 10.0 * key, TOOK)
    told = waits(mesh.tick(41.0))[6]
    assert told.position == 1
    assert told.eta_seconds is not None
    assert 8.0 <= told.eta_seconds <= 16.0


def test_average_queue_wait_is_that_of_recently_placed_requests() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    (length,) = mesh.queues()
    assert (length.waiting, length.max_waiting, length.running, length.average_wait_seconds) == (1, 16, 1, 0.0)
    mesh.finish(1, 10.0)
    (length,) = mesh.queues()
    assert length.waiting == 0
    assert length.average_wait_seconds == 1.0, "a tenth of the newest wait, which was 10 s"


def test_eta_uses_the_requested_length_instead_of_earlier_short_answers() -> None:
    """Found by trying: after answers of 3 tokens a wait of 8 s was estimated as 1 s, while 80 tokens were requested."""
    mesh = scheduler(candidate(), queue_timeout_seconds=1e6)
    for key in range(1, 6):
        now = key * 1.0
        mesh.submit(arrival(key, arrived_at=now, max_output_tokens=80), now)
        mesh.report_first_content(key, now)
        mesh.finish(key, now + 0.2, Served(prompt_tokens=5, cached_tokens=0, output_tokens=3))
    mesh.submit(arrival(10, arrived_at=10.0, max_output_tokens=80), 10.0)
    first = waits(mesh.submit(arrival(11, arrived_at=10.0, max_output_tokens=80), 10.0))[11]
    second = waits(mesh.submit(arrival(12, arrived_at=10.0, max_output_tokens=80), 10.0))[12]
    assert first.eta_seconds == 8.0, "80 tokens at 10 per second"
    assert second.eta_seconds == 16.0
    mesh.report_first_content(10, 10.0)
    assert waits(mesh.tick(14.0))[11].eta_seconds == 4.0


def test_eta_is_capped_at_typical_answer_lengths_once_enough_were_measured() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=1e6)
    for key in range(1, 201):
        mesh.submit(arrival(key, arrived_at=key * 10.0, max_output_tokens=4096), key * 10.0)
        mesh.report_first_content(key, key * 10.0)
        mesh.finish(key, key * 10.0 + 1.9, Served(prompt_tokens=5, cached_tokens=0, output_tokens=20))
    mesh.submit(arrival(300, arrived_at=3000.0, max_output_tokens=4096), 3000.0)
    told = waits(mesh.submit(arrival(301, arrived_at=3000.0, max_output_tokens=4096), 3000.0))[301]
    assert told.eta_seconds is not None
    assert 2.0 <= told.eta_seconds <= 6.0, "20 tokens take 2 s; 4096 would take 400"


def test_answers_truncated_at_their_maximum_do_not_shorten_the_eta_of_longer_ones() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=1e6)
    for key in range(1, 101):
        mesh.submit(arrival(key, arrived_at=key * 1.0, max_output_tokens=3), key * 1.0)
        mesh.report_first_content(key, key * 1.0)
        mesh.finish(key, key * 1.0 + 0.2, Served(prompt_tokens=5, cached_tokens=0, output_tokens=3))
    mesh.submit(arrival(300, arrived_at=300.0, max_output_tokens=80), 300.0)
    assert waits(mesh.submit(arrival(301, arrived_at=300.0, max_output_tokens=80), 300.0))[301].eta_seconds == 8.0


def test_eta_assumes_slots_are_freed_one_after_the_other() -> None:
    mesh = scheduler(candidate(slots=4), queue_timeout_seconds=1e6)
    mesh.submit(arrival(1), 0.0)
    mesh.report_first_content(1, 0.0)
    mesh.finish(1, 9.9, TOOK)
    for key in range(2, 6):
        mesh.submit(arrival(key, arrived_at=10.0, max_output_tokens=100), 10.0)
        mesh.report_first_content(key, 10.0)
    etas = [waits(mesh.submit(arrival(key, arrived_at=10.0, max_output_tokens=100), 10.0))[key] for key in range(6, 12)]
    assert [each.eta_seconds for each in etas] == [10.0] * 4 + [20.0] * 2


def test_eta_is_short_behind_many_answers_of_varying_length() -> None:
    """Eight answers of 10 s on average: one ends in about a second; if all took 10 s, it would be 10."""
    mesh, dice = scheduler(candidate(slots=8), queue_timeout_seconds=1e6), Random(1)
    for key in range(1, 301):
        tokens = 1 + round(dice.expovariate(1 / 100))
        mesh.submit(arrival(key, arrived_at=key * 100.0), key * 100.0)
        mesh.report_first_content(key, key * 100.0)
        mesh.finish(key, key * 100.0 + tokens / 10, Served(prompt_tokens=5, cached_tokens=0, output_tokens=tokens))
    now = 40_000.0
    for key in range(401, 409):
        mesh.submit(arrival(key, arrived_at=now), now)
        mesh.report_first_content(key, now)
    etas = [waits(mesh.submit(arrival(key, arrived_at=now), now))[key].eta_seconds for key in range(409, 412)]
    first, second, third = (eta for eta in etas if eta is not None)
    assert 0.5 <= first <= 3.0
    assert first < second < third < 8.0


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, None), (0.01, 0.1), (1.2, 1.2), (1.21, 1.3), (9.91, 10.0), (10.0, 10.0), (10.2, 11.0)]
)
def test_short_etas_are_shown_in_tenths_of_a_second(seconds: float | None, shown: float | None) -> None:
    assert shown_seconds(seconds) == shown


def test_slots_are_reported_busy_only_while_they_are() -> None:
    """Found by trying: "all 4 slots are busy" of replicas that were paused."""
    mesh = scheduler(candidate("a", "m-a", pool="m", slots=2), candidate("b", "m-b", pool="m", slots=2))
    mesh.submit(arrival(1), 0.0)
    mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.0)
    mesh.report_failed(1, 2, Reason.SHUTTING_DOWN, 0.0)
    word = waits(mesh.submit(arrival(2), 0.04))[2]
    pauses = "m-a (failed; retried in 1.0 s), m-b (bounced a request; retried in 0.2 s)"
    assert word.reason == f"m accepts no requests now: {pauses}"
    assert word.eta_seconds is None


def test_full_and_paused_candidates_are_distinguished() -> None:
    mesh = scheduler(candidate("a", "m-a", pool="m"), candidate("b", "m-b", pool="m"))
    (broken,) = placed(mesh.submit(arrival(1), 0.0)).values()
    mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.0)
    word = waits(mesh.submit(arrival(2), 0.4))[2]
    assert word.reason == (
        f"m accepts no requests now: 1 of 2 replicas have no free slot, m-{broken} (failed; retried in 0.6 s)"
    )
    after = waits(mesh.submit(arrival(3), 1.1))[3]
    assert (after.reason, after.eta_seconds) == ("all 2 slots of m are busy", None), "no answer was measured yet"


def test_backed_off_replicas_are_listed_up_to_a_limit_and_the_rest_counted() -> None:
    mesh = scheduler(*(candidate(name, f"m-{name}", pool="m") for name in "abcde"), max_attempts=9, retry_reserve=9.0)
    mesh.submit(arrival(1), 0.0)
    for attempt in range(1, 6):
        mesh.report_failed(1, attempt, Reason.SHUTTING_DOWN, 0.0)
    reason = waits(mesh.submit(arrival(2), 0.04))[2].reason
    assert reason.endswith("m-c (bounced a request; retried in 0.2 s), and 2 more")


def test_runner_full_with_external_requests_is_reported_as_such() -> None:
    mesh = scheduler(candidate(slots=4))
    mesh.submit(arrival(1), 0.0)
    (word,) = waits(mesh.report_failed(1, 1, Reason.NO_SLOT_AVAILABLE, 0.0)).values()
    assert (
        word.reason == "m accepts no requests now: m (full with requests that this "
        "router did not place; retried in 0.2 s)"
    )

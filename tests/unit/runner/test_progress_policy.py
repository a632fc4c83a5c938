"""Stall detection of engines and requests, stepped by values."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from runner_svc.policy.progress import (
    FROZEN_PROBES,
    EngineUsage,
    Observation,
    ProgressPolicy,
    RequestSample,
    UsageWindow,
    Verdict,
)
from runner_svc.policy.timeouts import TimeoutProfile
from weft.kernel.reasons import Reason

PROFILE = TimeoutProfile(prefill_liveness_seconds=120.0, idle_stream_seconds=60.0)
START = 1000.0


def request(key: int = 1, **signs: Any) -> RequestSample:
    return RequestSample(key=key, **{"started": START, "turn_started": START, "last_progress": START} | signs)


def generating(key: int = 1, *, last_token: float = START, **signs: Any) -> RequestSample:
    return request(key, has_content=True, last_token=last_token, last_progress=last_token, **signs)


def engine(cpu_seconds: float = 0.0, gpu_seconds: float | None = None) -> EngineUsage:
    return EngineUsage(cpu_seconds=cpu_seconds, gpu_seconds=gpu_seconds)


def step(
    policy: ProgressPolicy, seconds: Iterable[float], look: Callable[[float], Observation]
) -> tuple[float, Verdict]:
    """Returns the first verdict with an action, and its time; at the end an empty one."""
    at = 0.0
    for at in seconds:
        verdict = policy.look(look(at))
        if verdict.failures or verdict.restart:
            return at, verdict
    return at, Verdict()


def every_second(until: int) -> Iterable[float]:
    return (START + second for second in range(until + 1))


@pytest.mark.parametrize(
    ("cpu_share", "gpu_share"), [(0.9, None), (0.06, None), (0.0, 0.5)], ids=["busy", "barely busy", "on the GPU"]
)
def test_working_ten_minute_prefill_is_never_ended(cpu_share: float, gpu_share: float | None) -> None:
    def look(now: float) -> Observation:
        spent = now - START
        gpu = None if gpu_share is None else spent * gpu_share
        return Observation(now=now, requests=[request()], engine=engine(spent * cpu_share, gpu))

    assert step(ProgressPolicy(PROFILE), every_second(600), look)[1] == Verdict()


def test_ten_minute_prefill_with_progress_reports_is_never_ended() -> None:
    def look(now: float) -> Observation:
        reported = START + (now - START) // 100 * 100
        return Observation(now=now, requests=[request(last_progress=reported)], engine=engine())

    assert step(ProgressPolicy(PROFILE), every_second(600), look)[1] == Verdict()


@pytest.mark.parametrize("cpu_share", [0.0, 0.03], ids=["frozen", "only writing comments"])
def test_prefill_without_progress_ends_at_the_limit_and_restarts_the_engine(cpu_share: float) -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[request()], engine=engine(cpu_share * (now - START)))

    at, verdict = step(ProgressPolicy(PROFILE), every_second(600), look)
    assert at == START + 120.0
    assert verdict.failures[0].reason is Reason.STALL_TIMEOUT
    assert "prefill_liveness_timeout_seconds" in verdict.failures[0].message
    assert verdict.restart


def test_engine_frozen_mid_prefill_is_detected_one_limit_later() -> None:
    policy = ProgressPolicy(PROFILE)
    progress = START

    def look(now: float) -> Observation:
        return Observation(now=now, requests=[request(last_progress=progress)], engine=engine(min(now - START, 50.0)))

    for now in every_second(600):
        verdict = policy.look(look(now))
        if verdict.working:
            progress = now  # what the watchdog notes on the record
        if verdict.restart:
            break
    assert now == START + 50.0 + 120.0


def test_work_starting_shortly_before_the_limit_counts() -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[request()], engine=engine(max(0.0, now - START - 110.0)))

    assert step(ProgressPolicy(PROFILE), every_second(130), look)[1] == Verdict()


def test_single_short_burst_is_not_work() -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[request()], engine=engine(0.5 if now >= START + 60 else 0.0))

    assert step(ProgressPolicy(PROFILE), every_second(200), look)[0] == START + 120.0


def test_prefill_is_not_judged_without_visible_processes() -> None:
    """For a server that weft did not start only tokens are signs of progress."""

    def look(now: float) -> Observation:
        return Observation(now=now, requests=[request()], owned=False)

    assert step(ProgressPolicy(PROFILE), every_second(3600), look)[1] == Verdict()


def test_prefill_is_not_judged_with_the_limit_disabled() -> None:
    policy = ProgressPolicy(replace(PROFILE, prefill_liveness_seconds=None))
    assert step(policy, every_second(3600), lambda now: Observation(now=now, requests=[request()], engine=engine()))[
        1
    ] == (Verdict())


def test_first_token_limit_ends_the_request_of_a_busy_engine_without_a_restart() -> None:
    policy = ProgressPolicy(replace(PROFILE, first_token_seconds=30.0))

    def look(now: float) -> Observation:
        return Observation(now=now, requests=[request()], engine=engine(now - START))

    at, verdict = step(policy, every_second(100), look)
    assert at == START + 30.0
    assert "first_token_timeout_seconds" in verdict.failures[0].message
    assert verdict.failures[0].reason is Reason.STALL_TIMEOUT
    assert not verdict.restart


def test_answer_that_stops_midway_restarts_the_engine() -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[generating()])

    at, verdict = step(ProgressPolicy(PROFILE), every_second(100), look)
    assert at == START + 60.0
    assert "idle_stream_timeout_seconds" in verdict.restart
    assert verdict.failures[0].reason is Reason.STALL_TIMEOUT


@pytest.mark.parametrize(
    "other",
    [
        lambda now: {"requests": [generating(2, last_token=now)]},
        lambda now: {"requests": [request(2, last_progress=now)]},
        lambda now: {"last_token": now},
    ],
    ids=["another answer flows", "another prefill moves", "another answer has ended"],
)
def test_stopped_answer_on_an_engine_serving_others_ends_without_a_restart(other: Callable[[float], Any]) -> None:
    def look(now: float) -> Observation:
        extra = dict(other(now))
        return Observation(now=now, requests=[generating(1), *extra.pop("requests", [])], engine=engine(), **extra)

    at, verdict = step(ProgressPolicy(PROFILE), every_second(100), look)
    assert at == START + 60.0
    assert [failure.key for failure in verdict.failures] == [1]
    assert not verdict.restart


def test_stopped_prefill_while_another_answer_streams_ends_without_a_restart() -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[request(1), generating(2, last_token=now)], engine=engine())

    at, verdict = step(ProgressPolicy(PROFILE), every_second(200), look)
    assert (at, [failure.key for failure in verdict.failures]) == (START + 120.0, [1])
    assert not verdict.restart


def test_newly_arrived_request_is_not_a_sign_of_engine_progress() -> None:
    def look(now: float) -> Observation:
        arrived = request(2, started=now, turn_started=now, last_progress=now)
        return Observation(now=now, requests=[generating(1), arrived], engine=engine())

    assert step(ProgressPolicy(PROFILE), every_second(100), look)[1].restart


def test_slow_answer_continues() -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[generating(last_token=START + (now - START) // 59 * 59)])

    assert step(ProgressPolicy(PROFILE), every_second(600), look)[1] == Verdict()


def test_request_waiting_for_a_tool_or_caller_is_not_judged_and_its_timer_restarts_afterwards() -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[generating(in_engine=not START + 10 < now < START + 500)])

    assert step(ProgressPolicy(PROFILE), every_second(1000), look)[0] == START + 499 + 60


def test_absolute_limit_applies_to_the_whole_request_including_tools() -> None:
    policy = ProgressPolicy(replace(PROFILE, absolute_seconds=300.0))

    def look(now: float) -> Observation:
        return Observation(now=now, requests=[generating(last_token=now, in_engine=False)])

    at, verdict = step(policy, every_second(400), look)
    assert at == START + 300.0
    assert verdict.failures[0].reason is Reason.DEADLINE_EXCEEDED
    assert "absolute_timeout_seconds" in verdict.failures[0].message
    assert not verdict.restart


@pytest.mark.parametrize(
    "signs", [request(), generating(), request(in_engine=False)], ids=["prefill", "answer", "tool"]
)
def test_machine_suspend_of_an_hour_causes_no_timeout(signs: RequestSample) -> None:
    policy = ProgressPolicy(replace(PROFILE, absolute_seconds=100.0, first_token_seconds=100.0))
    for now in (START, START + 1, START + 3600, START + 3601):
        assert policy.look(Observation(now=now, requests=[signs], engine=engine())) == Verdict()


def test_time_before_and_after_a_machine_suspend_counts() -> None:
    def look(now: float) -> Observation:
        return Observation(now=now, requests=[generating()])

    moments = [*every_second(50), *(START + 3600 + second for second in range(60))]
    assert step(ProgressPolicy(PROFILE), moments, look)[0] == START + 3600 + 9


def _idle(policy: ProgressPolicy, until: int, **signs: Any) -> tuple[float, int, Verdict]:
    """Returns when an idle engine whose probes fail counts as frozen, and after how many probes."""
    probes, asked = 0, False
    cpu_share = signs.pop("cpu_share", 0.0)
    for now in every_second(until):
        seen = engine(cpu_share * (now - START)) if policy.wants_engine([]) else None
        verdict = policy.look(Observation(now=now, engine=seen, responded=False if asked else None, **signs))
        asked = verdict.probe
        probes += asked
        if verdict.restart:
            return now, probes, verdict
    return now, probes, Verdict()


def test_idle_engine_that_fails_probes_without_work_is_frozen() -> None:
    at, probes, verdict = _idle(ProgressPolicy(PROFILE), 60)
    assert (at - START, probes) == (5 * FROZEN_PROBES, FROZEN_PROBES)
    assert "answered none of 3 probes" in verdict.restart


def test_idle_engine_with_internal_work_is_not_restarted() -> None:
    assert _idle(ProgressPolicy(PROFILE), 120, cpu_share=0.5)[2] == Verdict()


def test_attached_server_is_not_probed() -> None:
    assert _idle(ProgressPolicy(PROFILE), 120, owned=False)[1:] == (0, Verdict())


def test_idle_engine_that_passes_occasional_probes_is_not_restarted() -> None:
    policy, asked, probes = ProgressPolicy(PROFILE), False, 0
    for now in every_second(300):
        answer = None if not asked else probes % 3 == 0
        verdict = policy.look(Observation(now=now, engine=engine(), responded=answer))
        asked = verdict.probe
        probes += asked
        assert not verdict.restart
    assert probes > 50


def test_probes_failed_before_a_machine_suspend_do_not_count() -> None:
    policy = ProgressPolicy(PROFILE)
    at, _, verdict = _idle(policy, 14)
    assert not verdict.restart
    verdict = policy.look(Observation(now=at + 3600, engine=engine(), responded=False))
    assert not verdict.restart


def test_processes_are_inspected_only_if_needed() -> None:
    policy = ProgressPolicy(PROFILE)
    assert policy.wants_engine([request()])
    assert not policy.wants_engine([generating(), request(in_engine=False)])
    assert not policy.wants_engine([])


def test_falling_or_new_figures_are_neither_work_nor_an_error() -> None:
    watch = UsageWindow(10.0)
    assert not watch.worked(0.0, engine(50.0))
    assert not watch.worked(1.0, engine(5.0)), "a child ended"
    assert watch.worked(2.0, engine(6.0))
    assert not watch.worked(3.0, engine(6.0, 1.0)), "GPU time is known from here on"
    assert watch.worked(4.0, engine(6.0, 1.5))
    assert not watch.worked(5.0, engine(6.0)), "and unknown again"
    assert watch.worked(6.0, engine(7.0))


def test_usage_window_keeps_a_bounded_number_of_samples() -> None:
    watch = UsageWindow(60.0)
    for step_number in range(100_000):
        watch.worked(step_number / 1000.0, engine())
    assert len(watch._samples) <= 34


def looping(now: float, seconds: float, *, report_at: float | None = None) -> Observation:
    """An engine that computes without end: each of its requests is given up after so many seconds."""
    key, spent = divmod(now - START, seconds)
    began = START + key * seconds
    running = [request(int(key), started=began, turn_started=began, last_progress=now, last_report=report_at)]
    return Observation(now=now, requests=running if spent else [], last_report=report_at, engine=engine(now - START))


def test_looping_engine_is_restarted_after_two_abandoned_requests() -> None:
    at, verdict = step(ProgressPolicy(PROFILE), every_second(1_000), lambda now: looping(now, 300.0))
    assert (at, verdict.failures) == (START + 600.0, ())
    assert verdict.restart == "2 requests in a row ended without a token or a report on their prompt"


def test_early_abandoned_requests_do_not_restart_a_working_engine() -> None:
    assert step(ProgressPolicy(PROFILE), every_second(1_000), lambda now: looping(now, 100.0))[1] == Verdict()


def test_abandoned_long_prompts_do_not_restart_an_engine_that_reports_progress() -> None:
    def look(now: float) -> Observation:
        return looping(now, 300.0, report_at=START + (now - START) // 50 * 50)

    assert step(ProgressPolicy(PROFILE), every_second(1_000), look)[1] == Verdict()


def test_token_between_two_abandoned_requests_counts_as_progress() -> None:
    def look(now: float) -> Observation:
        return replace(looping(now, 300.0), last_report=START + 320.0 if now > START + 320 else None)

    assert step(ProgressPolicy(PROFILE), every_second(650), look)[1] == Verdict()

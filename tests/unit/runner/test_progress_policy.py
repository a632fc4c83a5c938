"""Stall detection of engines and requests, stepped by values; what counts as progress of a load and of a stream."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest

from runner_svc.openai_upstream.openai_stream import DONE, StreamReader
from runner_svc.policy.progress import (
    FROZEN_PROBES,
    EngineUsage,
    LoadSample,
    LoadStallDetector,
    Observation,
    ProgressPolicy,
    RequestSample,
    UsageWindow,
    Verdict,
)
from runner_svc.policy.timeouts import TimeoutProfile
from weft.kernel.errors.reasons import Reason

PROFILE = TimeoutProfile(prefill_liveness_seconds=120.0, idle_stream_seconds=60.0)
START = 1000.0


def request(key: int = 1, **signs: Any) -> RequestSample:
    return RequestSample(key=key, **{"started": START, "turn_started": START, "last_progress": START} | signs)


def generating(key: int = 1, *, last_token: float = START, **signs: Any) -> RequestSample:
    return request(key, has_content=True, last_token=last_token, last_progress=last_token, **signs)


def engine(cpu_seconds: float = 0.0, gpu_seconds: float | None = None) -> EngineUsage:
    return EngineUsage(cpu_seconds=cpu_seconds, gpu_seconds=gpu_seconds)


Look = Callable[[float], Observation]
"""An observation by the seconds since the start."""


def seen(spent: float, *requests: RequestSample, **signs: Any) -> Observation:
    """An engine that does nothing, with one prefill unless other requests are given."""
    return Observation(**{"now": START + spent, "requests": requests or [request()], "engine": engine()} | signs)


def looping(spent: float, seconds: float, *, report_at: float | None = None) -> Observation:
    """An engine that computes without end: each of its requests is given up after so many seconds."""
    key, since = divmod(spent, seconds)
    began, now = START + key * seconds, START + spent
    running = [request(int(key), started=began, turn_started=began, last_progress=now, last_report=report_at)]
    return Observation(now=now, requests=running if since else [], last_report=report_at, engine=engine(spent))


def step(policy: ProgressPolicy, seconds: Iterable[float], look: Look) -> tuple[float, Verdict]:
    """Returns the first verdict with an action, and its time; at the end an empty one."""
    at = 0.0
    for at in seconds:
        verdict = policy.look(look(at))
        if verdict.failures or verdict.restart:
            return at, verdict
    return at, Verdict()


class Unjudged(NamedTuple):
    """What is left alone for so many seconds."""

    seconds: int
    look: Look
    limits: TimeoutProfile = PROFILE


UNJUDGED = {
    "a prefill that uses a processor": Unjudged(600, lambda spent: seen(spent, engine=engine(spent * 0.9))),
    "a prefill that barely uses a processor": Unjudged(600, lambda spent: seen(spent, engine=engine(spent * 0.06))),
    "a prefill on a GPU": Unjudged(600, lambda spent: seen(spent, engine=engine(0.0, spent * 0.5))),
    "a prefill that reports its progress": Unjudged(
        600, lambda spent: seen(spent, request(last_progress=START + spent // 100 * 100))
    ),
    "a prefill whose work begins shortly before the limit": Unjudged(
        130, lambda spent: seen(spent, engine=engine(max(0.0, spent - 110.0)))
    ),
    "a prefill on a server whose processes are not seen": Unjudged(
        3600, lambda spent: seen(spent, engine=None, owned=False)
    ),
    "a prefill without a limit": Unjudged(3600, seen, replace(PROFILE, prefill_liveness_seconds=None)),
    "a slow answer": Unjudged(
        600, lambda spent: seen(spent, generating(last_token=START + spent // 59 * 59), engine=None)
    ),
    "requests that are given up early": Unjudged(1_000, lambda spent: looping(spent, 100.0)),
    "long prompts with reports that are given up": Unjudged(
        1_000, lambda spent: looping(spent, 300.0, report_at=START + spent // 50 * 50)
    ),
    "a token between two requests that are given up": Unjudged(
        650, lambda spent: replace(looping(spent, 300.0), last_report=START + 320.0 if spent > 320 else None)
    ),
}


@pytest.mark.parametrize("what", UNJUDGED)
def test_progress_is_not_a_stall(what: str) -> None:
    case = UNJUDGED[what]
    assert step(ProgressPolicy(case.limits), range(case.seconds + 1), case.look)[1] == Verdict()


class Stall(NamedTuple):
    """What is ended after so many seconds by the limit in the message; `others`: the engine serves them on."""

    seconds: float
    look: Look
    limit: str
    others: bool = False
    limits: TimeoutProfile = PROFILE
    reason: Reason = Reason.STALL_TIMEOUT


PREFILL, STREAM = "prefill_liveness_timeout_seconds", "idle_stream_timeout_seconds"
STALLS = {
    "a frozen prefill": Stall(120, seen, PREFILL),
    "a prefill that only writes comments": Stall(120, lambda spent: seen(spent, engine=engine(0.03 * spent)), PREFILL),
    "a prefill with one short burst of work": Stall(
        120, lambda spent: seen(spent, engine=engine(0.5 if spent >= 60 else 0.0)), PREFILL
    ),
    "a prefill while another answer streams": Stall(
        120, lambda spent: seen(spent, request(), generating(2, last_token=START + spent)), PREFILL, others=True
    ),
    "an answer that stops": Stall(60, lambda spent: seen(spent, generating(), engine=None), STREAM),
    "an answer that stops when another request arrives": Stall(
        60,
        lambda spent: seen(
            spent,
            generating(),
            request(2, started=START + spent, turn_started=START + spent, last_progress=START + spent),
        ),
        STREAM,
    ),
    "an answer that stops beside one that flows": Stall(
        60, lambda spent: seen(spent, generating(), generating(2, last_token=START + spent)), STREAM, others=True
    ),
    "an answer that stops beside a prefill that moves": Stall(
        60, lambda spent: seen(spent, generating(), request(2, last_progress=START + spent)), STREAM, others=True
    ),
    "an answer that stops when another one has ended": Stall(
        60, lambda spent: seen(spent, generating(), last_token=START + spent), STREAM, others=True
    ),
    "an answer that stops after a tool": Stall(
        499 + 60, lambda spent: seen(spent, generating(in_engine=not 10 < spent < 500), engine=None), STREAM
    ),
    "a first token of a busy engine that is late": Stall(
        30,
        lambda spent: seen(spent, engine=engine(spent)),
        "first_token_timeout_seconds",
        others=True,
        limits=replace(PROFILE, first_token_seconds=30.0),
    ),
    "a request with tools that takes too long in all": Stall(
        300,
        lambda spent: seen(spent, generating(last_token=START + spent, in_engine=False), engine=None),
        "absolute_timeout_seconds",
        others=True,
        limits=replace(PROFILE, absolute_seconds=300.0),
        reason=Reason.DEADLINE_EXCEEDED,
    ),
}


@pytest.mark.parametrize("what", STALLS)
def test_stall_ends_its_request_at_the_limit_and_restarts_an_engine_that_serves_no_other(what: str) -> None:
    stall = STALLS[what]
    at, verdict = step(ProgressPolicy(stall.limits), range(1_000), stall.look)
    (failure,) = verdict.failures
    assert (at, failure.key, failure.reason) == (stall.seconds, 1, stall.reason)
    assert stall.limit in failure.message
    assert (stall.limit in verdict.restart) is not stall.others


def test_looping_engine_is_restarted_after_two_abandoned_requests() -> None:
    at, verdict = step(ProgressPolicy(PROFILE), range(1_000), lambda spent: looping(spent, 300.0))
    assert (at, verdict.failures) == (600.0, ())
    assert verdict.restart == "2 requests in a row ended without a token or a report on their prompt"


def test_engine_frozen_mid_prefill_is_detected_one_limit_later() -> None:
    policy, progress = ProgressPolicy(PROFILE), START
    for spent in range(600):
        verdict = policy.look(seen(spent, request(last_progress=progress), engine=engine(min(spent, 50.0))))
        if verdict.working:
            progress = START + spent  # what the watchdog notes on the record
        if verdict.restart:
            break
    assert spent == 50 + 120


def every_second(until: int) -> Iterable[float]:
    return (START + second for second in range(until + 1))


@pytest.mark.parametrize(
    "signs", [request(), generating(), request(in_engine=False)], ids=["prefill", "answer", "tool"]
)
def test_machine_suspend_of_an_hour_causes_no_timeout(signs: RequestSample) -> None:
    policy = ProgressPolicy(replace(PROFILE, absolute_seconds=100.0, first_token_seconds=100.0))
    for now in (START, START + 1, START + 3600, START + 3601):
        assert policy.look(Observation(now=now, requests=[signs], engine=engine())) == Verdict()


def test_time_before_and_after_a_machine_suspend_counts() -> None:
    moments = [*range(51), *range(3600, 3660)]
    assert step(ProgressPolicy(PROFILE), moments, lambda spent: seen(spent, generating(), engine=None))[0] == 3609


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


LIMIT = 300.0


def _stalled_at(cpu_seconds: Callable[[float], float], until: int) -> float | None:
    watch = LoadStallDetector(LoadSample(0.0, 0, 0.0))
    for half_second in range(2 * until):
        now = half_second / 2
        watch.observe(LoadSample(now, 0, cpu_seconds(now)))
        if watch.stalled(now, LIMIT):
            return now
    return None


def test_work_starting_shortly_before_the_limit_prevents_a_stall() -> None:
    """A wait for a slow disk, followed by the conversion of weights."""
    assert _stalled_at(lambda now: max(0.0, now - 290.0), 900) is None


def test_output_is_progress_of_a_load() -> None:
    watch = LoadStallDetector(LoadSample(0.0, 0, 0.0))
    watch.observe(LoadSample(LIMIT - 1.0, 10, 0.0))
    assert not watch.stalled(LIMIT, LIMIT)
    assert watch.stalled(2 * LIMIT, LIMIT)


def test_short_burst_of_work_is_not_progress() -> None:
    assert _stalled_at(lambda now: 0.5 if now > 200 else 0.0, 900) == LIMIT


def test_work_once_a_minute_is_progress() -> None:
    assert _stalled_at(lambda now: 4.0 * (now // 60), 3600) is None


def test_load_stalls_one_limit_after_work_ended() -> None:
    assert _stalled_at(lambda now: min(now, 100.0), 900) == 100.0 + LIMIT


PREAMBLE = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
HALF_READ = {**PREAMBLE, "prompt_progress": {"total": 100, "cache": 0, "processed": 50, "time_ms": 9}}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def _token(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta}]}


@pytest.mark.parametrize(
    ("chunks", "token", "prefill"),
    [
        ([], False, False),
        ([PREAMBLE], False, False),
        ([USAGE], False, False),
        ([_token(content="")], False, False),
        ([HALF_READ], False, True),
        ([_token(content="a")], True, False),
        ([_token(reasoning_content="a")], True, False),
        ([_token(tool_calls=[{"index": 0, "function": {"name": "f"}}])], True, False),
        ([{"choices": [{"text": "a"}]}], True, False),
        ([PREAMBLE, HALF_READ, _token(content="a")], True, True),
    ],
)
def test_chunks_that_count_as_progress(chunks: list[Any], token: bool, prefill: bool) -> None:
    reader = StreamReader(1, 1)
    reader.read([msgspec.json.encode(chunk) for chunk in chunks])
    assert (reader.took_token, reader.took_prefill) == (token, prefill)


def test_progress_refers_to_the_last_read_only() -> None:
    reader = StreamReader(1, 1)
    reader.read([msgspec.json.encode(_token(content="a"))])
    reader.read([DONE])
    assert not reader.took_token


def test_invisible_token_is_progress_once_the_answer_has_started() -> None:
    reader = StreamReader(1, 1)
    reader.read([msgspec.json.encode(_token(content="a"))])
    assert reader.read([msgspec.json.encode(_token(content=""))]) == []
    assert reader.took_token
    reader.read([msgspec.json.encode(USAGE)])
    assert not reader.took_token

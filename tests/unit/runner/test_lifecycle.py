"""The state machine of an instance: possible events and their transitions, and the pauses between restarts."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.policy.backoff import RestartHistory, RestartLimits
from runner_svc.policy.engine_failures import ADVICE
from runner_svc.policy.lifecycle import (
    MAX_DETAIL_CHARS,
    POSSIBLE,
    Command,
    Event,
    EventKind,
    ImpossibleEvent,
    LifeRules,
    LifeState,
    Phase,
    needs_restart,
    step,
    with_log_command,
)
from weft.kernel.errors.reasons import Reason

OURS = LifeRules(limits=RestartLimits(max_deaths=3, window_seconds=30.0, first_pause_seconds=10.0))
ATTACHED = LifeRules(attached=True, can_wake=False)
FAULTS = (
    Reason.SERVER_DIED,
    Reason.OUT_OF_MEMORY,
    Reason.LOAD_STALLED,
    Reason.TEMPLATE_FAILED,
    Reason.STALL_TIMEOUT,
    Reason.CONNECT_FAILED,
    Reason.INSUFFICIENT_MEMORY,
    Reason.SERVICE_UNAVAILABLE,
    Reason.LEASE_LOST,
)
KINDS = tuple(EventKind)
PHASES = {
    Command.NOTHING: {Phase.IDLE},
    Command.LOAD: {Phase.LOADING},
    Command.WAKE: {Phase.LOADING},
    Command.SERVE: {Phase.READY, Phase.DRAINING},
    Command.CLEAR: {Phase.STOPPING},
    Command.SLEEP: {Phase.STOPPING},
    Command.REST: {Phase.HIBERNATING, Phase.FAILED},
    Command.SEEK: {Phase.HIBERNATING, Phase.FAILED},
    Command.PAUSE: {Phase.CRASH_LOOP, Phase.FAILED},
    Command.END: {Phase.STOPPING},
}


def _event(kind: EventKind, reason: Reason = Reason.SERVER_DIED, how: str = "signal SIGKILL") -> Event:
    if kind in (EventKind.LOAD_FAILED, EventKind.WAKE_FAILED, EventKind.DIED, EventKind.FAULTED):
        return Event(kind, reason, how)
    return Event(kind, how=how if kind in (EventKind.WAITS, EventKind.BROKE, EventKind.MISSING) else "")


def _after(*events: Event, rules: LifeRules = OURS, now: float = 0.0) -> LifeState:
    state = LifeState()
    for event in events:
        state = step(state, event, now, rules).state
    return state


LOADING = (Event(EventKind.BEGUN),)
SERVING = (Event(EventKind.BEGUN), Event(EventKind.LOADED))


@pytest.mark.parametrize(("doing", "kind"), list(product(Command, KINDS)))
def test_impossible_event_is_refused_by_name_and_every_other_has_a_transition(doing: Command, kind: EventKind) -> None:
    phase = min(PHASES[doing])
    state = LifeState(doing=doing, phase=phase, resume_at=0.0)
    if kind in POSSIBLE[doing]:
        after = step(state, _event(kind), 1.0, OURS).state
        assert after.phase in PHASES[after.doing]
    else:
        with pytest.raises(ImpossibleEvent, match=f"{kind.name} while doing {doing.name}"):
            step(state, _event(kind), 1.0, OURS)


def test_drain_requested_during_a_load_starts_after_it() -> None:
    assert _after(*LOADING, Event(EventKind.DRAIN_ASKED), Event(EventKind.LOADED)).phase is Phase.DRAINING


@pytest.mark.parametrize("kind", [EventKind.DIED, EventKind.FAULTED])
def test_dead_or_unusable_backend_is_cleared_and_restarted_immediately(kind: EventKind) -> None:
    state = _after(*SERVING, _event(kind))
    assert (state.doing, state.phase, state.detail) == (Command.CLEAR, Phase.STOPPING, "signal SIGKILL")
    transition = step(state, Event(EventKind.CLEARED), 1.0, OURS)
    assert transition.command is Command.LOAD
    assert (transition.state.phase, transition.state.detail) == (Phase.LOADING, "signal SIGKILL")
    assert transition.state.history.total == 1


def test_failing_load_is_retried_until_it_is_a_crash_loop_with_the_reason() -> None:
    state = _after(*LOADING)
    for now in (0.0, 1.0, 2.0):
        transition = step(state, Event(EventKind.LOAD_FAILED, Reason.SERVER_DIED, "exit code 1"), now, OURS)
        state = transition.state
        assert transition.command is (Command.LOAD if now < 2.0 else Command.PAUSE)
    assert (state.phase, state.detail) == (Phase.CRASH_LOOP, "exit code 1; next start in 10 s")
    with pytest.raises(ImpossibleEvent):
        step(state, Event(EventKind.PAUSE_OVER), 11.9, OURS)
    assert step(state, Event(EventKind.PAUSE_OVER), 12.0, OURS).command is Command.LOAD
    assert step(state, Event(EventKind.SLEEP_ASKED), 3.0, OURS).state.phase is Phase.HIBERNATING


def test_missing_file_is_a_failure_and_no_crash_loop_of_an_engine_that_never_ran() -> None:
    missing = Event(EventKind.LOAD_FAILED, Reason.CONNECT_FAILED, "there is no file /m.gguf", unstarted=True)
    state, now = _after(*LOADING), 0.0
    for pause in (10, 20):
        state = step(state, missing, now, OURS).state
        assert (state.doing, state.phase, state.history.total) == (Command.PAUSE, Phase.FAILED, 0)
        assert state.detail == f"there is no file /m.gguf; next try in {pause} s"
        now = state.resume_at or 0.0
        state = step(state, Event(EventKind.PAUSE_OVER), now, OURS).state
    assert state.doing is Command.LOAD


def test_load_with_insufficient_memory_fails_with_advice_and_is_not_retried_automatically() -> None:
    state = _after(*LOADING, Event(EventKind.LOAD_FAILED, Reason.OUT_OF_MEMORY, "cannot allocate 9 GB"))
    assert (state.doing, state.phase) == (Command.PAUSE, Phase.FAILED)
    assert "cannot allocate 9 GB" in state.detail
    assert ADVICE in state.detail
    assert step(state, Event(EventKind.WAKE_ASKED), 9.9, OURS).command is Command.WAKE
    rests = step(state, Event(EventKind.PAUSE_OVER), 10.0, OURS)
    assert (rests.command, rests.state.phase, rests.state.detail) == (Command.REST, Phase.HIBERNATING, state.detail)
    again = step(rests.state, Event(EventKind.WAKE_ASKED), 11.0, OURS)
    assert again.command is Command.WAKE
    failed = step(
        again.state, Event(EventKind.WAKE_FAILED, Reason.OUT_OF_MEMORY, "cannot allocate 9 GB"), 12.0, OURS
    ).state
    assert (failed.phase, failed.resume_at) == (Phase.FAILED, 32.0)


def test_two_out_of_memory_crashes_fail_the_model() -> None:
    death = Event(EventKind.DIED, Reason.OUT_OF_MEMORY, "killed")
    once = _after(*SERVING, death, Event(EventKind.CLEARED))
    assert once.doing is Command.LOAD
    soon = step(step(once, Event(EventKind.LOADED), 20.0, OURS).state, death, 29.0, OURS).state
    assert step(soon, Event(EventKind.CLEARED), 29.0, OURS).state.phase is Phase.FAILED
    later = step(step(once, Event(EventKind.LOADED), 20.0, OURS).state, death, 31.0, OURS).state
    assert step(later, Event(EventKind.CLEARED), 31.0, OURS).state.phase is Phase.LOADING


@pytest.mark.parametrize("reason", [Reason.INSUFFICIENT_MEMORY, Reason.SERVICE_UNAVAILABLE])
def test_unavailable_memory_is_not_a_crash_and_the_next_call_retries(reason: Reason) -> None:
    for event in (
        Event(EventKind.LOAD_FAILED, reason, "needs 9 GiB"),
        Event(EventKind.WAKE_FAILED, reason, "needs 9 GiB"),
    ):
        begin = (
            LOADING
            if event.kind is EventKind.LOAD_FAILED
            else (*LOADING, Event(EventKind.SLEEP_ASKED), Event(EventKind.WAKE_ASKED))
        )
        state = _after(*begin, event)
        assert (state.doing, state.phase, state.detail) == (Command.REST, Phase.HIBERNATING, "needs 9 GiB")
        assert (state.history.total, state.resume_at) == (0, None)
        assert step(state, Event(EventKind.WAKE_ASKED), 1.0, OURS).command is Command.WAKE


@pytest.mark.parametrize("reason", [Reason.INVALID_ARGUMENT, Reason.OUT_OF_MEMORY, Reason.TEMPLATE_FAILED])
def test_failing_load_options_do_not_fail_the_configured_model(reason: Reason) -> None:
    woken = (*LOADING, Event(EventKind.SLEEP_ASKED), Event(EventKind.WAKE_ASKED))
    for begin, event in ((LOADING, EventKind.LOAD_FAILED), (woken, EventKind.WAKE_FAILED)):
        assert _after(*begin, Event(event, reason, "no")).phase is Phase.FAILED
        state = _after(*begin, Event(event, reason, "no", otherwise=True))
        assert (state.doing, state.phase, state.detail) == (Command.REST, Phase.HIBERNATING, "no")
        assert (state.history.total, state.resume_at) == (0, None)


def test_load_wait_reason_is_reported_without_other_changes() -> None:
    for before in (_after(*LOADING), _after(*LOADING, Event(EventKind.SLEEP_ASKED), Event(EventKind.WAKE_ASKED))):
        transition = step(before, Event(EventKind.WAITS, how="needs 9 GiB"), 1.0, OURS)
        assert transition.command is Command.NOTHING
        assert transition.state == replace(before, detail="needs 9 GiB")
        assert step(transition.state, Event(EventKind.WAITS), 1.0, OURS).state == before


@pytest.mark.parametrize("reason", [Reason.TEMPLATE_FAILED, Reason.INVALID_ARGUMENT])
def test_unreadable_file_is_retried_after_a_backoff(reason: Reason) -> None:
    state = _after(*LOADING, Event(EventKind.LOAD_FAILED, reason, "it is truncated"))
    assert (state.phase, state.detail) == (Phase.FAILED, "it is truncated; next start in 10 s")
    again = step(state, Event(EventKind.PAUSE_OVER), 10.0, OURS)
    assert (again.command, again.state.phase) == (Command.LOAD, Phase.LOADING)
    assert (
        step(again.state, Event(EventKind.LOAD_FAILED, reason, "it is truncated"), 11.0, OURS).state.resume_at == 31.0
    )


def test_attached_server_is_never_restarted() -> None:
    for event in (
        Event(EventKind.FAULTED, Reason.CONNECT_FAILED, "refused"),
        Event(EventKind.DIED, Reason.CONNECT_FAILED, "refused"),
    ):
        state = _after(*SERVING, event, Event(EventKind.CLEARED), rules=ATTACHED)
        assert (state.doing, state.phase, state.detail) == (Command.SEEK, Phase.FAILED, "refused")
        assert state.history.total == 0
    woken = replace(ATTACHED, can_wake=True)
    assert (
        _after(
            *SERVING, Event(EventKind.DIED, Reason.CONNECT_FAILED, "refused"), Event(EventKind.CLEARED), rules=woken
        ).doing
        is Command.REST
    )


@pytest.mark.parametrize(
    ("reason", "ours", "attached"),
    [
        (Reason.CONNECT_FAILED, True, True),
        (Reason.HEADERS_TIMEOUT, True, False),
        (Reason.SERVER_DIED, False, False),
        (Reason.BACKEND_ERROR, False, False),
        (Reason.BACKEND_PROTOCOL_ERROR, False, False),
        (Reason.CONTEXT_LENGTH_EXCEEDED, False, False),
    ],
)
def test_request_failures_that_require_a_restart(reason: Reason, ours: bool, attached: bool) -> None:
    assert needs_restart(reason, attached=False) is ours
    assert needs_restart(reason, attached=True) is attached


def test_state_after_a_crash_names_the_command_for_the_output_within_the_bound() -> None:
    assert with_log_command(LifeState(detail="exit code 1"), "qwen").detail == "exit code 1; output: weft logs qwen"
    assert len(with_log_command(LifeState(detail="x" * 5000), "qwen").detail) == MAX_DETAIL_CHARS


STEPS = st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.sampled_from(FAULTS), st.floats(0.0, 40.0)), max_size=80)
RULES = st.builds(
    LifeRules,
    attached=st.booleans(),
    can_wake=st.booleans(),
    woken_by_mesh=st.booleans(),
    start_asleep=st.booleans(),
    limits=st.just(OURS.limits),
)


def _pick(state: LifeState, number: int, reason: Reason) -> Event:
    """Returns one of the possible events, so that long histories are reached."""
    possible = sorted(POSSIBLE[state.doing], key=lambda kind: kind.name)
    return _event(possible[number % len(possible)], reason, "how " + "x" * 2000)


def _holds(before: LifeState, event: Event, after: LifeState, now: float, rules: LifeRules) -> None:
    assert after.phase in PHASES[after.doing]
    assert len(after.detail) <= MAX_DETAIL_CHARS
    assert after.history.total in (before.history.total, before.history.total + 1)
    assert len(after.history.deaths) <= rules.limits.max_deaths
    assert after.draining >= before.draining
    if event.kind is EventKind.WAITS:
        assert replace(after, detail=before.detail) == before
    if after.phase in (Phase.READY, Phase.DRAINING) and before.phase not in (Phase.READY, Phase.DRAINING):
        assert event.kind in (EventKind.LOADED, EventKind.SLEEP_FAILED)
    assert not (after.phase is Phase.READY and after.draining)
    if after.doing is Command.PAUSE and before.doing is not Command.PAUSE:
        assert after.resume_at is not None
        assert now + 10.0 <= after.resume_at <= now + rules.limits.max_pause_seconds
    if rules.attached:
        assert after.history.total == 0
        assert after.doing is not Command.PAUSE


@given(STEPS, RULES)
def test_no_event_sequence_leaves_the_allowed_transitions(
    steps: list[tuple[int, Reason, float]], rules: LifeRules
) -> None:
    state, now = LifeState(), 0.0
    for number, reason, passed in steps:
        now += passed
        event = _pick(state, number, reason)
        try:
            after = step(state, event, now, rules).state
        except ImpossibleEvent:
            assert event.kind is EventKind.PAUSE_OVER
            assert state.resume_at is not None
            assert now < state.resume_at
            continue
        _holds(state, event, after, now, rules)
        state = after
    # Whatever happened, an end is an end.
    for event in (Event(EventKind.END_ASKED), Event(EventKind.ENDED)):
        if event.kind in POSSIBLE[state.doing]:
            state = step(state, event, now, rules).state
    assert state.phase is Phase.IDLE


@given(st.lists(st.floats(0.0, 29.0), min_size=3, max_size=40))
def test_restart_rate_stays_within_the_limit_for_any_crash_rate(gaps: list[float]) -> None:
    """At most three starts between two pauses, unless the window between deaths was quiet."""
    state, now, since_pause = _after(*LOADING), 0.0, 0
    for gap in gaps:
        now += gap
        transition = step(state, Event(EventKind.LOAD_FAILED, Reason.SERVER_DIED, "x"), now, OURS)
        since_pause += 1
        if transition.command is Command.PAUSE:
            since_pause = 0
            assert transition.state.resume_at is not None
            now = transition.state.resume_at
            transition = step(transition.state, Event(EventKind.PAUSE_OVER), now, OURS)
        else:
            recent = [at for at in transition.state.history.deaths if now - at < OURS.limits.window_seconds]
            assert len(recent) < OURS.limits.max_deaths
        state = transition.state


def test_non_wakeable_server_detached_while_loading_is_polled_again() -> None:
    for woken_by_mesh, phase in ((True, Phase.HIBERNATING), (False, Phase.FAILED)):
        rules = replace(ATTACHED, woken_by_mesh=woken_by_mesh)
        state = _after(Event(EventKind.BEGUN), Event(EventKind.SLEEP_ASKED), rules=rules)
        assert (state.doing, state.phase) == (Command.SEEK, phase)


def _pauses(times: list[float], limits: RestartLimits) -> list[float]:
    history, pauses = RestartHistory(), []
    for now in times:
        history, pause = history.after_death(now, limits)
        pauses.append(pause)
    assert history.total == len(times)
    return pauses


def test_occasional_crash_is_followed_by_an_immediate_restart() -> None:
    assert _pauses([number * 31.0 for number in range(20)], RestartLimits()) == [0.0] * 20


def test_fifth_crash_in_thirty_seconds_is_a_crash_loop_with_growing_backoff() -> None:
    limits = RestartLimits(first_pause_seconds=10, max_pause_seconds=35)
    assert _pauses([float(now) for now in range(8)], limits) == [0, 0, 0, 0, 10, 20, 35, 35]


def test_quiet_period_resets_earlier_crash_loops() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 100.0, 101.0, 102.0, 103.0, 104.0]
    assert _pauses(times, RestartLimits())[-5:] == [0, 0, 0, 0, 10]


def test_backoff_grows_to_its_maximum_beyond_the_window() -> None:
    """A backend that dies at once after each pause was never healthy."""
    history, now, pauses = RestartHistory(), 0.0, []
    for _ in range(12):
        history, pause = history.after_death(now, RestartLimits())
        now += pause
        pauses.append(pause)
    assert pauses == [0, 0, 0, 0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_repeatable_crash_backs_off_immediately() -> None:
    limits = RestartLimits()
    history, first = RestartHistory().after_death(0.0, limits, must_pause=True)
    _, second = history.after_death(first, limits, must_pause=True)
    assert (first, second) == (10.0, 20.0)

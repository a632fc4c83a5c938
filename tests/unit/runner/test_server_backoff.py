"""The back-off of requests to a server or provider."""

import math

import pytest

from runner_svc.policy.backoff import (
    DEFAULT_BUSY_SECONDS,
    FIRST_SERVER_PAUSE_SECONDS,
    MAX_SERVER_PAUSE_SECONDS,
    ServerBackoff,
)
from weft.kernel.reasons import Reason

BUSY = Reason.BACKEND_NOT_READY
NEVER = math.inf


def test_who_was_never_busy_may_be_asked_at_once() -> None:
    assert ServerBackoff().seconds_to_wait(now=-1e9) == 0.0


def test_a_busy_provider_is_left_alone_for_as_long_as_it_said() -> None:
    pace = ServerBackoff()
    pace.note_busy(17.0, now=100.0)
    assert pace.seconds_to_wait(now=100.0) == 17.0
    assert pace.seconds_to_wait(now=116.0) == 1.0
    assert pace.seconds_to_wait(now=117.0) == 0.0


def test_a_shorter_word_does_not_undo_a_longer_one() -> None:
    pace = ServerBackoff()
    pace.note_busy(60.0, now=0.0)
    pace.note_busy(1.0, now=5.0)
    assert pace.seconds_to_wait(now=5.0) == 55.0


def test_one_that_does_not_say_for_how_long_is_left_alone_for_a_moment() -> None:
    pace = ServerBackoff()
    pace.note_busy(None, now=0.0)
    assert pace.seconds_to_wait(now=0.0) == DEFAULT_BUSY_SECONDS


def test_nothing_is_repeated_unless_the_operator_allows_it() -> None:
    assert ServerBackoff().pause_before_retry(BUSY, 0, now=0.0, give_up_at=NEVER) is None


def test_it_is_repeated_no_more_often_than_allowed() -> None:
    pace = ServerBackoff(max_retries=2)
    pauses = [pace.pause_before_retry(Reason.CONNECT_FAILED, retries, 0.0, NEVER) for retries in range(3)]
    assert pauses == [FIRST_SERVER_PAUSE_SECONDS, 2 * FIRST_SERVER_PAUSE_SECONDS, None]


@pytest.mark.parametrize("reason", set(Reason) - {BUSY, Reason.CONNECT_FAILED})
def test_what_may_have_been_worked_on_is_not_repeated(reason: Reason) -> None:
    assert ServerBackoff(max_retries=10).pause_before_retry(reason, 0, now=0.0, give_up_at=NEVER) is None


def test_the_pause_is_what_the_provider_asked_for_where_that_is_longer() -> None:
    pace = ServerBackoff(max_retries=1)
    pace.note_busy(40.0, now=0.0)
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=NEVER) == 40.0
    assert pace.pause_before_retry(BUSY, 0, now=39.9, give_up_at=NEVER) == FIRST_SERVER_PAUSE_SECONDS


def test_a_pause_that_would_end_too_late_is_none() -> None:
    pace = ServerBackoff(max_retries=1)
    pace.note_busy(40.0, now=0.0)
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=40.0) is None
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=40.1) == 40.0


def test_pauses_have_an_upper_bound() -> None:
    assert (
        ServerBackoff(max_retries=10).pause_before_retry(BUSY, 9, now=0.0, give_up_at=NEVER) == MAX_SERVER_PAUSE_SECONDS
    )

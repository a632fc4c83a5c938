"""The back-off of requests to a server or provider."""

import math

import pytest

from runner_svc.policy.backoff import (
    BUSY_REASONS,
    DEFAULT_BUSY_SECONDS,
    FIRST_SERVER_PAUSE_SECONDS,
    MAX_BUSY_SECONDS,
    MAX_SERVER_PAUSE_SECONDS,
    ServerBackoff,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

BUSY = Reason.BACKEND_NOT_READY
NEVER = math.inf


def limited(seconds: float | None = None) -> WeftError:
    return WeftError(Reason.RATE_LIMIT_EXCEEDED, "30 requests per minute", retry_after_seconds=seconds)


def test_server_that_was_never_busy_has_no_wait() -> None:
    assert ServerBackoff().seconds_to_wait(now=-1e9) == 0.0


def test_busy_provider_is_backed_off_for_its_retry_after() -> None:
    pace = ServerBackoff()
    pace.note_busy(limited(17.0), now=100.0)
    assert pace.seconds_to_wait(now=100.0) == 17.0
    assert pace.seconds_to_wait(now=116.0) == 1.0
    assert pace.seconds_to_wait(now=117.0) == 0.0


def test_shorter_retry_after_does_not_reduce_a_longer_one() -> None:
    pace = ServerBackoff()
    pace.note_busy(limited(60.0), now=0.0)
    pace.note_busy(limited(1.0), now=5.0)
    assert pace.seconds_to_wait(now=5.0) == 55.0


def test_busy_provider_without_retry_after_is_backed_off_briefly() -> None:
    pace = ServerBackoff()
    pace.note_busy(limited(None), now=0.0)
    assert pace.seconds_to_wait(now=0.0) == DEFAULT_BUSY_SECONDS


def test_requests_are_not_retried_unless_configured() -> None:
    assert ServerBackoff().pause_before_retry(BUSY, 0, now=0.0, give_up_at=NEVER) is None


def test_retries_are_limited_to_the_configured_number() -> None:
    pace = ServerBackoff(max_retries=2)
    pauses = [pace.pause_before_retry(Reason.CONNECT_FAILED, retries, 0.0, NEVER) for retries in range(3)]
    assert pauses == [FIRST_SERVER_PAUSE_SECONDS, 2 * FIRST_SERVER_PAUSE_SECONDS, None]


@pytest.mark.parametrize("reason", set(Reason) - BUSY_REASONS - {Reason.CONNECT_FAILED})
def test_request_that_may_have_been_processed_is_not_retried(reason: Reason) -> None:
    assert ServerBackoff(max_retries=10).pause_before_retry(reason, 0, now=0.0, give_up_at=NEVER) is None


def test_backoff_is_the_providers_retry_after_if_longer() -> None:
    pace = ServerBackoff(max_retries=1)
    pace.note_busy(limited(40.0), now=0.0)
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=NEVER) == 40.0
    assert pace.pause_before_retry(BUSY, 0, now=39.9, give_up_at=NEVER) == FIRST_SERVER_PAUSE_SECONDS


def test_request_is_not_retried_if_the_backoff_exceeds_its_deadline() -> None:
    pace = ServerBackoff(max_retries=1)
    pace.note_busy(limited(40.0), now=0.0)
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=40.0) is None
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=40.1) == 40.0


def test_backoff_has_an_upper_bound() -> None:
    assert (
        ServerBackoff(max_retries=10).pause_before_retry(BUSY, 9, now=0.0, give_up_at=NEVER) == MAX_SERVER_PAUSE_SECONDS
    )


def test_server_that_names_too_short_a_time_again_and_again_is_asked_less_often() -> None:
    pace, now, pauses = ServerBackoff(), 0.0, list[float]()
    for seconds in (0.3, 0.3, 0.3, 60.0):
        pace.note_busy(limited(seconds), now)
        pauses.append(round(pace.seconds_to_wait(now), 3))
        now += pauses[-1]
    assert pauses == [0.3, 2.0, 8.0, 60.0]


def test_server_that_names_no_time_is_asked_less_often_until_it_accepts_a_request() -> None:
    """One request of a caller became nine at the server."""
    pace, now, pauses = ServerBackoff(), 0.0, list[float]()
    for _ in range(5):
        error = limited()
        pace.note_busy(error, now)
        pace.note_busy(limited(), now)  # another request, at the same time
        assert error.retry_after_seconds == pace.seconds_to_wait(now)
        pauses.append(pace.seconds_to_wait(now))
        now += pauses[-1]
    assert pauses == [2.0, 8.0, MAX_BUSY_SECONDS, MAX_BUSY_SECONDS, MAX_BUSY_SECONDS]
    pace.note_open()
    pace.note_busy(limited(), now)
    assert pace.seconds_to_wait(now) == DEFAULT_BUSY_SECONDS

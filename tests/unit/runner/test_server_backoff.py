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


def test_server_that_was_never_busy_has_no_wait() -> None:
    assert ServerBackoff().seconds_to_wait(now=-1e9) == 0.0


def test_busy_provider_is_backed_off_for_its_retry_after() -> None:
    pace = ServerBackoff()
    pace.note_busy(17.0, now=100.0)
    assert pace.seconds_to_wait(now=100.0) == 17.0
    assert pace.seconds_to_wait(now=116.0) == 1.0
    assert pace.seconds_to_wait(now=117.0) == 0.0


def test_shorter_retry_after_does_not_reduce_a_longer_one() -> None:
    pace = ServerBackoff()
    pace.note_busy(60.0, now=0.0)
    pace.note_busy(1.0, now=5.0)
    assert pace.seconds_to_wait(now=5.0) == 55.0


def test_busy_provider_without_retry_after_is_backed_off_briefly() -> None:
    pace = ServerBackoff()
    pace.note_busy(None, now=0.0)
    assert pace.seconds_to_wait(now=0.0) == DEFAULT_BUSY_SECONDS


def test_requests_are_not_retried_unless_configured() -> None:
    assert ServerBackoff().pause_before_retry(BUSY, 0, now=0.0, give_up_at=NEVER) is None


def test_retries_are_limited_to_the_configured_number() -> None:
    pace = ServerBackoff(max_retries=2)
    pauses = [pace.pause_before_retry(Reason.CONNECT_FAILED, retries, 0.0, NEVER) for retries in range(3)]
    assert pauses == [FIRST_SERVER_PAUSE_SECONDS, 2 * FIRST_SERVER_PAUSE_SECONDS, None]


@pytest.mark.parametrize("reason", set(Reason) - {BUSY, Reason.CONNECT_FAILED})
def test_request_that_may_have_been_processed_is_not_retried(reason: Reason) -> None:
    assert ServerBackoff(max_retries=10).pause_before_retry(reason, 0, now=0.0, give_up_at=NEVER) is None


def test_backoff_is_the_providers_retry_after_if_longer() -> None:
    pace = ServerBackoff(max_retries=1)
    pace.note_busy(40.0, now=0.0)
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=NEVER) == 40.0
    assert pace.pause_before_retry(BUSY, 0, now=39.9, give_up_at=NEVER) == FIRST_SERVER_PAUSE_SECONDS


def test_request_is_not_retried_if_the_backoff_exceeds_its_deadline() -> None:
    pace = ServerBackoff(max_retries=1)
    pace.note_busy(40.0, now=0.0)
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=40.0) is None
    assert pace.pause_before_retry(BUSY, 0, now=0.0, give_up_at=40.1) == 40.0


def test_backoff_has_an_upper_bound() -> None:
    assert (
        ServerBackoff(max_retries=10).pause_before_retry(BUSY, 9, now=0.0, give_up_at=NEVER) == MAX_SERVER_PAUSE_SECONDS
    )

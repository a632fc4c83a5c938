"""When a publisher counts as lost, and when a task of it stalls: stepped by hand."""

import pytest

from runner_svc.policy.publisher_presence import Presence, PresenceLimits, check_seconds, is_stalled, loss_of

LIMITS = PresenceLimits(reconnect_seconds=5.0, silence_seconds=90.0, task_silence_seconds=120.0)


@pytest.mark.parametrize(
    ("last_request", "stream_lost", "now", "word"),
    [
        (0.0, None, 89.9, ""),
        (0.0, None, 90.0, "silence_timeout_seconds"),
        (80.0, None, 169.9, ""),
        (10.0, 10.0, 14.9, ""),
        (10.0, 10.0, 15.0, "reconnect_seconds"),
    ],
)
def test_a_publisher_is_lost_by_silence_or_without_a_stream(
    last_request: float, stream_lost: float | None, now: float, word: str
) -> None:
    why = loss_of(Presence(last_request=last_request, stream_lost=stream_lost), LIMITS, now)
    assert (word in why) if word else why == ""


def test_a_task_stalls_by_its_publisher_and_never_by_its_caller() -> None:
    assert not is_stalled(0.0, waits_for_caller=False, limits=LIMITS, now=119.9)
    assert is_stalled(0.0, waits_for_caller=False, limits=LIMITS, now=120.0)
    assert not is_stalled(0.0, waits_for_caller=True, limits=LIMITS, now=1e6)


def test_a_small_limit_is_looked_at_often_enough() -> None:
    assert check_seconds(LIMITS) == 1.0
    small = PresenceLimits(reconnect_seconds=0.2, silence_seconds=90.0, task_silence_seconds=120.0)
    assert check_seconds(small) == pytest.approx(0.05)

import pytest

from runner_svc.policy.redial import RedialLimits, RedialPolicy

ALMOST_ONE = 0.999_999


def test_the_wait_doubles_up_to_its_limit() -> None:
    policy = RedialPolicy()
    waits = [round(policy.failed(ALMOST_ONE), 2) for _ in range(9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


@pytest.mark.parametrize("sample", [0.0, 0.1, 0.5, 0.9])
def test_the_wait_is_anywhere_below_that(sample: float) -> None:
    policy = RedialPolicy()
    for _ in range(4):
        policy.failed(sample)
    assert policy.failed(sample) == max(0.05, sample * 8.0)


@pytest.mark.parametrize(("stood_seconds", "wait"), [(9.9, 16.0), (10.0, 0.5), (86_400.0, 0.5)])
def test_after_a_session_that_stood_the_next_failure_is_a_first_one(stood_seconds: float, wait: float) -> None:
    policy = RedialPolicy()
    for _ in range(5):
        policy.failed(ALMOST_ONE)
    policy.ended(stood_seconds)
    assert policy.failed(ALMOST_ONE) == pytest.approx(wait, abs=0.001)


def test_a_year_of_failures_is_no_overflow() -> None:
    policy = RedialPolicy(RedialLimits(max_seconds=10.0))
    assert max(policy.failed(ALMOST_ONE) for _ in range(5000)) <= 10.0

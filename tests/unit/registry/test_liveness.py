"""When a runner counts as alive."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_svc.mesh.policy.heartbeat import (
    Pulse,
    Retirement,
    Verdict,
    alive_pulse,
    decide_retirement,
    judge,
    lost,
    resumed,
    share_of,
)
from registry_svc.mesh.states import Standing
from registry_svc.registry_config import RegistryConfig

LIMITS = RegistryConfig(database_url="sqlite://", restart_grace_seconds=0.0)

GRACE = replace(LIMITS, restart_grace_seconds=90.0)

BACK = 49_910.0


@pytest.mark.parametrize(
    ("age_seconds", "verdict"), [(0.0, Verdict.KEEP), (89.999, Verdict.KEEP), (90.0, Verdict.SILENCE)]
)
def test_active_runner_becomes_silent_at_the_inactive_limit(age_seconds: float, verdict: Verdict) -> None:
    assert judge(alive_pulse(1_000.0), LIMITS, 0.0, 1_000.0 + age_seconds) is verdict


@pytest.mark.parametrize("standing", [Standing.SILENT, Standing.CLOSED])
@pytest.mark.parametrize(
    ("age_seconds", "verdict"), [(0.0, Verdict.KEEP), (14_399.999, Verdict.KEEP), (14_400.0, Verdict.FORGET)]
)
def test_inactive_runner_is_deleted_at_the_delete_limit_counted_from_its_loss(
    standing: Standing, age_seconds: float, verdict: Verdict
) -> None:
    pulse = lost(alive_pulse(1_000.0), standing, 1_090.0)
    assert judge(pulse, LIMITS, 0.0, 1_090.0 + age_seconds) is verdict


def test_no_runner_expires_during_the_grace_and_all_due_ones_at_its_end() -> None:
    silent = lost(alive_pulse(1_000.0), Standing.SILENT, 1_090.0)
    assert judge(alive_pulse(1_000.0), GRACE, BACK, 49_999.9) is Verdict.KEEP
    assert judge(silent, GRACE, BACK, 49_999.9) is Verdict.KEEP
    assert judge(alive_pulse(1_000.0), GRACE, BACK, 50_000.0) is Verdict.SILENCE
    assert judge(silent, GRACE, BACK, 50_000.0) is Verdict.FORGET


def test_grace_never_shortens_a_lifetime() -> None:
    assert judge(alive_pulse(49_999.0), GRACE, BACK, 50_000.0) is Verdict.KEEP


def test_heartbeat_revives_a_runner_in_any_state() -> None:
    assert alive_pulse(5.0) == Pulse(standing=Standing.ACTIVE, alive_monotonic=5.0, lost_monotonic=None)
    assert alive_pulse(5.0).active


def test_closed_runner_keeps_the_time_it_was_lost() -> None:
    silent = lost(alive_pulse(0.0), Standing.SILENT, 90.0)
    closed = lost(silent, Standing.CLOSED, 500.0)
    assert (closed.standing, closed.lost_monotonic) == (Standing.CLOSED, 90.0)


def test_ages_from_before_a_restart_continue() -> None:
    pulse = resumed(Standing.SILENT, heard_ago_seconds=190.0, lost_ago_seconds=100.0, now=1_000.0)
    assert (pulse.alive_monotonic, pulse.lost_monotonic) == (810.0, 900.0)


def test_ages_from_the_future_count_as_zero() -> None:
    pulse = resumed(Standing.SILENT, heard_ago_seconds=-1e9, lost_ago_seconds=-1e9, now=1_000.0)
    assert (pulse.alive_monotonic, pulse.lost_monotonic) == (1_000.0, 1_000.0)


def test_runner_expirations_are_spread_after_a_grace() -> None:
    early, late = alive_pulse(1_000.0), lost(alive_pulse(1_000.0), Standing.SILENT, 1_090.0)
    assert judge(early, GRACE, BACK, 50_014.9, share=0.5) is Verdict.KEEP
    assert judge(early, GRACE, BACK, 50_015.0, share=0.5) is Verdict.SILENCE
    assert judge(late, GRACE, BACK, 50_014.9, share=0.5) is Verdict.KEEP
    assert judge(late, GRACE, BACK, 50_015.0, share=0.5) is Verdict.FORGET


def test_runner_with_a_heartbeat_after_the_restart_is_not_spread() -> None:
    assert judge(alive_pulse(49_910.0), GRACE, BACK, 50_000.0, share=0.99) is Verdict.SILENCE


def test_wakeable_host_is_kept_longer_but_becomes_silent_at_the_same_time() -> None:
    asleep = lost(alive_pulse(0.0), Standing.SILENT, 90.0)
    assert judge(alive_pulse(0.0), LIMITS, 0.0, 90.0, wakeable=True) is Verdict.SILENCE
    assert judge(asleep, LIMITS, 0.0, 90.0 + 604_799.9, wakeable=True) is Verdict.KEEP
    assert judge(asleep, LIMITS, 0.0, 90.0 + 604_800.0, wakeable=True) is Verdict.FORGET


def test_keep_time_below_the_delete_limit_does_not_shorten_it() -> None:
    asleep = lost(alive_pulse(0.0), Standing.SILENT, 90.0)
    assert judge(asleep, replace(LIMITS, hibernating_keep_seconds=1.0), 0.0, 14_489.9, wakeable=True) is Verdict.KEEP


@settings(deadline=None)  # a busy machine is not a failure
@given(st.text())
def test_share_is_deterministic_and_within_the_spread(name: str) -> None:
    assert share_of(name) == share_of(name)
    assert 0.0 <= share_of(name) < 1.0


def test_ten_thousand_shares_are_spread_evenly_over_six_sweeps() -> None:
    counts = [0] * 6
    for number in range(10_000):
        counts[int(share_of(f"runner-{number}") * 6)] += 1
    assert max(counts) < 2_000


@pytest.mark.parametrize(
    ("standing", "reported", "process_ended", "lease_count", "outcome"),
    [
        (Standing.CLOSED, True, False, 0, Retirement.RETIRED),
        (Standing.SILENT, True, False, 0, Retirement.RETIRED),
        (Standing.ACTIVE, False, True, 0, Retirement.RETIRED),
        (Standing.ACTIVE, False, False, 0, Retirement.LIVES),
        (Standing.ACTIVE, True, True, 0, Retirement.LIVES),
        (Standing.ACTIVE, True, False, 1, Retirement.LIVES),
        (Standing.CLOSED, False, True, 1, Retirement.HOLDS_MEMORY),
        (Standing.ACTIVE, False, True, 1, Retirement.HOLDS_MEMORY),
    ],
    ids=[
        "closed",
        "silent",
        "killed, and its owner knows",
        "perhaps alive",
        "heard, whatever its owner says",
        "alive with memory",
        "closed, its memory still booked",
        "killed, its memory still booked",
    ],
)
def test_only_a_runner_without_process_and_leases_is_retired(
    standing: Standing, *, reported: bool, process_ended: bool, lease_count: int, outcome: Retirement
) -> None:
    decided = decide_retirement(
        standing=standing, reported=reported, process_ended=process_ended, lease_count=lease_count
    )
    assert decided is outcome

"""The order of operations, pools, times and refusals: pure decisions."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry_svc.operations.audit_log import (
    MAX_COUNTED_REASONS,
    MAX_ENTRIES_PER_WINDOW,
    OTHER_REASONS,
    WINDOW_SECONDS,
    RefusalWindow,
)
from registry_svc.operations.live_operations import LiveOperation, startable
from registry_svc.operations.policy.loads import LAST_LOADS, MAX_MODELS, LoadTimes, PoolMember, PoolPlan, plan_pool
from weft.api.operations.v1.operation_pb2 import Operation

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(seconds=10)


def unfinished(name: str, *subjects: str, running: bool = False) -> LiveOperation:
    task: Any = object() if running else None
    return LiveOperation(operation=Operation(name=name), subjects=frozenset(subjects), task=task)


def started(unfinished: Sequence[LiveOperation], max_running: int) -> list[str]:
    return [each.operation.name for each in startable(unfinished, max_running)]


def test_operations_on_one_model_run_in_order_of_acceptance() -> None:
    first, second, third = unfinished("1", "m"), unfinished("2", "m"), unfinished("3", "n")
    assert started([first, second, third], 10) == ["1", "3"]
    assert started([unfinished("1", "m", running=True), second, third], 10) == ["3"]
    assert started([second, third], 10) == ["2", "3"]


def test_operation_is_not_overtaken_by_a_later_one_on_its_models() -> None:
    running = unfinished("1", "m", running=True)
    assert started([running, unfinished("2", "m", "n"), unfinished("3", "n")], 10) == []


def test_running_operations_are_limited() -> None:
    running = [unfinished(str(number), f"m{number}", running=True) for number in range(3)]
    assert started([*running, unfinished("3", "x"), unfinished("4", "y")], 4) == ["3"]
    assert started([*running, unfinished("3", "x")], 3) == []


def test_operation_without_subjects_blocks_no_other() -> None:
    assert started([unfinished("1", "m", running=True), unfinished("2"), unfinished("3")], 10) == ["2", "3"]


@given(
    st.lists(
        st.tuples(st.frozensets(st.sampled_from("abcd"), max_size=2), st.booleans()),
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_running_operations_share_no_model_and_one_can_always_start(
    wanted: list[tuple[frozenset[str], bool]], max_running: int
) -> None:
    # Only what the rule itself would have started counts as running.
    queue = [unfinished(str(at), *subjects) for at, (subjects, _) in enumerate(wanted)]
    chosen = set(started(queue, max_running))
    queue = [unfinished(each.operation.name, *each.subjects, running=each.operation.name in chosen) for each in queue]
    assert startable(queue, max_running) == [] or len(chosen) < max_running
    subjects = [name for each in queue if each.task is not None for name in each.subjects]
    assert len(subjects) == len(set(subjects))
    assert len(chosen) <= max_running
    assert chosen or not queue


def member(name: str, *, loaded: bool = False, used: int = 0, reachable: bool = True) -> PoolMember:
    return PoolMember(model=name, reachable=reachable, loaded=loaded, slots_used=used)


def test_hibernating_members_are_loaded_until_enough_and_more_are_tried_after_a_failure() -> None:
    plan = plan_pool([member("a", loaded=True), member("c"), member("b"), member("d", reachable=False)], 2)
    assert plan == PoolPlan(keep=("a",), load=("b", "c"), missing=1, unload=())


def test_excess_members_are_unloaded_with_idle_ones_first() -> None:
    members = [member("a", loaded=True), member("b", loaded=True, used=2), member("c", loaded=True, used=1)]
    assert plan_pool(members, 1) == PoolPlan(keep=("b",), load=(), missing=0, unload=("a", "c"))


def test_member_of_an_offline_runner_does_not_count() -> None:
    plan = plan_pool([member("a", loaded=True, reachable=False), member("b")], 1)
    assert plan == PoolPlan(keep=(), load=("b",), missing=1, unload=())


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), max_size=8),
    st.integers(1, 8),
)
def test_plan_reaches_the_replica_count_or_all_available(drawn: list[tuple[bool, bool, int]], replicas: int) -> None:
    members = [
        member(f"m{at}", loaded=loaded, used=used, reachable=reachable)
        for at, (loaded, reachable, used) in enumerate(drawn)
    ]
    plan = plan_pool(members, replicas)
    there = sum(each.reachable for each in members)
    assert len(plan.keep) + min(plan.missing, len(plan.load)) == min(replicas, there)
    assert not {*plan.keep} & {*plan.unload}
    assert not (plan.load and plan.unload)


def test_load_duration_estimate_is_the_median_of_recent_loads() -> None:
    times = LoadTimes()
    assert times.eta_seconds("m", 0.0) is None
    for seconds in (1000.0, 10.0, 30.0, 20.0, 40.0, 50.0):
        times.learn("m", seconds)
    assert LAST_LOADS == 5
    assert times.eta_seconds("m", 0.0) == 30.0
    assert times.eta_seconds("m", 12.0) == 18.0
    assert times.eta_seconds("m", 31.0) is None
    assert times.eta_seconds("n", 0.0) is None


def test_load_times_of_the_least_recently_loaded_model_are_evicted_first() -> None:
    times = LoadTimes()
    for number in range(MAX_MODELS):
        times.learn(f"m{number}", 1.0)
    times.learn("m0", 1.0)
    times.learn("one more", 1.0)
    assert times.eta_seconds("m1", 0.0) is None
    assert times.eta_seconds("m0", 0.0) == 1.0


def test_first_refusals_of_a_window_are_written_and_the_rest_counted_by_reason() -> None:
    window = RefusalWindow()
    assert window.closed(NOW) is None
    assert [window.takes(NOW) for _ in range(MAX_ENTRIES_PER_WINDOW)] == [True] * MAX_ENTRIES_PER_WINDOW
    for why in ("b", "a", "b"):
        assert not window.takes(LATER)
        window.count(why)
    assert window.closed(NOW + timedelta(seconds=WINDOW_SECONDS - 1)) is None
    end = NOW + timedelta(seconds=WINDOW_SECONDS)
    counted = window.closed(end)
    assert counted is not None
    assert (counted.since, counted.until, counted.count, counted.reasons) == (NOW, end, 3, {"a": 1, "b": 2})
    assert window.takes(end)
    assert window.closed(end + timedelta(seconds=WINDOW_SECONDS)) is None


def test_refusal_counts_are_bounded_during_a_flood() -> None:
    window = RefusalWindow()
    window.takes(NOW)
    for number in range(10_000):
        window.count(f"why {number}")
    counted = window.closed(NOW, immediately=True)
    assert counted is not None
    assert (counted.count, len(counted.reasons)) == (10_000, MAX_COUNTED_REASONS + 1)
    assert counted.reasons[OTHER_REASONS] == 10_000 - MAX_COUNTED_REASONS


def test_clock_set_back_closes_a_refusal_window() -> None:
    window = RefusalWindow()
    window.takes(NOW)
    window.count("why")
    assert window.closed(NOW - timedelta(days=1)) is not None


@pytest.mark.parametrize(("ends_at", "told"), [(12.5, 2.5), (10.0, None), (9.0, None), (None, None)])
def test_overdue_eta_is_unknown_and_not_zero(ends_at: float | None, told: float | None) -> None:
    live = LiveOperation(operation=Operation(), subjects=frozenset(), ends_at=ends_at)
    message = live.shown(10.0)
    assert (message.eta.ToNanoseconds() / 1e9 if message.HasField("eta") else None) == told

"""Which prefixes are processed after a load."""

import pytest

from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.expected_prefixes import (
    MAX_PREFIXES,
    MAX_STEP_TOKENS,
    MAX_TRIES,
    ExpectedPrefix,
    ExpectedPrefixes,
    next_step_tokens,
)


def _of(agent: str, tenant: str = "default") -> ExpectedPrefix:
    return ExpectedPrefix(agent, Partition(tenant))


def _due(expected: ExpectedPrefixes, load: int) -> list[str]:
    due = iter(lambda: expected.take_due(load, 99.0), None)
    return [prefix.agent for prefix in due if prefix is not None]


def test_used_prefixes_come_before_unused_ones_and_the_last_used_first_after_each_load() -> None:
    expected = ExpectedPrefixes()
    expected.note(_of("a"), 1, 1.0)
    expected.note(_of("b"), 1, 2.0)
    expected.add_unused([_of("a"), _of("c"), _of("d"), _of("e")])
    for load in (2, 3):
        assert _due(expected, load) == ["b", "a", "c", "d"]
        for agent in "bacd":
            expected.note_processed(_of(agent))


def test_prefix_that_a_request_used_after_the_load_is_not_due() -> None:
    expected = ExpectedPrefixes()
    expected.add_unused([_of("a"), _of("b")])
    expected.note(_of("a"), 1, 5.0)
    assert _due(expected, 1) == ["b"]


def test_taken_prefix_is_not_processed_if_it_was_used_forgotten_or_has_expired() -> None:
    """A flushed prompt was in the cache again after the flush."""
    expected = ExpectedPrefixes()
    announced = ExpectedPrefix("", Partition("c"), (b"1",))
    expected.add_unused([_of("a"), _of("b", "tenant")])
    expected.note(announced, 0, 1.0, until=100.0)
    assert len(_due(expected, 1)) == 3
    taken = [announced, _of("a"), _of("b", "tenant")]
    assert [expected.is_taken(prefix, 99.0) for prefix in taken] == [True, True, True]
    expected.note(_of("a"), 1, 99.0)
    expected.forget("tenant", None)
    assert [expected.is_taken(prefix, 100.0) for prefix in taken] == [False, False, False]


def test_agents_that_are_gone_leave_their_places() -> None:
    expected = ExpectedPrefixes()
    announced = ExpectedPrefix("", Partition("a"), (b"1",))
    expected.note(announced, 0, 1.0)
    for agent in ("a", "b", "c"):
        expected.note(_of(agent), 0, 2.0)
    expected.keep_agents({"c"})
    expected.add_unused([_of("d"), _of("e")])
    assert _due(expected, 1) == ["c", "", "d", "e"]


def test_only_the_last_used_prefixes_are_remembered() -> None:
    expected = ExpectedPrefixes()
    for number in range(MAX_PREFIXES + 2):
        expected.note(_of("a", f"tenant-{number}"), 1, float(number))
    assert len(_due(expected, 2)) == MAX_PREFIXES


def test_processed_prefix_is_due_after_the_next_load() -> None:
    expected = ExpectedPrefixes()
    expected.add_unused([_of("a")])
    (agent,) = _due(expected, 1)
    expected.note_processed(_of(agent))
    assert (_due(expected, 1), _due(expected, 2)) == ([], ["a"])


def test_prefix_with_which_the_engine_ends_again_and_again_is_due_only_after_a_request_used_it() -> None:
    expected = ExpectedPrefixes()
    found = []
    for load in (1, 2, 3, 4):
        expected.add_unused([_of("a")])
        found += _due(expected, load)
    assert found == ["a"] * MAX_TRIES
    expected.note(_of("a"), 4, 5.0)
    assert _due(expected, 5) == ["a"]


def test_announced_prefix_is_expected_until_its_time_has_passed_and_from_its_partition_only() -> None:
    expected = ExpectedPrefixes()
    expected.note(ExpectedPrefix("", Partition("a"), (b"1", b"2")), 0, 1.0, until=10.0)
    longer = (b"1", b"2", b"3")
    assert expected.announces(Partition("a"), longer, 9.0)
    assert not expected.announces(Partition("a"), (b"1", b"3"), 9.0)
    assert not expected.announces(Partition("b"), longer, 9.0)
    assert not expected.announces(Partition("a"), longer, 10.0)
    assert expected.take_due(1, 10.0) is None
    assert expected.take_due(1, 9.0) is not None


@pytest.mark.parametrize(
    ("tokens", "seconds", "next_size"), [(64, 0.25, 64), (64, 0.05, 320), (512, 4.0, 32), (64, 0.0, MAX_STEP_TOKENS)]
)
def test_next_step_takes_a_quarter_of_a_second(tokens: int, seconds: float, next_size: int) -> None:
    assert next_step_tokens(tokens, seconds) == next_size

"""The list of kept prompts and its budget."""

from dataclasses import replace

from runner_svc.policy.cache_directory import Partition, common_marks
from runner_svc.policy.kept_prompts import KeptPrompt, KeptPrompts

A, B = Partition("a"), Partition("b")


def _marks(name: str, count: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{number}".encode() for number in range(count))


def _kept(name: str, count: int = 3, size: int = 10, partition: Partition = A) -> KeptPrompt:
    return KeptPrompt(name=f"{name}{count}", partition=partition, marks=_marks(name, count), byte_count=size)


def test_common_marks_counts_the_common_prefix() -> None:
    for count in range(5):
        assert common_marks(_marks("x", 4), (*_marks("x", count)[:4], b"other")) == min(count, 4)
    assert common_marks((), _marks("x", 2)) == 0


def test_longer_turn_of_a_conversation_replaces_the_earlier_one() -> None:
    kept = KeptPrompts(100)
    first, second = _kept("x", 3), _kept("x", 5)
    kept.add(first)
    assert kept.add(second) == [first]
    assert (len(kept), kept.byte_count) == (1, 10)


def test_expected_prompts_are_evicted_last() -> None:
    kept = KeptPrompts(30, lambda prompt: prompt.name.startswith("x"))
    prompts = [_kept(name) for name in "xyz"]
    for prompt in prompts:
        kept.add(prompt)
    assert kept.add(_kept("w")) == [prompts[1]]
    assert kept.make_room(30) == [prompts[2], _kept("w"), prompts[0]]


def test_least_recently_used_prompts_are_evicted() -> None:
    kept = KeptPrompts(30)
    prompts = [_kept(name) for name in "xyz"]
    for prompt in prompts:
        kept.add(prompt)
    kept.use(prompts[0])
    assert kept.add(_kept("w")) == [prompts[1]]
    assert kept.byte_count == 30


def test_prompts_that_save_the_fewest_seconds_per_byte_are_evicted_first() -> None:
    kept = KeptPrompts(30)
    prompts = [replace(_kept(name), seconds=seconds) for name, seconds in (("x", 9.0), ("y", 1.0), ("z", 5.0))]
    for prompt in prompts:
        kept.add(prompt)
    assert kept.make_room(20) == [prompts[1], prompts[2]]


def test_prompt_that_saves_much_is_evicted_once_it_was_not_used_for_long() -> None:
    kept = KeptPrompts(20)
    large = replace(_kept("x"), seconds=50.0)
    kept.add(large)
    evicted = [kept.add(replace(_kept(f"y{number}"), seconds=10.0)) for number in range(20)]
    assert [large] in evicted[5:]
    assert [large] not in evicted[:5]


def test_prompt_beyond_the_whole_budget_evicts_nothing() -> None:
    kept = KeptPrompts(30)
    kept.add(_kept("x"))
    large = _kept("y", size=31)
    assert kept.add(large) == [large]
    assert len(kept) == 1


def test_prompt_is_found_only_in_its_partition() -> None:
    kept = KeptPrompts(30)
    kept.add(_kept("x", 4))
    assert kept.best(A, _marks("x", 9))[1] == 4
    assert kept.best(B, _marks("x", 9)) == (None, 0)
    assert kept.best(None, _marks("x", 9)) == (None, 0)


def test_flush_of_a_tenant_keeps_the_others() -> None:
    kept = KeptPrompts(30)
    kept.add(_kept("x"))
    other = _kept("y", partition=B)
    kept.add(other)
    assert kept.forget("b", None) == [other]
    assert kept.byte_count == 10


def test_space_is_freed_before_a_prompt_is_saved() -> None:
    kept = KeptPrompts(30)
    oldest = _kept("x")
    kept.add(oldest)
    kept.add(_kept("y"))
    assert kept.make_room(20) == [oldest]
    assert kept.make_room(31) is None
    assert kept.byte_count == 10

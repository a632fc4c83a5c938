"""Which prefixes an engine holds, from the blocks that it reports."""

import pytest

from runner_svc.policy import engine_blocks
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.engine_blocks import (
    ClearedCache,
    EngineBlocks,
    PrefixChanges,
    PromptPrefixes,
    RemovedBlocks,
    StoredBlocks,
)

BLOCK_TOKENS = 128
"""Two blocks have the 256 tokens of a prefix of 1,024 characters."""


def _prompt(*digests: int, tenant: str = "t", tag: str = "") -> PromptPrefixes:
    return PromptPrefixes(digests, 1_024 * len(digests), Partition(tenant, tag))


def _stored(*hashes: int, parent: int | None = None, by: str = "r") -> StoredBlocks:
    return StoredBlocks(hashes=hashes, parent=parent, token_count=BLOCK_TOKENS, request_id=by)


def _processed(blocks: EngineBlocks, by: str, prompt: PromptPrefixes, *stored: StoredBlocks) -> None:
    blocks.expect(by, prompt)
    for event in stored:
        blocks.apply(event)
    blocks.note_prompt_tokens(by, 256 * len(prompt.digests))


def _changes(blocks: EngineBlocks) -> dict[int, bool]:
    return blocks.take_changes().held


def test_stored_prompt_is_held_up_to_its_last_whole_block() -> None:
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1, 2, 3), _stored(11, 12), _stored(13, 14, 15, parent=12))
    assert _changes(blocks) == {1: True, 2: True}
    blocks.apply(_stored(16, parent=15))
    assert _changes(blocks) == {3: True}
    assert sorted(blocks.prefixes) == [1, 2, 3]


def test_reports_that_arrive_after_the_answer_count_too() -> None:
    blocks = EngineBlocks()
    blocks.expect("r", _prompt(1, 2))
    blocks.note_prompt_tokens("r", 512)
    assert not blocks.take_changes()
    blocks.apply(_stored(11, 12, 13, 14))
    assert _changes(blocks) == {1: True, 2: True}


def test_removed_block_loses_the_prefixes_that_end_in_it_and_all_longer_ones() -> None:
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1, 2, 3), _stored(11, 12, 13, 14, 15, 16))
    _processed(blocks, "s", _prompt(1, 9), _stored(21, 22, parent=12, by="s"))
    assert _changes(blocks) == {1: True, 2: True, 3: True, 9: True}
    blocks.apply(RemovedBlocks([14]))
    assert _changes(blocks) == {2: False, 3: False}
    blocks.apply(RemovedBlocks([11, 12, 77]))
    assert _changes(blocks) == {1: False, 9: False}
    assert len(blocks) == 0


def test_evicted_prompt_that_is_processed_again_is_held_again() -> None:
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1, 2), _stored(11, 12, 13, 14))
    blocks.apply(RemovedBlocks([12]))
    _changes(blocks)
    _processed(blocks, "s", _prompt(1, 2), _stored(12, 13, 14, parent=11, by="s"))
    assert _changes(blocks) == {1: True, 2: True}


def test_emptied_cache_holds_nothing() -> None:
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1), _stored(11, 12))
    blocks.apply(ClearedCache())
    assert blocks.take_changes() == PrefixChanges(cleared=True)
    assert (blocks.prefixes, len(blocks)) == ([], 0)


def test_after_missing_reports_only_prompts_with_a_known_beginning_count() -> None:
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1), _stored(11, 12))
    blocks.restart()
    assert blocks.take_changes() == PrefixChanges(restart=True)
    _processed(blocks, "s", _prompt(1, 2), _stored(13, 14, parent=12, by="s"))
    assert not blocks.take_changes()
    _processed(blocks, "u", _prompt(5), _stored(31, 32, by="u"))
    assert _changes(blocks) == {5: True}


def test_blocks_count_only_for_the_request_that_stored_them() -> None:
    """Two tenants with the same text have different digests and different blocks."""
    blocks = EngineBlocks()
    blocks.expect("mine", _prompt(1))
    blocks.expect("theirs", _prompt(2, tenant="other"))
    for request in ("mine", "theirs"):
        blocks.note_prompt_tokens(request, 256)
    blocks.apply(_stored(11, 12, by="mine"))
    blocks.apply(_stored(91, 92, by=""))
    assert blocks.prefixes == [1]
    blocks.apply(_stored(21, 22, by="theirs"))
    blocks.apply(RemovedBlocks([12]))
    assert blocks.prefixes == [2]


@pytest.mark.parametrize(
    ("tenant", "tag", "left"), [(None, None, set()), ("t", None, {4}), (None, "a", {1, 3, 4}), ("t", "a", {1, 3, 4})]
)
def test_flushed_prefixes_are_lost_and_stay_lost_for_running_requests(
    tenant: str | None, tag: str | None, left: set[int]
) -> None:
    blocks = EngineBlocks()
    _processed(blocks, "r1", _prompt(1), _stored(11, 12, by="r1"))
    _processed(blocks, "r2", _prompt(2, tag="a"), _stored(21, 22, by="r2"))
    blocks.expect("r3", _prompt(3))
    _processed(blocks, "r4", _prompt(4, tenant="u"), _stored(41, 42, by="r4"))
    blocks.forget(tenant, tag)
    blocks.apply(_stored(31, 32, by="r3"))
    blocks.note_prompt_tokens("r3", 256)
    assert set(blocks.prefixes) == left


def test_second_engine_call_of_a_request_does_not_move_its_prefixes() -> None:
    """A tool loop repeats the prompt with more text, whose tokens are not those of the digests."""
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1), _stored(11, 12))
    _processed(blocks, "r", _prompt(1), _stored(13, 14, parent=12))
    blocks.note_prompt_tokens("r", 512)
    blocks.apply(RemovedBlocks([13]))
    assert blocks.prefixes == [1]


def test_id_that_is_used_again_belongs_to_its_new_prompt() -> None:
    # Two tenants may both call a request job-1: the blocks of the second were reported as prefixes of the first.
    blocks = EngineBlocks()
    blocks.expect("job-1", _prompt(1, tenant="a"))
    _processed(blocks, "job-1", _prompt(2, tenant="b"), _stored(11, 12, by="job-1"))
    assert _changes(blocks) == {2: True}


def test_flood_of_blocks_keeps_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_blocks, "MAX_BLOCKS", 4)
    monkeypatch.setattr(engine_blocks, "MAX_PREFIXES", 2)
    monkeypatch.setattr(engine_blocks, "MAX_PROMPTS", 2)
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1, 2), _stored(11, 12, 13, 14))
    _processed(blocks, "s", _prompt(3), _stored(*range(100, 200), by="s"))
    for number in range(10):
        blocks.expect(f"x{number}", _prompt(9))
    assert (blocks.prefixes, len(blocks), len(blocks._prompts)) == ([1, 2], 4, 2)
    blocks.apply(RemovedBlocks([13]))
    _processed(blocks, "y", _prompt(7), _stored(51, 52, by="y"))
    assert blocks.prefixes == [1, 7]


def test_prompt_without_a_whole_block_holds_nothing() -> None:
    blocks = EngineBlocks()
    _processed(blocks, "r", _prompt(1), _stored(11))
    blocks.note_prompt_tokens("unknown", 256)
    assert blocks.prefixes == []


def test_later_changes_replace_earlier_ones() -> None:
    changes = PrefixChanges(held={1: True, 2: False})
    changes.add(PrefixChanges(held={2: True}))
    assert changes == PrefixChanges(held={1: True, 2: True})
    changes.add(PrefixChanges(cleared=True, held={3: True}))
    assert changes == PrefixChanges(cleared=True, held={3: True})
    changes.add(PrefixChanges(restart=True))
    assert changes == PrefixChanges(restart=True, cleared=True)

"""The length of prompts as engines count them, learned from their counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.api.common.v1 import chat_pb2, completion_pb2
from weft.dispatch.token_counts import MAX_TARGETS, PromptCounts


def learned(*pairs: tuple[int, int]) -> PromptCounts:
    counts = PromptCounts()
    for estimated, counted in pairs:
        counts.note("m", estimated, counted)
    return counts


def test_estimate_stays_until_an_engine_has_counted() -> None:
    assert PromptCounts().expected("m", 7) == 7
    assert learned((7, 32)).expected("other", 7) == 7


def test_overhead_of_a_template_is_learned_from_one_short_prompt() -> None:
    """A chat of 7 tokens by its characters is 32 with the demo model's template."""
    counts = learned((7, 32))
    assert counts.expected("m", 7) == 32
    assert counts.expected("m", 107) == 132


def test_characters_per_token_are_learned_from_prompts_of_several_lengths() -> None:
    pairs = [(estimated, 25 + 3 * estimated) for estimated in (10, 200, 30, 500, 80)]
    assert learned(*pairs).expected("m", 1000) == pytest.approx(3025, rel=0.02)


def test_text_with_more_characters_per_token_gets_a_smaller_count() -> None:
    assert learned((1000, 600), (500, 300)).expected("m", 100) == pytest.approx(60, abs=1)


def test_slope_of_short_prompts_is_not_drawn_to_long_ones() -> None:
    """Short chats with four tokens per estimated one made a router refuse texts of 10,000 tokens that fit."""
    counts = learned((100, 400), (200, 800))
    assert counts.expected("m", 400) == 1_600
    assert counts.expected("m", 10_000) == 1_600 + 9_600


def test_newer_counts_outweigh_older_ones() -> None:
    counts = learned(*[(100, 500)] * 30, *[(100, 150)] * 60)
    assert counts.expected("m", 100) == pytest.approx(150, abs=2)


@given(st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 10_000_000)), min_size=1, max_size=30))
def test_expected_count_is_positive_and_grows_with_the_prompt(pairs: list[tuple[int, int]]) -> None:
    counts = learned(*pairs)
    expected = [counts.expected("m", estimated) for estimated in (1, 10, 1000, 100_000)]
    assert expected[0] >= 1
    assert expected == sorted(expected)


def test_number_of_remembered_targets_is_limited() -> None:
    counts = learned((7, 32))
    for number in range(MAX_TARGETS):
        counts.note(f"m{number}", 10, 20)
    assert counts.expected("m", 7) == 7


def test_only_chats_are_corrected() -> None:
    """A completion has no template, and one of token ids is counted exactly."""
    counts = learned((7, 32))
    assert counts.expected_of(chat_pb2.ChatPayload(), "m", 7) == 32
    assert counts.expected_of(completion_pb2.CompletionPayload(), "m", 7) == 7

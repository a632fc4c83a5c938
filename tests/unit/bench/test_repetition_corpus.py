"""The published figures of the repetition detector are those of the corpus, and stay within their bounds."""

from collections.abc import Callable

import pytest

from bench.repetition import (
    CORPUS,
    PAGE,
    ROOT,
    Outcome,
    corpus,
    judge,
    judge_folder,
    loop_begins,
    measured_part,
    tables,
)
from bench.repetition_texts import texts

MAX_MISS_SHARE = 0.25
"""Recorded answers end after 1,500 tokens, some of them before their loop is long enough."""


@pytest.fixture(scope="module")
def legitimate() -> list[Outcome]:
    return corpus("legitimate")


@pytest.fixture(scope="module")
def looping() -> list[Outcome]:
    return corpus("looping")


def test_no_good_answer_of_the_corpus_is_taken_for_a_loop(legitimate: list[Outcome]) -> None:
    assert len(legitimate) >= 60
    assert [item.name for item in legitimate if item.found is not None] == []


def test_most_loops_of_the_corpus_are_noticed(looping: list[Outcome]) -> None:
    assert len(looping) >= 40
    missed = [item.name for item in looping if item.found is None]
    assert len(missed) <= MAX_MISS_SHARE * len(looping), missed


def test_no_loop_that_repeats_exactly_for_long_is_missed(looping: list[Outcome]) -> None:
    long_ones = [item for item in looping if item.begins is not None and item.characters - item.begins > 9_000]
    assert long_ones
    assert [item.name for item in long_ones if item.found is None] == []


def test_the_page_has_the_measured_tables(legitimate: list[Outcome], looping: list[Outcome]) -> None:
    assert measured_part(PAGE.read_text(encoding="utf-8")) == tables(legitimate, looping)


@pytest.mark.parametrize(
    "folder",
    [
        "protos",
        *(
            pytest.param(folder, marks=pytest.mark.slow("reads all of its files"))
            for folder in ("runner_svc", "gateway", "docs")
        ),
    ],
)
def test_none_of_our_own_sources_is_taken_for_a_loop(folder: str) -> None:
    outcomes = judge_folder(ROOT / folder)
    assert outcomes
    assert [item.name for item in outcomes if item.found is not None] == []


def test_the_made_texts_are_what_their_script_makes() -> None:
    made = dict(texts())
    assert {path.as_posix() for path in made} == {
        path.relative_to(CORPUS).as_posix() for path in CORPUS.rglob("made-*.txt")
    }
    for path, text in made.items():
        assert (CORPUS / path).read_text(encoding="utf-8") == text, path


def test_no_text_is_in_the_corpus_twice() -> None:
    contents = [path.read_bytes() for path in CORPUS.rglob("*.txt")]
    assert len(set(contents)) == len(contents)


def test_the_beginning_of_a_loop_is_found_without_the_detector() -> None:
    opening = "Once upon a time, there was a mill:"
    assert loop_begins(opening + "It turned and turned. " * 50) == len(opening)
    assert loop_begins(opening * 3) is None


@pytest.mark.parametrize("make", [lambda text: text, lambda text: text[: len(text) // 2]])
def test_a_judge_that_always_says_no_would_be_noticed(make: Callable[[str], str]) -> None:
    text = make("The mill turned and turned again.\n" * 100)
    assert judge("a loop", text).found is not None
    assert judge("no loop", "The mill turned. It stopped.\n").found is None

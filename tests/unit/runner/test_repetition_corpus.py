"""The repetition detector on its corpus: no false alarm, and most loops noticed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from runner_svc.policy.repetition import Repetition, RepetitionDetector

ROOT = Path(__file__).parents[3]
CORPUS = ROOT / "tests" / "corpus" / "repetition"
CHARS_PER_TOKEN = 4
MIN_TAIL_CHARS = 400
"""The end of a loop that is looked for earlier in it, to find where the loop began."""
MAX_FILE_BYTES = 1_000_000
MAX_MISS_SHARE = 0.25
"""Recorded answers end after 1,500 tokens, some of them before their loop is long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    characters: int
    found: Repetition | None
    at: int
    """How many characters it had read by then; all of them when it found nothing."""
    begins: int | None
    """Where the loop begins in which the document ends; None: it does not end in exact repetition."""


def judge(name: str, text: str) -> Outcome:
    """Feed a document as tokens of four characters."""
    detector, found, at = RepetitionDetector(), None, len(text)
    for start in range(0, len(text), CHARS_PER_TOKEN):
        found = detector.feed(text[start : start + CHARS_PER_TOKEN])
        if found is not None:
            at = min(start + CHARS_PER_TOKEN, len(text))
            break
    return Outcome(name=name, characters=len(text), found=found, at=at, begins=loop_begins(text))


def loop_begins(text: str) -> int | None:
    """Where the exact repetition begins that lasts until the end; None: there is none. Independent of the detector."""
    tail = len(text) - MIN_TAIL_CHARS
    earlier = text.rfind(text[tail:], 0, len(text) - 1) if tail > 0 else -1
    if earlier < 0:
        return None
    period, place = tail - earlier, tail - 1
    while place >= period and text[place] == text[place - period]:
        place -= 1
    return max(place + 1 - period, 0)


def corpus(folder: str) -> list[Outcome]:
    """The outcomes of `legitimate` or `looping`, by name."""
    files = sorted((CORPUS / folder).glob("*.txt"))
    return [judge(file.name, file.read_text(encoding="utf-8")) for file in files]


def judge_folder(folder: Path) -> list[Outcome]:
    outcomes = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink() or not 100 <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            outcomes.append(judge(str(path), path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, OSError):
            continue  # not a text
    return outcomes


@pytest.fixture(scope="module")
def legitimate() -> list[Outcome]:
    return corpus("legitimate")


@pytest.fixture(scope="module")
def looping() -> list[Outcome]:
    return corpus("looping")


def test_no_legitimate_answer_in_the_corpus_is_detected_as_a_loop(legitimate: list[Outcome]) -> None:
    assert len(legitimate) >= 60
    assert [item.name for item in legitimate if item.found is not None] == []


def test_most_repetition_loops_in_the_corpus_are_detected(looping: list[Outcome]) -> None:
    assert len(looping) >= 40
    missed = [item.name for item in looping if item.found is None]
    assert len(missed) <= MAX_MISS_SHARE * len(looping), missed


def test_no_long_exact_loop_is_missed(looping: list[Outcome]) -> None:
    long_ones = [item for item in looping if item.begins is not None and item.characters - item.begins > 9_000]
    assert long_ones
    assert [item.name for item in long_ones if item.found is None] == []


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
def test_no_weft_source_file_is_detected_as_a_loop(folder: str) -> None:
    outcomes = judge_folder(ROOT / folder)
    assert outcomes
    assert [item.name for item in outcomes if item.found is not None] == []


def test_loop_start_is_found_without_the_detector() -> None:
    opening = "Once upon a time, there was a mill:"
    assert loop_begins(opening + "It turned and turned. " * 50) == len(opening)
    assert loop_begins(opening * 3) is None

"""CONTRIBUTING answers where things are: each answer is a file whose path contains the noun of the question."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^\| (?P<question>.*\*\*(?P<noun>[^*\n]+)\*\*.*) \| `(?P<path>[^`\n]+)` \|$", re.MULTILINE)


def _rows() -> list[tuple[str, str]]:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("## Where things are")[2].partition("\n## ")[0]
    rows = [(row["noun"], row["path"]) for row in _ROW.finditer(section)]
    assert len(rows) == section.count("\n| ") - 1, "a row has no noun in bold, or no path"
    return rows


def _contains(path: str, noun: str) -> bool:
    stems = [re.sub(r"[^a-z]", "", word.lower())[:6] for word in noun.split()]
    return all(stem in re.sub(r"[^a-z/]", "", path) for stem in stems)


def test_at_least_twenty_questions_are_answered() -> None:
    assert len(_rows()) >= 20


def test_each_answer_exists_and_its_path_contains_the_noun_of_the_question() -> None:
    wrong = [(noun, path) for noun, path in _rows() if not (ROOT / path).is_file() or not _contains(path, noun)]
    assert wrong == []


def test_path_without_the_noun_is_detected() -> None:
    """The control: an answer that a newcomer would not have looked for."""
    assert not _contains("registry_svc/mesh/roster.py", "heartbeat")

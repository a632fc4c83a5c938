"""Pages of the handbook use plain technical English: none of the phrases that read like a translation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
STILTED = re.compile(
    r"\b(?:of (?:its|their|his|your) own|at once|by (?:itself|themselves)|anew|whoever|nobody|for ever|off the premises"
    r"|comes? to nothing|gives? way|lets? go|goes on)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"^( *)```.*?^\1``` *$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "decisions").glob("*.md")),
]


def _stilted(text: str) -> list[str]:
    return [found[0] for found in STILTED.finditer(" ".join(_CODE.sub("", text).split()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_words(page: Path) -> None:
    assert _stilted(page.read_text("utf-8")) == []


def test_a_stilted_phrase_is_found() -> None:
    """The control."""
    assert _stilted("It has a queue\nof its own and goes on, `at once`.") == ["of its own", "goes on"]

"""Decision records: few, one page and one number each."""

from collections import Counter
from pathlib import Path

RECORDS = Path(__file__).parents[3] / "docs" / "decisions"
MAX_RECORDS = 25
MAX_WORDS = 510
"""About a page."""


def test_record_numbers_are_unique() -> None:
    numbers = Counter(page.name[:4] for page in RECORDS.glob("[0-9]*.md"))
    assert 10 <= len(numbers) <= MAX_RECORDS
    assert [number for number, count in numbers.items() if count > 1] == []


def test_record_heading_starts_with_its_number() -> None:
    headings = {page.name: page.read_text("utf-8").partition("\n")[0] for page in RECORDS.glob("[0-9]*.md")}
    assert [name for name, heading in headings.items() if not heading.startswith(f"# {name[:4]}")] == []


def test_record_is_about_a_page() -> None:
    words = {page.name: len(page.read_text("utf-8").split()) for page in RECORDS.glob("[0-9]*.md")}
    assert {name: count for name, count in words.items() if count > MAX_WORDS} == {}

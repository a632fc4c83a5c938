"""Pages link to what is there, and the index of the documentation has each page once."""

from pathlib import Path

import pytest
from page_links import INDEX, ROOT, is_broken, links, pages


def test_every_link_resolves_to_a_file_and_a_heading() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}" for page in pages() for target in links(page) if is_broken(page, target)
    ]
    assert broken == []


def test_index_lists_every_docs_page_once() -> None:
    listed = [target for target in links(INDEX) if not target.startswith(("..", "reference/"))]
    there = {page.name for page in INDEX.parent.glob("*.md")} - {INDEX.name} | {"decisions/README.md"}
    assert sorted(listed) == sorted(there), "docs/README.md lists every page of docs, in the section of its readers"


@pytest.mark.parametrize("target", ["gone.md", "here.md#no-such-heading", "#no-such-heading", "folder/"])
def test_broken_link_is_detected(tmp_path: Path, target: str) -> None:
    """The control."""
    page = tmp_path / "page.md"
    page.write_text(f"# A `page`, with words\n\n[text]({target}) and `[code](not-a-link.md)`\n")
    (tmp_path / "here.md").write_text("# Here\n")
    assert [each for each in links(page) if is_broken(page, each)] == [target]
    assert not is_broken(page, "here.md#here")
    assert not is_broken(page, "#a-page-with-words")

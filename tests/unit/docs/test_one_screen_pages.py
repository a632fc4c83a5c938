"""The pages of the first hour are one screen each."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
MAX_LINES = 60


@pytest.mark.parametrize("page", ["start", "upgrade", "trouble", "uninstall"])
def test_a_page_is_one_screen(page: str) -> None:
    assert len((DOCS / f"{page}.md").read_text("utf-8").splitlines()) <= MAX_LINES

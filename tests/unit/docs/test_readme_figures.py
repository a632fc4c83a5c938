"""The README's figures name their commit and day, and `make check` warns about old ones (.ci/figures.py)."""

from datetime import date
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parents[3]
WARNINGS = run_path(str(ROOT / ".ci" / "figures.py"))["warnings"]
NO_COMMIT = ["README.md names no commit and day for its figures"]


def test_figure_is_old_after_fourteen_days() -> None:
    measured = "p50 is 2 ms (commit d3b75d6c, 29 November 2026, two cores)"
    assert WARNINGS(measured, date(2026, 12, 13)) == []
    (line,) = WARNINGS(measured, date(2026, 12, 14))
    assert "d3b75d6c, 29 November 2026: 15 days old" in line


def test_text_without_a_commit_is_reported() -> None:
    assert WARNINGS("p50 is 2 ms", date(2026, 12, 1)) == NO_COMMIT


def test_readme_names_the_commit_of_its_figures() -> None:
    assert WARNINGS((ROOT / "README.md").read_text("utf-8"), date(2026, 11, 29)) == []

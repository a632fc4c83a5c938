"""`make check` finds phrases that read like a translation (.ci/words.py)."""

from pathlib import Path
from runpy import run_path

STILTED = run_path(str(Path(__file__).parents[3] / ".ci" / "words.py"))["stilted"]


def test_stilted_phrase_in_a_page_is_detected() -> None:
    page = "It has a queue of its\nown and goes on, `at once`.\n\n```\nanew\n```\n"
    assert list(STILTED(page, is_python=False)) == [(1, "of its own"), (2, "goes on")]


def test_stilted_phrase_in_a_string_or_docstring_summary_is_detected() -> None:
    source = '"""Nobody waits.\n\nNobody."""\nX = "runs anew"\nY = f(anew="anew")  # anew\n'
    assert list(STILTED(source, is_python=True)) == [(1, "Nobody"), (4, "anew")]


def test_exception_with_a_reason_is_skipped() -> None:
    assert list(STILTED("It goes on. <!-- words: a quotation -->\n", is_python=False)) == []

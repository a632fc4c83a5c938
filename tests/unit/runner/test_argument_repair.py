"""The repair of arguments on its corpus: most broken calls become what they were meant to be, no valid one changes."""

import json
from typing import Any

import pytest
from tool_call_corpus import TOOLS, rows

from runner_svc.tools.argument_repair import is_object, repaired_arguments
from runner_svc.tools.schemas import ArgumentCheck


def repair(tool: str, text: str, passed: str = "") -> Any:
    found = repaired_arguments(ArgumentCheck(tool, TOOLS[tool]), text, passed)
    return None if found is None else json.loads(found)


def test_nine_of_ten_broken_calls_are_repaired_and_none_wrongly() -> None:
    broken = rows("broken")
    results = [(row, repair(row["tool"], row["text"])) for row in broken]
    repaired = [(row, found) for row, found in results if found is not None]
    assert [(row["text"], found) for row, found in repaired if found != row["expected"]] == []
    assert len(broken) >= 40
    assert len(repaired) >= 0.9 * len(broken)


def test_no_valid_call_of_the_corpus_counts_as_broken() -> None:
    valid = rows("valid")
    assert len(valid) >= 100
    assert [row["text"] for row in valid if not is_object(row["text"])] == []


@pytest.mark.parametrize(
    "text",
    [
        '{"q" 1}',
        '{"q": """mesh"""}',
        '{"q": "mesh", "limit": NaN}',
        '{"q": "mesh", "limit": 1e999}',
        '{"q": "mesh", "limit": "many",}',
        '{"limit": 1,}',
        '{"q": "\\ud83d",}',
        "{'q': {1, 2}}",
        "I cannot call it.",
        "[" * 5_000,
        '{"q": "' + "x" * 20_000,
    ],
    ids=lambda text: text[:24],
)
def test_text_that_would_lose_a_value_or_match_no_schema_is_not_repaired(text: str) -> None:
    assert repair("look", text) is None


def test_repair_begins_with_what_the_caller_has_received() -> None:
    assert repair("look", '{"q":"a","limit":1,}', '{"q":"a",') == {"q": "a", "limit": 1}
    assert repair("look", '{"q": "a"} Done.', '{"q": "a"}') == {"q": "a"}
    assert repair("look", "{ 'q': 'a' }", "{ ") is None

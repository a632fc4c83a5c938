"""Schemas in the words that llama.cpp's grammars hold."""

import time
from typing import Any

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.policy.grammar_schema import fitted_pattern, fitted_schema

TEXT = r"[^\"\\\x00-\x1F]*"


@pytest.mark.parametrize(
    ("pattern", "fitted"),
    [
        (r"^\d{3}-\w+$", "^[0-9]{3}-[A-Za-z0-9_]+$"),
        (r"^[\d_]+$", "^[0-9_]+$"),
        (r"^[\w.-]{3}$", "^[A-Za-z0-9_.-]{3}$"),
        (r"^[+\-]?\d+$", "^[+-]?[0-9]+$"),
        (r"^a\.b\/c\-d$", r"^a\.b/c-d$"),
        (r"^(?:ab|c)$", "^(ab|c)$"),
        (r"^[\s-z]$", "^[ z-]$"),
        (r"^[^\s@]+$", r"^[^ @\"\\\x00-\x1F]+$"),
        (r"^\S$", r"^[^ \"\\\x00-\x1F]$"),
        (r"^\u0041\x42$", "^AB$"),
        (r"^[a-z]+?$", "^[a-z]+$"),
        (r"^a\$$", r"^a\$$"),
        ("abc", f"^{TEXT}abc{TEXT}$"),
        ("a|b", f"^{TEXT}(a|b){TEXT}$"),
        ("^.*$", f"^{TEXT}$"),
        ("^[a-z]$", "^[a-z]$"),
        # Left as they are: no grammar holds them.
        (r"^\p{L}$", None),
        ("^a|b$", None),
        ("^(?=a)b$", None),
        (r"^\bx$", None),
        (r'^"$', None),
        (r"^\n$", None),
        (r"[\D]", None),
        ("[a", None),
        # Characters for a matcher, and broken repetitions for llama.cpp, which would refuse the request.
        ("a{b}", None),
        ("{,3}", None),
    ],
)
def test_patterns_become_those_of_grammars(pattern: str, fitted: str | None) -> None:
    assert fitted_pattern(pattern) == fitted


def test_deeply_nested_pattern_is_converted_in_linear_time() -> None:
    """One of 32,000 characters, of a tool server, held up the runner for seconds."""
    pattern, began = "(" * 16_000 + "a|b" + ")" * 16_000, time.thread_time()
    assert fitted_pattern(f"^{pattern}$") == f"^{pattern}$"
    assert time.thread_time() - began < 0.5


PIECES = [
    "a",
    "b",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    r"\w",
    r"\S",
    "(a|b)",
    "(?:1|a)",
    "+",
    "?",
    "*",
    r"\.",
    "[a-b]",
    "^",
    "$",
    "|",
    "{1,2}",
    "-",
]


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.text("ab1. -_", max_size=5))
def test_text_of_a_fitted_pattern_has_the_given_one(pattern: str, text: str) -> None:
    try:
        given_one = re2.compile(pattern)
    except re2.error:
        return
    fitted = fitted_pattern(pattern)
    if fitted is not None and re2.search(fitted, text):
        assert given_one.search(text)


def test_schema_is_fitted_below_keywords_only_and_the_given_one_stays() -> None:
    schema: dict[str, Any] = {
        "properties": {"pattern": {"pattern": r"^\d$"}, "b": {"anyOf": [{"items": {"pattern": r"^\d$"}}]}},
        "enum": [{"pattern": r"\d"}],
        "additionalProperties": False,
    }
    fitted = fitted_schema(schema)
    assert fitted["properties"] == {
        "pattern": {"pattern": "^[0-9]$"},
        "b": {"anyOf": [{"items": {"pattern": "^[0-9]$"}}]},
    }
    assert (fitted["enum"], fitted["additionalProperties"]) == (schema["enum"], False)
    assert schema["properties"]["pattern"] == {"pattern": r"^\d$"}


@pytest.mark.parametrize("closed", [False, {"not": {}}])
def test_closed_tuple_is_said_without_the_items_that_hide_it(closed: object) -> None:
    assert fitted_schema({"prefixItems": [{"type": "integer"}], "items": closed}) == {
        "prefixItems": [{"type": "integer"}]
    }
    assert fitted_schema({"items": closed}) == {"items": closed}

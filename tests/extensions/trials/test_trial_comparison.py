"""The checks of a pair of answers, and the summary of a trial."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from weft.api.gateway.v1.trial_report_pb2 import TrialPair, TrialSpeed
from weft.api.registry.v1.trial_pb2 import VERDICT_AGAINST, VERDICT_CANDIDATE, VERDICT_SAME
from weft.kernel.schemas.value_check import UncheckedError
from weft_extensions.trials.comparison import Answer, ToolCall, check_pair, summarize
from weft_extensions.trials.pairs import matches

OLD = Answer("old", (), 101, 0.5, 10.0)
NEW = Answer("new", (), 51, 0.2, 20.0)


def calls(*pairs: tuple[str, str]) -> Answer:
    return replace(OLD, tool_calls=tuple(ToolCall(name, text) for name, text in pairs))


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [('{"a": 1}', True), ('{"b": 1}', False), ("no JSON", False), ("NaN", False), ("[" * 9_999, False)],
)
def test_answer_is_checked_against_the_response_schema(text: str, *, is_valid: bool) -> None:
    checks = check_pair(replace(NEW, text=text), replace(OLD, text='{"a": 2}'), lambda value: "a" in value)
    assert (checks.candidate_valid, checks.against_valid) == (is_valid, True)


@pytest.mark.parametrize(
    ("schema", "value", "is_valid"),
    [
        ({"type": "object", "required": ["a"]}, {"a": 1}, True),
        ({"type": "object", "required": ["a"]}, {}, False),
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 10_000 + "b"}, False),
    ],
)
def test_schema_is_checked_in_linear_time(schema: dict[str, Any], value: Mapping[str, Any], *, is_valid: bool) -> None:
    assert matches(schema, value) is is_valid


@pytest.mark.parametrize("schema", [{"$ref": "http://127.0.0.1:1/other.json"}, {"unevaluatedProperties": False}])
def test_schema_that_cannot_be_checked_without_fetching_says_nothing_about_the_answers(schema: dict[str, Any]) -> None:
    """Both answers of such a pair were said to break the schema."""
    with pytest.raises(UncheckedError):
        matches(schema, {})
    checks = check_pair(replace(NEW, text="no JSON"), replace(OLD, text="{}"), partial(matches, schema))
    assert not checks.HasField("candidate_valid")
    assert not checks.HasField("against_valid")


def test_pair_without_schema_and_tools_has_neither_check() -> None:
    checks = check_pair(NEW, OLD, None)
    assert [each.name for each, _ in checks.ListFields()] == ["length_ratio", "candidate_speed", "against_speed"]


@pytest.mark.parametrize(
    ("candidate", "against", "is_same"),
    [
        (calls(("f", '{"a":1,"b":2}')), calls(("f", '{"b": 2.0, "a": 1}')), True),
        (calls(("f", "{}"), ("g", "{}")), calls(("g", "{}"), ("f", "{}")), True),
        (calls(("f", "")), calls(("f", "{}")), True),
        (calls(("f", '{"a": 1}')), calls(("f", '{"a": true}')), False),
        (calls(("f", '{"a": 1}')), calls(("f", '{"a": "1"}')), False),
        (calls(("f", '{"a": [1, 2]}')), calls(("f", '{"a": [2, 1]}')), False),
        (calls(("f", "{}")), calls(("g", "{}")), False),
        (calls(("f", "{}"), ("f", "{}")), calls(("f", "{}")), False),
        (calls(("f", '{"a":')), calls(("f", '{"a": 1}')), False),
        (calls(("f", '{"a":')), calls(("f", '{"a":')), True),
        (calls(), calls(("f", "{}")), False),
    ],
)
def test_tool_calls_are_equal_by_name_and_arguments(candidate: Answer, against: Answer, *, is_same: bool) -> None:
    assert check_pair(candidate, against, None).same_tool_calls is is_same


def test_length_and_speed_of_both_answers_are_compared() -> None:
    checks = check_pair(NEW, OLD, None)
    assert checks.length_ratio == pytest.approx(51 / 101)
    assert checks.candidate_speed == TrialSpeed(first_token_seconds=0.2, tokens_per_second=20.0)
    assert checks.against_speed == TrialSpeed(first_token_seconds=0.5, tokens_per_second=10.0)
    assert not check_pair(NEW, replace(OLD, tokens=0), None).HasField("length_ratio")


def test_summary_counts_checks_and_verdicts_and_ignores_pairs_measured_on_one_side() -> None:
    valid, broken = replace(NEW, text="{}"), replace(NEW, text="{")
    one_sided = check_pair(replace(NEW, first_token_seconds=None), replace(OLD, first_token_seconds=99.0), None)
    checks = (
        check_pair(valid, replace(OLD, text="{}"), lambda _: True),
        check_pair(broken, replace(OLD, text="{}"), lambda _: True),
        check_pair(calls(("f", "{}")), calls(("f", "{}")), None),
        one_sided,
    )
    others = [TrialPair(state="waiting"), TrialPair(state="failed")]
    pairs = [TrialPair(state="answered", checks=each) for each in checks]
    verdicts = [VERDICT_CANDIDATE, VERDICT_AGAINST, VERDICT_AGAINST, VERDICT_SAME]
    summary = summarize([*pairs, *others], verdicts)
    assert (summary.answered, summary.waiting, summary.failed) == (4, 1, 1)
    assert (summary.with_schema, summary.candidate_valid, summary.against_valid) == (2, 1, 2)
    assert (summary.with_tool_calls, summary.same_tool_calls) == (1, 1)
    assert summary.length_ratio == pytest.approx(51 / 101)
    assert summary.candidate_speed == TrialSpeed(first_token_seconds=0.2, tokens_per_second=20.0)
    assert summary.against_speed == TrialSpeed(first_token_seconds=0.5, tokens_per_second=10.0)
    assert (summary.candidate_preferred, summary.against_preferred, summary.same) == (1, 2, 1)


def test_trial_without_pairs_has_an_empty_summary() -> None:
    summary = summarize([], [])
    assert (summary.answered, summary.HasField("length_ratio"), summary.candidate_speed) == (0, False, TrialSpeed())

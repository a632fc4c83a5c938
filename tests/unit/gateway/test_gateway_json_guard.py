import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.anthropic.schema import MessagesRequest
from gateway.intake.json_guard import (
    field_path,
    parse,
    parse_json,
    require_few_members,
    require_strict_json,
    without_halves,
)
from gateway.openai.chat_schema import ChatRequest
from gateway.responses.schema import ResponsesRequest
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.ollama.schema import OllamaChatRequest

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Governed(BaseModel):
    """A body with a token in it."""

    model: str
    token: Any = None


JSON_VALUES: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=40,
)


def depth_of(value: Json) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(member) for member in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(element) for element in value), default=0)
    return 0


@settings(deadline=None)  # a busy machine is not a failure
@example({"": []}, 1, False)  # dropping empty pairs twice in a row made this one level deep
@given(JSON_VALUES, st.integers(min_value=0, max_value=6), st.booleans())
def test_only_json_deeper_than_the_limit_is_refused(value: Json, limit: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth_of(value) <= max(limit, 1):
        require_strict_json(raw, max(limit, 1))
    else:
        with pytest.raises(WeftError, match="nested deeper"):
            require_strict_json(raw, max(limit, 1))


@settings(deadline=None)  # a busy machine is not a failure
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_caller_errors(raw: bytes) -> None:
    with pytest.raises(WeftError) as caught:
        parse(ChatRequest, raw, max_depth=64)
    assert caught.value.reason in {Reason.MALFORMED_REQUEST, Reason.INVALID_ARGUMENT}


@pytest.mark.parametrize(
    ("raw", "is_fine"),
    [
        (b'{"a": NaN}', False),
        (b'{"a": -Infinity}', False),
        (b'{"a": "NaN"}', True),
        (b'{"a": "\\"NaN"}', True),
        (b'{"a": "\\\\", "b": NaN}', False),
        (b'{"NaN": "Infinity"}', True),
        ('{"a": "é"}'.encode(), True),
        (b'{"a": "\xe9"}', False),
        (b'{"a": "\xed\xa0\x80"}', False),
    ],
)
def test_nan_and_invalid_text_are_detected_only_where_they_matter(raw: bytes, is_fine: bool) -> None:
    if is_fine:
        require_strict_json(raw, 64)
    else:
        with pytest.raises(WeftError) as caught:
            require_strict_json(raw, 64)
        assert caught.value.reason is Reason.MALFORMED_REQUEST


def test_error_path_uses_caller_syntax_without_union_tags() -> None:
    assert field_path(("messages", 2, "content", "~list", 0, "text")) == "messages[2].content[0].text"
    assert field_path(()) == ""
    assert len(field_path(("metadata", "k" * 10_000))) < 100


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "a", "model": "b"}',
        b'{"model": "a", "mod\\u0065l": "b"}',
        b'{"model": "a", "token": {"opToken": {"nonce": "x", "nonce": "y"}}}',
        b'{"model": "a", "token": [{"a": 1}, {"b": 1, "b": 1}]}',
    ],
)
def test_ambiguous_body_is_refused(raw: bytes) -> None:
    Governed.model_validate_json(raw)  # the negative control: the parser takes it, as most readers do
    for read in (lambda: parse(Governed, raw, max_depth=8), lambda: parse_json(raw, max_depth=8)):
        with pytest.raises(WeftError) as refused:
            read()
        assert refused.value.reason is Reason.MALFORMED_REQUEST
        assert "twice" in refused.value.message


def test_same_name_in_two_objects_is_not_ambiguous() -> None:
    raw = b'{"model": "a", "token": {"model": "a", "list": [{"model": 1}, {"model": 1}]}}'
    assert parse(Governed, raw, max_depth=8).model == "a"


@pytest.mark.parametrize(
    ("number", "field"),
    [
        (b"1e999", "unread"),
        (b"-1e999", "unread"),
        (b"[1, 2e308]", "unread[1]"),
        (b'{"deep": 1.8e308}', "unread.deep"),
        (b"9" * 309 + b".5", "unread"),
    ],
)
def test_number_beyond_double_range_is_refused_with_its_path(number: bytes, field: str) -> None:
    raw = b'{"model": "a", "unread": ' + number + b"}"
    Governed.model_validate_json(raw)  # the negative control: it would be infinity, and no JSON when written again
    with pytest.raises(FieldError, match="beyond the range of a double") as refused:
        parse(Governed, raw, max_depth=8)
    assert refused.value.field == field


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\\udc00\\ud800"', b'"a\\ud83d"', b'{"\\ud800": 1}'])
def test_unencodable_text_is_refused_anywhere(text: bytes) -> None:
    raw = b'{"model": "a", "nobody reads this": ' + text + b"}"
    json.loads(raw)  # the negative control
    with pytest.raises(WeftError) as refused:
        parse(Governed, raw, max_depth=8)
    assert refused.value.reason is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\uDE00 begins with the other half", "\ufffd begins with the other half"),
        (rb"\ude00\ud83d", "\ufffd\ufffd"),
        (rb"\ud83d\ud83d\ude00\ude00", "\ufffd\N{GRINNING FACE}\ufffd"),
        (rb"\ud83d\ude00\uD83D\uDE00", "\N{GRINNING FACE}\N{GRINNING FACE}"),
        (rb"a path \\ud83d\\ude00 of backslashes \\\ud83d", "a path \\ud83d\\ude00 of backslashes \\\ufffd"),
    ],
)
@pytest.mark.parametrize("schema", [ChatRequest, MessagesRequest, OllamaChatRequest, ResponsesRequest])
def test_lone_surrogate_in_a_request_is_replaced_and_does_not_fail_the_conversation(
    schema: type[BaseModel], written: bytes, read: str
) -> None:
    text = b'"' + written + b'"'
    message = b'{"role":"user","content":' + text + b"}"
    raw = b'{"model":"a","max_tokens":9,"input":' + text + b',"messages":[' + message + b"]}"
    found = parse(schema, raw, max_depth=8)
    assert read in {getattr(found, "input", None), found.messages[0].content if found.messages else None}  # type: ignore[attr-defined]


def test_text_without_surrogates_is_unchanged_for_any_number_of_backslashes() -> None:
    raw = b'"' + rb"\\\\\n" * 100_000 + rb"\ud83d\ude00" + b'"'
    assert without_halves(raw) == raw


@given(JSON_VALUES)
def test_accepted_json_round_trips(value: Json) -> None:
    raw = json.dumps({"model": "a", "token": value}).encode()
    found = parse(Governed, raw, max_depth=64)
    assert found.token == value
    assert json.loads(json.dumps(found.token, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"a": 1} x', b"\xef\xbb\xbf{}", b"{'a': 1}", b'{"a": 01}', b'{"a": "\n"}']
)
def test_invalid_json_is_left_to_the_parser_which_refuses_it(raw: bytes) -> None:
    assert require_strict_json(raw, 8)
    with pytest.raises(WeftError) as refused:
        parse_json(raw, max_depth=8)
    assert refused.value.reason is Reason.MALFORMED_REQUEST


def test_names_are_counted_and_colons_in_strings_are_not() -> None:
    require_few_members(b'{"a": 1, "b": {"c": 2}}', 3)
    require_few_members(b'{"a": "::::::"}', 3)
    with pytest.raises(WeftError, match="more than 2 names") as refused:
        require_few_members(b'{"a": 1, "b": {"c": 2}}', 2)
    assert refused.value.reason is Reason.REQUEST_TOO_LARGE

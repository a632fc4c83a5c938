import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.json_guard import field_path, parse, parse_governed, require_strict_json
from gateway.schemas import ChatRequest
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

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
def test_exactly_what_is_deeper_than_the_limit_is_refused(value: Json, limit: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth_of(value) <= max(limit, 1):
        require_strict_json(raw, max(limit, 1))
    else:
        with pytest.raises(WeftError, match="nested deeper"):
            require_strict_json(raw, max(limit, 1))


@settings(deadline=None)  # a busy machine is not a failure
@given(st.binary(max_size=200))
def test_bytes_of_any_kind_make_an_error_of_the_caller_and_nothing_else(raw: bytes) -> None:
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
def test_nan_and_broken_text_are_found_only_where_they_matter(raw: bytes, is_fine: bool) -> None:
    if is_fine:
        require_strict_json(raw, 64)
    else:
        with pytest.raises(WeftError) as caught:
            require_strict_json(raw, 64)
        assert caught.value.reason is Reason.MALFORMED_REQUEST


def test_a_path_reads_as_a_caller_writes_it_and_leaves_union_tags_out() -> None:
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
def test_a_body_that_two_readers_could_read_differently_is_refused(raw: bytes) -> None:
    parse(Governed, raw, max_depth=8)  # the negative control: elsewhere the last one counts, as in most readers
    with pytest.raises(WeftError) as refused:
        parse_governed(Governed, raw, max_depth=8)
    assert refused.value.reason is Reason.MALFORMED_REQUEST
    assert "twice" in refused.value.message


def test_the_same_name_in_two_objects_is_no_second_reading() -> None:
    raw = b'{"model": "a", "token": {"model": "a", "list": [{"model": 1}, {"model": 1}]}}'
    assert parse_governed(Governed, raw, max_depth=8).model == "a"

"""What makers and checkers of tokens share: one reading of JSON, actions as fields and as words."""

import math
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2, model_store_pb2
from weft.signing.strict_json import (
    MAX_DEPTH,
    MAX_TOKEN_BYTES,
    MAX_VALUES,
    MalformedToken,
    canonical_json,
    from_base64url,
    read_object,
    to_base64url,
)
from weft.signing.tokens import operation_word, token_fields

_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
_BRANCHES = _LEAVES | st.lists(_LEAVES, max_size=4) | st.dictionaries(st.text(max_size=9), _LEAVES, max_size=4)
_OBJECTS = st.dictionaries(st.text(max_size=9), _BRANCHES | st.lists(_BRANCHES, max_size=4), max_size=5)


def _load(**facts: object) -> operation_pb2.OperationAction:
    return operation_pb2.OperationAction(load_model=operation_pb2.LoadModel(model="qwen", **facts))  # type: ignore[arg-type]


@given(_OBJECTS)
def test_canonical_json_round_trips(document: dict[str, object]) -> None:
    text = canonical_json(document)
    assert read_object(text) == document
    assert canonical_json(read_object(text)) == text


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": [1, 1.0, True], "a": "ü\n"}) == '{"a":"ü\\n","b":[1,1.0,true]}'.encode()
    assert canonical_json({"a": 1}) != canonical_json({"a": True})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'{"a":1}x',
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
        b"\xff",
        b'{"a":"' + b"x" * MAX_TOKEN_BYTES + b'"}',
        b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"a":[' + b"1," * MAX_VALUES + b"1]}",
        b"{" * 16_000,
        b'{"a":"\\',
    ],
)
def test_non_canonical_or_ambiguous_json_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedToken):
        read_object(text)


def test_brackets_in_strings_are_not_nesting() -> None:
    assert read_object(b'{"a":"' + b"[{" * 500 + b'\\"[["}')["a"].startswith("[{")


@given(st.binary(max_size=80))
def test_base64url_has_one_form(data: bytes) -> None:
    text = to_base64url(data)
    assert from_base64url(text) == data
    assert "=" not in text


@pytest.mark.parametrize("text", ["A", "AB", "AA+A", "AA/A", "A A", "AAAA=A", "AAA\n", "é", "AAAAA"])
def test_invalid_base64url_is_refused(text: str) -> None:
    with pytest.raises(MalformedToken):
        from_base64url(text)


def test_empty_action_is_refused() -> None:
    with pytest.raises(MalformedToken, match="does nothing"):
        operation_word(operation_pb2.OperationAction())


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (load_pb2.LoadOptions(), {}),
        (load_pb2.LoadOptions(keep_alive=Duration()), {"keepAlive": 0}),
        (load_pb2.LoadOptions(keep_alive=Duration(seconds=-1)), {"keepAlive": -1}),
        (load_pb2.LoadOptions(memory_budget_bytes=1024 * 1024), {"gpuMemoryBudgetMB": 1}),
        (load_pb2.LoadOptions(memory_budget_bytes=1), {"gpuMemoryBudgetMB": 1 / 1024**2}),
        (
            load_pb2.LoadOptions(parameters={"context_tokens": load_pb2.LoadValue(integer=0)}),
            {"maxContextLength": 0},
        ),
        (
            load_pb2.LoadOptions(parameters={"context_tokens": load_pb2.LoadValue(number=8192.0)}),
            {"parameters": {"context_tokens": 8192.0}},
        ),
        (
            load_pb2.LoadOptions(parameters={"context_tokens": load_pb2.LoadValue(flag=True)}),
            {"parameters": {"context_tokens": True}},
        ),
    ],
)
def test_every_load_option_has_a_field(options: load_pb2.LoadOptions, fields: dict[str, object]) -> None:
    found = token_fields(_load(options=options))
    assert canonical_json(found) == canonical_json({"operation": "model-load", "modelId": "qwen", **fields})


def test_number_not_representable_in_json_is_refused() -> None:
    action = _load(options=load_pb2.LoadOptions(parameters={"p": load_pb2.LoadValue(number=math.nan)}))
    with pytest.raises(MalformedToken):
        canonical_json(token_fields(action))


def test_every_part_of_an_action_has_a_field() -> None:
    """A part that is added later must be named by tokens, or they would allow any value of it."""
    kinds = operation_pb2.OperationAction.DESCRIPTOR.fields_by_name
    parts = {kind: sorted(cast("Any", kinds[kind].message_type).fields_by_name) for kind in kinds}
    assert parts == {
        "load_model": ["evict_model", "model", "options", "replicas", "runner", "source"],
        "unload_model": ["model"],
        "flush_cache": ["model", "runner", "scope", "tag", "tenant"],
        "pull_model": ["form", "runner", "source"],
        "remove_model": ["model"],
    }
    assert sorted(load_pb2.LoadOptions.DESCRIPTOR.fields_by_name) == [
        "keep_alive",
        "memory_budget_bytes",
        "parameters",
        "pin",
        "quantization",
    ]


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        (
            operation_pb2.OperationAction(
                load_model=operation_pb2.LoadModel(model="mine", source="hf:a/b:Q4_0", runner="r1")
            ),
            {"operation": "model-load", "modelId": "hf:a/b:Q4_0", "name": "mine", "runner": "r1"},
        ),
        (
            operation_pb2.OperationAction(
                pull_model=operation_pb2.PullModel(
                    source="hf:a/b", runner="r1", form=model_store_pb2.STORED_FORM_FOLDER
                )
            ),
            {"operation": "model-pull", "modelId": "hf:a/b", "runner": "r1", "form": "folder"},
        ),
        (
            operation_pb2.OperationAction(remove_model=operation_pb2.RemoveModel(model="mine")),
            {"operation": "model-remove", "modelId": "mine"},
        ),
    ],
)
def test_source_is_included_in_the_token(action: operation_pb2.OperationAction, fields: dict[str, object]) -> None:
    assert token_fields(action) == fields

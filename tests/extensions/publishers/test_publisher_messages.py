"""The messages of the publisher protocol: what is read, and what is refused."""

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import fails

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.publishers.messages import Chunk, Whole, as_chunk, event, read_piece, read_registration

MODEL = {"name": "m"}


def _raw(value: object) -> bytes:
    return json.dumps(value).encode()


def test_each_line_type_is_read() -> None:
    assert read_piece(b'{"chunk": {"data": {"choices": []}}}') == Chunk(b'{"choices": []}', done=False)
    assert read_piece(b'{"chunk": {"done": true}}') == Chunk(b"", done=True)
    assert read_piece(b'{"body": {"a": 1}}') == Whole(200, b'{"a": 1}')
    assert read_piece(b'{"status": 404, "body": {}}') == Whole(404, b"{}")
    assert read_piece(b'{"error": "no"}') == Whole(500, b'{"error":{"message":"no"}}')
    assert read_piece(b'{"error": "no", "status": 400}') == Whole(400, b'{"error":{"message":"no"}}')
    assert read_piece(b'{"alive": true}') is None


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"status": 200},
        {"alive": True, "error": "no"},
        {"chunk": {}},
        {"chunk": {"data": [1]}},
        {"chunk": {"data": "text"}},
        {"chunk": {"data": {}}, "body": {}},
        {"body": {}, "status": 99},
        {"surprise": 1},
    ],
)
def test_unknown_line_is_refused(line: object) -> None:
    with fails(Reason.INVALID_ARGUMENT):
        read_piece(_raw(line))


@given(st.binary(max_size=64))
def test_arbitrary_bytes_raise_only_weft_errors(raw: bytes) -> None:
    with suppress(WeftError):
        read_piece(raw)


@given(st.recursive(st.text() | st.integers() | st.none(), lambda kept: st.dictionaries(st.text(), kept)))
def test_multi_line_answer_is_an_event_of_one_line(value: object) -> None:
    piece = read_piece(b'{"chunk":{"data":' + json.dumps({"v": value}, indent=1).encode() + b"}}")
    assert isinstance(piece, Chunk)
    assert b"\n" not in piece.data
    assert b"\r" not in piece.data
    assert json.loads(piece.data) == {"v": value}


def test_registration_has_defaults() -> None:
    found = read_registration(_raw({"name": "ann", "models": [MODEL]}), max_models=2)
    (model,) = found.models
    assert (model.operations, model.slots, model.pool, model.remote) == (("chat",), 1, "", False)


def test_too_many_models_are_refused_with_the_exceeded_limit() -> None:
    models = [{"name": f"m{number}"} for number in range(3)]
    with fails(Reason.TOO_MANY_RESOURCES, match="over the limit of 2"):
        read_registration(_raw({"name": "ann", "models": models}), max_models=2)


@pytest.mark.parametrize(
    ("registration", "field"),
    [
        ({"name": "no spaces please"}, "name"),
        ({"models": []}, "models"),
        ({"models": [{"name": "m", "slots": 0}]}, "slots"),
        ({"models": [MODEL, MODEL]}, "models"),
        ({"extra": 1}, "extra"),
        ({"models": [{"name": "m", "operations": ["fly"]}]}, "operations"),
    ],
)
def test_invalid_registration_error_names_the_problem(registration: dict[str, object], field: str) -> None:
    with fails(Reason.INVALID_ARGUMENT, match=field):
        read_registration(_raw({"name": "bob", "models": [MODEL], **registration}), max_models=2)


def test_task_is_an_event_of_one_line() -> None:
    schema = b'{"type":\n "object", "maximum": 0.10}'
    sent = event("task", task="ptk-1", body={"model": "m", "schema": msgspec.Raw(schema)})
    name, _, data = sent.partition(b"\ndata: ")
    assert name == b"event: task"
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert msgspec.json.decode(data) == {"task": "ptk-1", "body": {"model": "m", "schema": json.loads(schema)}}
    assert b'"maximum": 0.10' in data


def test_whole_chat_becomes_one_chunk_with_numbered_tool_calls() -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": {"prompt_tokens": 1}}
    chunk = json.loads(as_chunk(_raw(whole)))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert chunk["usage"] == {"prompt_tokens": 1}


@pytest.mark.parametrize("body", [b"[]", b'"text"', b'{"choices": 1}', b'{"choices": [1]}', b"{}"])
def test_non_chat_answer_is_passed_through(body: bytes) -> None:
    assert as_chunk(body) == body

"""Tool calls as servers send them, and as every API gets them."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from kit.failures import fails

from runner_svc.openai_upstream.openai_stream import DONE, StreamReader
from weft.api.common.v1 import event_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import plain_object

Delta = dict[str, Any]
ONE, TWO = '{"q":"1"}', '{"q":"2"}'


def _call(name: str | None, arguments: object = None, **fields: Any) -> Delta:
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: value for key, value in function.items() if value is not None}}


def _events(*chunks: list[Delta], finish: str = "tool_calls", **delta: Any) -> list[event_pb2.InferenceEvent]:
    reader = StreamReader(1, 1, used_ids={"used"})
    payloads = [msgspec.json.encode({"choices": [{"delta": {"tool_calls": calls, **delta}}]}) for calls in chunks]
    end = msgspec.json.encode({"choices": [{"delta": {}, "finish_reason": finish}]})
    return [event for frame in reader.read([*payloads, end, DONE]) for event in frame]


def _calls(*chunks: list[Delta], finish: str = "tool_calls") -> dict[int, tuple[str, str, str]]:
    """Returns id, name and arguments of each call, joined as clients do."""
    calls: dict[int, tuple[str, str, str]] = {}
    for event in _events(*chunks, finish=finish):
        for piece in event.delta.tool_calls:
            known = calls.get(piece.index)
            assert (known is None) == bool(piece.id and piece.name), "its head comes once"
            call_id, name, arguments = known or (piece.id, piece.name, "")
            calls[piece.index] = call_id, name, arguments + piece.arguments_text
    return calls


@pytest.mark.parametrize(
    "chunks",
    [
        [[_call("f", ONE, id="a", index=0)], [_call("f", TWO, id="b", index=0)]],
        [[_call("f", ONE, id="a")], [_call("f", TWO, id="b")]],
        [[_call("f", ONE, id="a"), _call("f", TWO, id="b")]],
        [[_call("f", ONE, id="a", index=None), _call("f", TWO, id="b", index=None)]],
        [[_call("f", ONE, id="a", index=0), _call("f", TWO, id="b", index=0)]],
        [[_call("f", ONE, id="a", index="0"), _call("f", TWO, id="b", index="0")]],
        [[_call("f", "", id="a")], [_call(None, ONE)], [_call("f", "", id="b")], [_call(None, TWO)]],
        [
            [_call("f", "", id="a", index=0)],
            [_call(None, ONE, index=0)],
            [_call("f", "", id="b", index=0)],
            [_call(None, TWO, index=0)],
        ],
        [[_call("f", "", id="a", index=0)], [_call(None, ONE)], [_call("f", "", id="b", index=1)], [_call(None, TWO)]],
        [[_call("f", "", id="a")], [_call("f", "", id="b")], [_call(None, ONE, id="a")], [_call(None, TWO, id="b")]],
        [
            [_call("f", "", id="a", index=0), _call("f", "", id="b", index=1)],
            [_call(None, TWO, index=1)],
            [_call(None, ONE, index=0)],
        ],
        [[_call("f", '{"q"', id="a")], [_call("f", ':"1"}', id="a")], [_call("f", TWO, id="b")]],
        [[_call("f", {"q": "1"}, id="a", index=3)], [_call("f", {"q": "2"}, id="b", index=7)]],
        [[_call("f", ONE, id="a", index=0)], [_call(None, None, id="b", index=0)], [_call("f", TWO, index=0)]],
        [[_call("f", ONE, id="a")], [_call("f", ONE, id="a")], [_call("f", TWO, id="b")]],
    ],
)
def test_two_calls_are_separated_in_any_numbering(chunks: list[list[Delta]]) -> None:
    calls = _calls(*chunks)
    assert list(calls) == [0, 1]
    assert [(call_id, name) for call_id, name, _ in calls.values()] == [("a", "f"), ("b", "f")]
    assert [json.loads(arguments) for _, _, arguments in calls.values()] == [{"q": "1"}, {"q": "2"}]


@pytest.mark.parametrize(
    "chunks",
    [
        [[_call("f", ONE)], [_call("g", TWO)]],
        [[_call("f", ONE, index=0)], [_call("g", TWO, index=0)]],
        [[_call("f", ONE, id="", index=0), _call("g", TWO, id="", index=0)]],
        [[_call("f", ONE, id="used")], [_call("g", TWO, id="used")]],
        [[_call("f", ONE, id="x", index=0)], [_call("g", TWO, id="x", index=1)]],
        [[_call("f", ONE, id="x", index=0)], [_call("g", TWO, id="x", index=0)]],
    ],
)
def test_new_name_starts_a_call_and_each_call_has_its_own_id(chunks: list[list[Delta]]) -> None:
    calls = _calls(*chunks)
    assert [call[1:] for call in calls.values()] == [("f", ONE), ("g", TWO)]
    ids = {call_id for call_id, _, _ in calls.values()}
    assert len(ids) == 2
    assert not ids & {"", "used"}


_HEAD_ONCE = (("f", None, None), ("f", "", ""))


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        *(((call_id, None, None), names) for call_id in ("a", None, 5) for names in (*_HEAD_ONCE, ("f", "f", "f"))),
        *((("a", "b", "c"), names) for names in _HEAD_ONCE),
        (("a", "a", "a"), ("f", "f", "f")),
    ],
)
def test_chunks_of_one_call_stay_one_call(ids: tuple[Any, ...], names: tuple[Any, ...]) -> None:
    pieces = zip(ids, names, ('{"q', '":"1', '"}'), strict=True)
    calls = _calls(*([_call(name, text, id=call_id, index=0)] for call_id, name, text in pieces))
    assert [call[1:] for call in calls.values()] == [("f", ONE)]


@pytest.mark.parametrize("arguments", ["", " ", "null", None, {}, "{}", '""', '"{}"', '"null"'])
def test_call_without_arguments_has_an_empty_object(arguments: object) -> None:
    calls = _calls([_call("f", arguments, id="a"), _call("g", arguments, id="b")])
    assert [(name, json.loads(text)) for _, name, text in calls.values()] == [("f", {}), ("g", {})]


def test_arguments_truncated_by_the_limit_are_not_filled_in() -> None:
    assert _calls([_call("f", "", id="a")], finish="length") == {0: ("a", "f", "")}


QUOTED = json.dumps('{"q":"\\u00e9 \\"1\\""}')


@pytest.mark.parametrize("cuts", [(), (1,), (4, 5, 6), range(1, len(QUOTED))])
def test_arguments_as_json_text_in_quotes_are_an_object(cuts: Sequence[int]) -> None:
    pieces = [QUOTED[start:end] for start, end in itertools.pairwise((0, *cuts, len(QUOTED)))]
    calls = _calls(*([_call("f" if not number else None, text, index=0)] for number, text in enumerate(pieces)))
    assert [json.loads(text) for _, _, text in calls.values()] == [{"q": 'é "1"'}]


def test_two_calls_in_quotes_without_ids_stay_two_calls() -> None:
    calls = _calls([_call("f", json.dumps(ONE)), _call("f", json.dumps(TWO))], [_call("f", json.dumps(ONE))])
    assert [text for _, _, text in calls.values()] == [ONE, TWO, ONE]


@pytest.mark.parametrize("text", ['"[1]"', '"words"', '"{"', json.dumps(json.dumps(ONE))])
def test_other_text_in_quotes_is_passed_on_as_sent(text: str) -> None:
    assert [arguments for _, _, arguments in _calls([_call("f", text)]).values()] == [text]


def test_arguments_in_quotes_truncated_by_the_limit_are_decoded() -> None:
    assert [text for _, _, text in _calls([_call("f", '"{\\"q\\": \\"1')], finish="length").values()] == ['{"q": "1']


@pytest.mark.parametrize("name", ["f", None])
@pytest.mark.parametrize(
    "pieces",
    [
        ("{", '{"q', '{"q":"1', ONE),
        ('{"q":', ONE),
        ('{"q":', ONE, ONE),
        (" {", f" {ONE}"),
        (" {", ' {"q"', f" {ONE}", f" {ONE}"),
        ("", "{", '{"q":', '{"q":"1"', ONE, ""),
        tuple(json.dumps(ONE)[:end] for end in range(1, len(json.dumps(ONE)) + 1)),
    ],
)
def test_arguments_that_each_chunk_repeats_are_passed_on_once(pieces: Sequence[str], name: str | None) -> None:
    calls = _calls(*([_call(name if number else "f", text, index=0)] for number, text in enumerate(pieces)))
    assert [text for _, _, text in calls.values()] == [ONE]


@pytest.mark.parametrize(
    "pieces",
    [
        ('{"q":', '{"q":"1"}}'),
        ('{"q":[', '{"q":[', "]}]}"),
        ('{"', '{"', '":1}'),
        ('{"q":"', "1", "1", '1"}'),
        ("ha", "ha", "hahaha"),
        (*['{"q":'] * 250, "1", "}" * 250),
    ],
)
def test_chunks_that_only_look_repeated_are_joined(pieces: Sequence[str]) -> None:
    calls = _calls(*([_call("f" if not number else None, text, index=0)] for number, text in enumerate(pieces)))
    assert [text for _, _, text in calls.values()] == ["".join(pieces)]


def test_repeated_arguments_are_passed_on_as_they_grow() -> None:
    events = _events([_call("f", "{", index=0)], [_call(None, '{"q"', index=0)], [_call(None, ONE, index=0)])
    assert [call.arguments_text for event in events for call in event.delta.tool_calls] == ["{", '"q"', ':"1"}']


@pytest.mark.parametrize("finish", ["stop", "STOP", "tool_calls", "function_call"])
def test_answer_with_calls_ends_with_tool_calls(finish: str) -> None:
    (end,) = [event.delta for event in _events([_call("f", ONE)], finish=finish) if event.delta.finish_reason]
    assert end.finish_reason == event_pb2.FINISH_REASON_TOOL_CALLS


def test_legacy_function_call_is_a_call() -> None:
    events = _events([], finish="function_call", function_call={"name": "f", "arguments": ONE})
    (call,) = [call for event in events for call in event.delta.tool_calls]
    assert (call.name, call.arguments_text) == ("f", ONE)


def test_call_without_a_name_is_an_error() -> None:
    with fails(Reason.TOOL_CALL_INVALID):
        _calls([_call(None, ONE, index=3)])


def test_unknown_fields_of_calls_and_messages_are_kept() -> None:
    signed = _call("f", ONE, id="a", extra_content={"google": {"thought_signature": "S"}})
    signed["function"]["thought_signature"] = "T"
    (delta, *_) = [event.delta for event in _events([signed], reasoning_details=[{"data": "D"}], audio=None)]
    extra = {"extra_content": {"google": {"thought_signature": "S"}}, "function": {"thought_signature": "T"}}
    assert plain_object(delta.tool_calls[0].extra_fields) == extra
    assert plain_object(delta.extra_fields) == {"reasoning_details": [{"data": "D"}]}


def test_signature_after_its_call_is_kept() -> None:
    events = _events([_call("f", ONE, id="a", index=0)], [{"index": 0, "extra_content": {"s": "S"}}])
    extras = [plain_object(call.extra_fields) for event in events for call in event.delta.tool_calls]
    assert extras == [{}, {"extra_content": {"s": "S"}}]

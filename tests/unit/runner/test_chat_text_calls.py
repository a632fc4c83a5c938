"""Tool calls that models write as text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import fails

from runner_svc.policy.text_calls import MAX_HELD_CHARS, TextCall, TextCallParser
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

OFFERED = ("search", "files_read", "LOW_CONFIDENCE")
HERMES = '<tool_call>\n{"name": "search", "arguments": {"q": "a}\\"b"}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "search", "arguments": {"q": 1}}, {"name": "files_read", "arguments": {}}]'
LLAMA = '<function=search>{"q": "x"}</function>'
BARE = '{"name": "search", "parameters": {"q": "x"}}'
FENCED = '```json\n{"name": "search", "arguments": {"q": "x"}}\n```'


def _parse(*pieces: str, cut_off: bool = False) -> list[str | TextCall]:
    """Returns the output with adjacent text joined."""
    parser = TextCallParser(OFFERED)
    out: list[str | TextCall] = []
    for item in [*(item for piece in pieces for item in parser.feed(piece)), *parser.finish(cut_off=cut_off)]:
        if isinstance(item, str) and out and isinstance(out[-1], str):
            out[-1] += item
        else:
            out.append(item)
    return out


def _call(name: str, **arguments: object) -> TextCall:
    return TextCall(name, json.dumps(arguments, separators=(",", ":")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HERMES, [_call("search", q='a}"b')]),
        ("Let me look.\n" + HERMES, ["Let me look.\n", _call("search", q='a}"b')]),
        (HERMES + "\n\n" + LLAMA, [_call("search", q='a}"b'), _call("search", q="x")]),
        (HERMES + "\n\nThere.", [_call("search", q='a}"b'), "There."]),
        ('<tool_call>{"name": "search", "arguments": {}}', [_call("search")]),
        ('<tool_call>{"name": "search"}</tool_call>', [_call("search")]),
        ('<tool_call>{"name": "search", "arguments": "{\\"q\\": 1}"}</tool_call>', [_call("search", q=1)]),
        (MISTRAL, [_call("search", q=1), _call("files_read")]),
        (LLAMA, [_call("search", q="x")]),
        (BARE, [_call("search", q="x")]),
        (f"\n {BARE}\n", [_call("search", q="x")]),
        ('{"type": "function", "name": "search", "parameters": {}}', [_call("search")]),
        (FENCED, [_call("search", q="x")]),
        (FENCED.replace("json", ""), [_call("search", q="x")]),
    ],
)
def test_call_in_a_known_format_is_found(text: str, expected: list[str | TextCall]) -> None:
    assert _parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "parameters": {"age": 36}}',
        '{"name": "search", "age": 36}',
        '{"name": "search", "arguments": {}, "comment": "an answer in JSON"}',
        '{"name": "search", "arguments": [1]}',
        '{"answer": 42}',
        f"{BARE} is what I would call.",
        f"{BARE}{BARE}",
        f"First: {BARE}",
        f"{FENCED}\nThat is how.",
        '```json\n{"answer": 1}\n```',
        "```python\nprint(1)\n```",
        "The tag <tool_call> opens a call.",
        "The tag <tool_call>",
        "Mistral writes [TOOL_CALLS] and a list.",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]',
        '<function=unknown>{"q": 1}</function>',
        "<function=search> is how it begins",
        "a < b and [1, 2]",
        "<function=" + "x" * 100,
        '{"name": "sea',
        "{",
        "```",
        "",
        "   ",
    ],
)
def test_text_without_a_call_passes_unchanged(text: str) -> None:
    assert "".join(str(piece) for piece in _parse(text)) == text
    assert not any(isinstance(piece, TextCall) for piece in _parse(text))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "search", "arguments": {q: 1}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"q": 1}',
        '<tool_call>{"name": "search", "arguments": [1]}</tool_call>',
        '<function=search>{"q": }</function>',
        '[TOOL_CALLS][{"name": "search", "arguments": {}}, {"name": "unknown", "arguments": {}}]',
        '<tool_call>{"name": "search", "arguments": {"q": "' + "x" * MAX_HELD_CHARS + '"}}</tool_call>',
        "<tool_call>" + '{"a":' * 5000 + "x" + "}" * 5000,
    ],
)
def test_unreadable_marked_call_is_an_error(text: str) -> None:
    with fails(Reason.TOOL_CALL_INVALID):
        _parse(text)


def test_call_truncated_by_the_token_limit_is_text() -> None:
    text = '<tool_call>{"name": "search", "argu'
    assert _parse(text, cut_off=True) == [text]


def test_json_answer_is_released_as_soon_as_it_cannot_be_a_call() -> None:
    parser = TextCallParser(OFFERED)
    assert parser.feed('{"na') == []
    assert parser.feed('me": "Ada') == ['{"name": "Ada']
    assert parser.feed('"}') == ['"}']


def test_text_is_held_back_no_longer_than_a_marker_may_continue() -> None:
    parser = TextCallParser(OFFERED)
    assert parser.feed("Hello <tool") == ["Hello "]
    assert parser.holds
    assert parser.feed("box") == ["<toolbox"]
    assert not parser.holds


def test_long_answer_starting_like_a_call_is_released_at_the_limit() -> None:
    text = '{"name": "search", "arguments": {"q": "' + "x" * MAX_HELD_CHARS
    parser = TextCallParser(OFFERED)
    assert "".join(map(str, parser.feed(text))) == text


def test_everything_is_text_without_offered_functions() -> None:
    parser = TextCallParser(())
    assert parser.feed(HERMES) == [HERMES]
    assert parser.finish() == []


_CALLS = (HERMES, MISTRAL, LLAMA, BARE, FENCED)
_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<function=", "search>", "```", "```json\n")
_JSON = ("{", "}", '"', "\\", "[", "]", " ", "\n", '{"name": "search", ', '"arguments": {}', "<", "words")
_SNIPPETS = st.sampled_from((*_CALLS, *_MARKS, *_JSON))
_TEXTS = st.lists(_SNIPPETS | st.text(max_size=5), max_size=8).map("".join)


def _outcome(pieces: list[str]) -> list[str | TextCall] | str:
    try:
        return _parse(*pieces)
    except WeftError:
        return "invalid"


@given(text=_TEXTS, data=st.data())
def test_chunking_of_a_text_makes_no_difference(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _outcome(pieces) == _outcome([text]) == _outcome(list(text))


@given(text=_TEXTS, more=_TEXTS)
def test_passthrough_state_needs_no_further_input(text: str, more: str) -> None:
    parser = TextCallParser(OFFERED)
    try:
        parser.feed(text)
    except WeftError:
        return
    if parser.passes(more):
        assert parser.feed(more) == [more] * bool(more)
        assert not parser.holds


@given(text=st.text(alphabet='<>[]{}"` \nabtolcfuninjsTOOLCALS_=:', max_size=60))
def test_text_without_a_complete_call_passes_unchanged(text: str) -> None:
    assert _parse(text) in ([text], [])
    assert "".join(map(str, _parse(text))) == text

"""Answers that do not end, end twice, or say that they ended otherwise than they did."""

from typing import Any

from weft.kernel.reasons import Reason
from weft_testing.hostile_engine.row import FAILED, GOOD, HI, PROTOCOL, Ask, Row, cut, stream
from weft_testing.hostile_engine.server import DONE, USAGE, end, event, piece


def _choice(index: object = 0, finish: object = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": index, "finish_reason": finish, **fields}]})


def _delta(finish: object = None, **delta: Any) -> bytes:
    return _choice(0, finish, delta=delta)


_CALL = _delta(tool_calls=[{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
_NOTHING = _delta()
_UNKNOWN: tuple[object, ...] = ("done", "STOP", " stop", "null", "\u0000", "x" * 5_000, 5, True, ["stop"], {})


def _finish(word: object, sees: Reason) -> Row:
    return Row(name=f"finish reason {str(word)[:12]!r}", answer=stream(HI, end(word), USAGE, DONE), sees=sees)


def _bad(name: str, *events: bytes, sees: Reason = PROTOCOL, ask: Ask = Ask.CHAT) -> Row:
    return Row(name=name, answer=stream(*events), sees=sees, ask=ask)


def _good(name: str, *events: bytes, text: str = "Hi") -> Row:
    return Row(name=name, answer=stream(*events), sees=None, text=text)


ROWS = (
    *(_finish(word, FAILED) for word in ("error", "abort", "aborted", "cancelled", "failed")),
    *(_finish(word, PROTOCOL) for word in _UNKNOWN),
    _bad("an empty finish reason on every piece", piece("Hi", finish_reason=""), piece("!", finish_reason=""), DONE),
    _bad("an empty finish reason and no end", piece("Hi", finish_reason="")),
    _bad("no finish reason, with [DONE]", HI, USAGE, DONE),
    _bad("no finish reason, without [DONE]", HI, USAGE),
    _bad("no field for a finish reason", event({"choices": [{"index": 0, "delta": {"content": "Hi"}}]}), DONE),
    _bad("[DONE] at once", DONE),
    _bad("[DONE] before the finish reason", HI, DONE, end()),
    _bad("an empty body"),
    _bad("comments alone", b": keep-alive\n\n" * 20),
    _bad("a preamble alone", _delta(role="assistant", content=""), DONE),
    _bad("figures alone", USAGE, DONE),
    _bad("text after the finish reason", HI, end(), piece("more"), DONE),
    _bad("reasoning after the finish reason", HI, end(), _delta(reasoning_content="hm"), DONE),
    _bad("a refusal after the finish reason", HI, end(), _delta(refusal="no"), DONE),
    _bad("a call after the finish reason", HI, end(), _CALL, DONE),
    _bad("text and a second finish reason", HI, end(), piece("more", finish_reason="stop"), DONE),
    _bad("another finish reason", HI, end("stop"), end("length"), USAGE, DONE),
    _bad("a failure after the finish reason", HI, end("stop"), end("error"), USAGE, DONE, sees=FAILED),
    _bad("tool_calls and no call", HI, end("tool_calls"), USAGE, DONE),
    _bad("function_call and no call", HI, end("function_call"), USAGE, DONE),
    _bad("nothing, and no figures", _NOTHING, end(), DONE),
    _bad("nothing but empty texts", piece(""), piece(""), end(), DONE),
    _bad(
        "a message in place of a delta", _choice(0, "stop", message={"role": "assistant", "content": "Hi"}), USAGE, DONE
    ),
    _bad("a message after a delta", HI, _choice(0, "stop", message={"content": "Hi"}), USAGE, DONE),
    _bad("a choice that was not asked for", HI, _choice(1, "stop", delta={"content": "you"}), end(), DONE),
    _bad("choice -1", _choice(-1, "stop", delta={"content": "Hi"}), DONE),
    _bad("choice 2^40", _choice(2**40, "stop", delta={"content": "Hi"}), DONE),
    _bad("choice '0'", _choice("0", "stop", delta={"content": "Hi"}), DONE),
    _bad("choice null", _choice(None, "stop", delta={"content": "Hi"}), DONE),
    _bad("the user speaks", HI, _delta(role="user", content="and I"), end(), DONE),
    _bad("a tool speaks", HI, _delta(role="tool", content="result"), end(), DONE),
    _bad("a role that is no text", _delta(role=5, content="Hi"), end(), DONE),
    _bad("one of two choices", *GOOD, ask=Ask.TWO_CHOICES),
    _bad(
        "a choice ends twice, another never",
        HI,
        end(),
        end(),
        _choice(1, None, delta={"content": "a"}),
        DONE,
        ask=Ask.TWO_CHOICES,
    ),
    _bad(
        "one of two goes on",
        HI,
        end(),
        piece("!"),
        _choice(1, "stop", delta={"content": "a"}),
        DONE,
        ask=Ask.TWO_CHOICES,
    ),
    Row(name="cut off after the finish reason", answer=cut(HI, end()), sees=PROTOCOL),
    Row(name="cut off after [DONE]", answer=cut(*GOOD), sees=None, text="Hi"),
    _good("the same finish reason three times", HI, end(), end(), end(), USAGE, DONE),
    _good("an empty piece after the finish reason", HI, end(), piece(""), _delta(role="assistant"), USAGE, DONE),
    _good("no [DONE]", HI, end(), USAGE),
    _good("[DONE] twice", *GOOD, DONE),
    _good("text after [DONE]", *GOOD, piece("more"), end("length")),
    _good("an error after [DONE]", *GOOD, event({"error": "no"})),
    _good("much after [DONE]", *GOOD, b": " + b"x" * 500_000 + b"\n\n"),
    _good("a null message beside the delta", piece("Hi", message=None), *GOOD[1:]),
    _good("nothing, with figures", _NOTHING, end(), USAGE, DONE, text=""),
    _good("nothing, by a filter", _NOTHING, end("content_filter"), DONE, text=""),
    _good("the finish reason of another maker", HI, end("eos"), USAGE, DONE),
)

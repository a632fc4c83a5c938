"""Wrong answers to text completions, embeddings and the other calls that are no chat."""

import base64

import msgspec

from weft.kernel.reasons import Reason
from weft_testing.hostile_engine.row import FAILED, PROTOCOL, REJECTED, Ask, Row, stream
from weft_testing.hostile_engine.server import DONE, USAGE, answer, event

_DEEP = b'{"data":[],"results":[],"tokens":[],"text":"","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
_JSON_ASKS = (Ask.EMBEDDING, Ask.RERANK, Ask.TOKENIZE, Ask.IMAGE, Ask.TRANSCRIPTION)


def _json(document: object) -> bytes:
    return answer(msgspec.json.encode(document))


def _text(text: object, finish: object = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def _completion(name: str, *events: bytes, sees: Reason | None = PROTOCOL) -> Row:
    return Row(name=f"completion: {name}", answer=stream(*events), sees=sees, text="Hi", ask=Ask.COMPLETION)


def _embedding(name: str, document: object) -> Row:
    data = document if isinstance(document, bytes) else _json(document)
    return Row(name=f"embedding: {name}", answer=data, sees=PROTOCOL, ask=Ask.EMBEDDING)


def _vectors(*values: object, places: tuple[object, ...] = (0, 1), **usage: object) -> dict[str, object]:
    data = [{"index": place, "embedding": value} for place, value in zip(places, values, strict=True)]
    return {"data": data, "usage": {"prompt_tokens": 2, **usage}}


def _call(ask: Ask, name: str, document: object) -> Row:
    return Row(name=f"{ask.value}: {name}", answer=_json(document), sees=PROTOCOL, ask=ask)


def _of_every_call(ask: Ask) -> tuple[Row, ...]:
    """What no call of JSON may be answered with."""
    kinds: tuple[tuple[str, bytes, Reason], ...] = (
        ("a page", answer(b"<html></html>", "text/html"), PROTOCOL),
        ("not JSON", answer(b"Hello"), PROTOCOL),
        ("no UTF-8", answer(b'{"data":"\xff","results":"\xff","tokens":"\xff","text":"\xff"}'), PROTOCOL),
        (
            "a surrogate",
            answer(b'{"data":"\\ud800","results":"\\ud800","tokens":"\\ud800","text":"\\ud800"}'),
            PROTOCOL,
        ),
        ("deep", answer(_DEEP), PROTOCOL),
        ("null", answer(b"null"), PROTOCOL),
        ("cut off", answer(b"{" + b" " * 500)[:-200], PROTOCOL),
        ("packed", answer(b"\x1f\x8b", extra="Content-Encoding: gzip\r\n"), PROTOCOL),
        ("no HTTP", b"\x00\x01\x02\r\n\r\n", PROTOCOL),
        ("a status 500 of garbage", answer(b"\xff\xfe\x00", status="500 Broken"), FAILED),
        ("a status 400 of garbage", answer(b"[" * 9_000, status="400 Bad"), REJECTED),
    )
    return tuple(Row(name=f"{ask.value}: {name}", answer=data, sees=sees, ask=ask) for name, data, sees in kinds)


ROWS = (
    _completion("no finish reason", _text("Hi"), DONE),
    _completion("an empty finish reason", _text("Hi", ""), _text("!", ""), DONE),
    _completion("an unknown finish reason", _text("Hi", "done"), DONE),
    _completion("abort", _text("Hi", "abort"), DONE, sees=FAILED),
    _completion("text after the finish reason", _text("Hi", "stop"), _text("more"), DONE),
    _completion("another finish reason", _text("Hi", "stop"), _text("", "length"), DONE),
    _completion("a text that is none", _text(5, "stop"), DONE),
    _completion(
        "a message", event({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}), USAGE, DONE
    ),
    _completion("another choice", event({"choices": [{"index": 3, "text": "Hi", "finish_reason": "stop"}]}), DONE),
    _completion("nothing", _text("", "stop"), DONE),
    _completion("no UTF-8", _text("Hi"), b'data: {"choices":[{"text":"\xff"}]}\n\n', DONE),
    _completion("an error", _text("Hi"), event({"error": "no tea"}), DONE, sees=FAILED),
    _completion("in order", _text("Hi", "stop"), USAGE, DONE, sees=None),
    *(row for ask in _JSON_ASKS for row in _of_every_call(ask)),
    _embedding("nothing", {}),
    _embedding("no figures", {"data": [{"index": 0, "embedding": [0.5]}, {"index": 1, "embedding": [0.5]}]}),
    _embedding("one too few", _vectors([0.5], places=(0,))),
    _embedding("one too many", _vectors([0.5], [0.5], [0.5], places=(0, 1, 2))),
    _embedding("one twice", _vectors([0.5], [0.5], places=(0, 0))),
    _embedding("of another input", _vectors([0.5], [0.5], places=(0, 7))),
    _embedding("below nothing", _vectors([0.5], [0.5], places=(0, -1))),
    _embedding("empty vectors", _vectors([], [])),
    _embedding("a vector of texts", _vectors(["a"], ["b"])),
    _embedding("a vector that is a text", _vectors("AAAA", "AAAA")),
    _embedding("a vector of null", _vectors([None], [None])),
    _embedding("too large for 32 bits", _vectors([1e300], [0.5])),
    _embedding("too small for 32 bits", _vectors([-1e300], [0.5])),
    _embedding("1e999", answer(b'{"data":[{"index":0,"embedding":[1e999]},{"index":1,"embedding":[0]}],"usage":{}}')),
    _embedding("NaN", answer(b'{"data":[{"index":0,"embedding":[NaN]},{"index":1,"embedding":[0]}],"usage":{}}')),
    _embedding("tokens below nothing", _vectors([0.5], [0.5], prompt_tokens=-1)),
    _embedding("tokens beyond all numbers", _vectors([0.5], [0.5], prompt_tokens=10**30)),
    _call(Ask.RERANK, "one document twice", {"results": [{"index": 0, "relevance_score": 0.5}] * 2}),
    _call(
        Ask.RERANK,
        "a document that is not there",
        {"results": [{"index": place, "relevance_score": 0.5} for place in (0, 9)]},
    ),
    _call(Ask.RERANK, "none", {"results": []}),
    _call(
        Ask.RERANK, "a score of text", {"results": [{"index": place, "relevance_score": "high"} for place in (0, 1)]}
    ),
    _call(Ask.TOKENIZE, "none", {}),
    _call(Ask.TOKENIZE, "another count", {"tokens": [1, 2], "count": 5}),
    _call(Ask.TOKENIZE, "beyond all tokens", {"tokens": [2**40]}),
    _call(Ask.TOKENIZE, "texts", {"tokens": ["a"]}),
    _call(Ask.IMAGE, "an address", {"data": [{"url": "http://elsewhere/a.png"}]}),
    _call(Ask.IMAGE, "no base64", {"data": [{"b64_json": "&&&"}]}),
    _call(Ask.IMAGE, "a number", {"data": [{"b64_json": 5}]}),
    _call(
        Ask.IMAGE,
        "figures below nothing",
        {"data": [{"b64_json": base64.b64encode(b"x").decode()}], "usage": {"input_tokens": -1}},
    ),
    _call(Ask.TRANSCRIPTION, "no text", {"language": "en"}),
    _call(Ask.TRANSCRIPTION, "a text that is none", {"text": ["a"]}),
    _call(Ask.TRANSCRIPTION, "parts of numbers", {"text": "a", "segments": [1, 2]}),
    Row(name="speech: nothing", answer=answer(b"", "audio/mpeg"), sees=PROTOCOL, ask=Ask.SPEECH),
    Row(name="speech: a page", answer=answer(b"<html>", "text/html"), sees=PROTOCOL, ask=Ask.SPEECH),
    Row(name="speech: cut off", answer=answer(b"x" * 500, "audio/mpeg")[:-100], sees=PROTOCOL, ask=Ask.SPEECH),
    Row(
        name="speech: packed",
        answer=answer(b"x", "audio/mpeg", extra="Content-Encoding: br\r\n"),
        sees=PROTOCOL,
        ask=Ask.SPEECH,
    ),
)

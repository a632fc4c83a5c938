"""A catalogue of engine answers, most of them wrong: the bytes of each, and the error that a caller must get.

Families: ends and contents of chat streams, texts (UTF-8, JSON, server-sent events), connections (HTTP), and calls
other than chats.
"""

import base64
import gzip
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from kit.hostile_engine.server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    USAGE,
    answer,
    chunked,
    end,
    event,
    piece,
)
from weft.kernel.errors.reasons import Reason

PROTOCOL = Reason.BACKEND_PROTOCOL_ERROR
FAILED = Reason.BACKEND_ERROR
REJECTED = Reason.BACKEND_REJECTED


class Ask(Enum):
    """The request to the engine."""

    CHAT = "chat"
    TWO_CHOICES = "two choices of a chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    IMAGE = "image"
    TRANSCRIPTION = "transcription"
    SPEECH = "speech"


@dataclass(frozen=True, kw_only=True)
class Row:
    """An answer and the expected result, the same for streaming and non-streaming callers."""

    name: str
    answer: bytes
    """Head and body; empty: the connection is reset."""
    sees: Reason | None
    """The reason of the caller's error; None: a valid answer with the text `text`."""
    text: str = ""
    ask: Ask = Ask.CHAT


def stream(*events: bytes, head: bytes = STREAM_HEAD, last: bytes = LAST_CHUNK) -> bytes:
    """Returns a stream that sends each event in a separate chunk."""
    return head + b"".join(map(chunked, events)) + last


def cut(*events: bytes) -> bytes:
    """Returns a stream without the last chunk."""
    return stream(*events, last=b"")


HI = piece("Hi")
GOOD = (HI, end(), USAGE, DONE)
"""The events of a valid answer."""


def _choice(index: object = 0, finish: object = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": index, "finish_reason": finish, **fields}]})


def _delta(finish: object = None, **delta: Any) -> bytes:
    return _choice(0, finish, delta=delta)


_CALL = _delta(tool_calls=[{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
_UNKNOWN_REASONS: tuple[object, ...] = ("done", "\u0000", 5, True, ["stop"], {})


def _finish(word: object, sees: Reason | None) -> Row:
    return Row(
        name=f"finish reason {str(word)[:12]!r}", answer=stream(HI, end(word), USAGE, DONE), sees=sees, text="Hi"
    )


def _bad(name: str, *events: bytes, sees: Reason = PROTOCOL, ask: Ask = Ask.CHAT) -> Row:
    return Row(name=name, answer=stream(*events), sees=sees, ask=ask)


def _good(name: str, *events: bytes, text: str = "Hi", ask: Ask = Ask.CHAT) -> Row:
    return Row(name=name, answer=stream(*events), sees=None, text=text, ask=ask)


ENDS = (
    _finish("abort", FAILED),
    *(_finish(word, None) for word in _UNKNOWN_REASONS),
    _good(
        "an empty finish reason on every piece",
        piece("Hi", finish_reason=""),
        piece("!", finish_reason=""),
        DONE,
        text="Hi!",
    ),
    _good("no finish reason, with [DONE]", HI, USAGE, DONE),
    _bad("no finish reason, without [DONE]", HI, USAGE),
    _good("no field for a finish reason", event({"choices": [{"index": 0, "delta": {"content": "Hi"}}]}), DONE),
    _bad("[DONE] at once", DONE),
    _good("[DONE] before the finish reason", HI, DONE, end()),
    _bad("an empty body"),
    _bad("comments alone", b": keep-alive\n\n" * 20),
    _bad("a preamble alone", _delta(role="assistant", content=""), DONE),
    _bad("figures alone", USAGE, DONE),
    _bad("text after the finish reason", HI, end(), piece("more"), DONE),
    _bad("reasoning after the finish reason", HI, end(), _delta(reasoning_content="hm"), DONE),
    _bad("a refusal after the finish reason", HI, end(), _delta(refusal="no"), DONE),
    _bad("a call after the finish reason", HI, end(), _CALL, DONE),
    _bad("a failure after the finish reason", HI, end("stop"), end("error"), USAGE, DONE, sees=FAILED),
    _bad("tool_calls and no call", HI, end("tool_calls"), USAGE, DONE),
    _bad("nothing but empty texts", piece(""), piece(""), end(), DONE),
    _bad("a choice that was not asked for", HI, _choice(1, "stop", delta={"content": "you"}), end(), DONE),
    _good("choice '0'", _choice("0", "stop", delta={"content": "Hi"}), DONE),
    _bad("the user speaks", HI, _delta(role="user", content="and I"), end(), DONE),
    _good("one of two choices at a time", *GOOD, text="HiHi", ask=Ask.TWO_CHOICES),
    _bad("the second of two choices alone", _choice(1, "stop", delta={"content": "Hi"}), DONE, ask=Ask.TWO_CHOICES),
    _bad("none of two choices", USAGE, DONE, ask=Ask.TWO_CHOICES),
    Row(name="cut off after the finish reason", answer=cut(HI, end()), sees=PROTOCOL),
    Row(name="cut off after [DONE]", answer=cut(*GOOD), sees=None, text="Hi"),
    _good("an empty piece after the finish reason", HI, end(), piece(""), _delta(role="assistant"), USAGE, DONE),
    _good("no [DONE]", HI, end(), USAGE),
    _good("text after [DONE]", *GOOD, piece("more"), end("length")),
    _good("an error after [DONE]", *GOOD, event({"error": "no"})),
    _good("much after [DONE]", *GOOD, b": " + b"x" * 500_000 + b"\n\n"),
    _good("a null message beside the delta", piece("Hi", message=None), *GOOD[1:]),
)
"""Chat streams that do not end, end twice, or state a wrong finish reason."""


_TOOL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
_NO_TEXTS: tuple[object, ...] = (1.5, True)
_NO_OBJECTS: tuple[object, ...] = ("Hi", [], 1)
_NO_CHOICES: tuple[object, ...] = ("none", [5])


def _bare(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta}]})


def _wrong(name: str, **chunk: Any) -> Row:
    """Returns an otherwise valid answer with these fields in a chunk."""
    return _bad(name, HI, event(chunk), *GOOD[1:])


def _unread(name: str, **chunk: Any) -> Row:
    """Returns an otherwise valid answer with unreadable fields beside the content."""
    return _good(name, HI, event(chunk), *GOOD[1:])


def _stated(name: str, *events: bytes) -> tuple[Row, Row]:
    """Returns an error before the content, and one after it."""
    return (
        _bad(f"{name}, at once", *events, sees=FAILED),
        _bad(f"{name}, after content", HI, *events, end(), DONE, sees=FAILED),
    )


CONTENTS = (
    *(_bad(f"content: {value!r:.20}", _bare(content=value), *GOOD[1:]) for value in _NO_TEXTS),
    *(_wrong(f"delta: {value!r}", choices=[{"index": 0, "delta": value}]) for value in _NO_OBJECTS),
    *(_wrong(f"choices: {value!r}", choices=value) for value in _NO_CHOICES),
    _bad("tool_calls: an object", _bare(tool_calls=_TOOL), end("tool_calls"), DONE),
    _bad("tool_calls: a text", _bare(tool_calls="f()"), end("tool_calls"), DONE),
    _good("a call -1", _bare(tool_calls=[{**_TOOL, "index": -1}]), end("tool_calls"), DONE, text=""),
    _bad("a call of a number", _bare(tool_calls=[{"index": 0, "function": {"name": 5}}]), end("tool_calls"), DONE),
    _bad("reasoning: a number", _bare(reasoning_content=1), *GOOD),
    _bad("refusal: a list", _bare(refusal=["no"]), *GOOD),
    _unread("prompt_progress: below nothing", choices=[], prompt_progress={"total": -1}),
    *_stated("an error object", event({"error": {"message": "no tea", "type": "server_error", "code": 500}})),
    *_stated("an empty error", event({"error": {}})),
    *_stated("an event 'error' that looks like an answer", b"event: error\n" + HI),
    _bad("an error: a number", HI, event({"error": 500}), end(), DONE),
    _bad("an error: a list", HI, event({"error": ["no"]}), end(), DONE),
    _bad("an error of a wrong form", HI, event({"error": {"message": {"text": "no"}}}), end(), DONE),
    _bad(
        "an error beside content",
        event({"error": "no tea", "choices": [{"delta": {"content": "Hi"}}]}),
        DONE,
        sees=FAILED,
    ),
    _good("an error: null", event({"error": None, "choices": []}), *GOOD),
    _good("no figures", HI, end(), DONE),
    _good("fields that nobody knows", event({"x": 1, "choices": []}), *GOOD),
)
"""Chunks, usage figures and errors with wrong forms, types and sizes."""


BOM = b"\xef\xbb\xbf"
DEPTH = 100_000
_BEGIN, _END = b'data: {"choices":[{"index":0,"delta":{"content":"', b'"},"finish_reason":null}]}\n\n'


def _with_event(name: str, payload: bytes) -> Row:
    """Returns an otherwise valid answer with this payload."""
    return _bad(name, HI, b"data: " + payload + b"\n\n", *GOOD[1:])


def _unread_event(name: str, payload: bytes) -> Row:
    """Returns an otherwise valid answer with this payload, which is only wrong beside the content."""
    return _good(name, HI, b"data: " + payload + b"\n\n", *GOOD[1:])


def _half(name: str, text: bytes, becomes: str) -> Row:
    """Returns an answer with half a character that no chunk completes."""
    return _good(name, HI, _BEGIN + text + _END, *GOOD[1:], text=f"Hi{becomes}")


def _with_text(name: str, text: bytes) -> Row:
    """Returns an answer with this text, including escapes, as a chunk."""
    return _bad(name, HI, _BEGIN + text + _END, *GOOD[1:])


TEXTS = (
    _with_event("JSON and more", b'{"choices":[]} {"choices":[]}'),
    _with_event("Python's JSON", b"{'choices': []}"),
    _with_event("a text", b'"Hi"'),
    _with_event("a number", b"5"),
    _with_event("[done] in small letters", b"[done]"),
    _with_event("lists without end", b"[" * DEPTH),
    _with_event(
        "objects in a field that nobody knows", b'{"choices":[],"x":' + b'{"a":' * DEPTH + b"1" + b"}" * DEPTH + b"}"
    ),
    _unread_event("a number of 5000 digits", b'{"choices":[],"usage":{"prompt_tokens":' + b"9" * 5_000 + b"}}"),
    _unread_event("NaN", b'{"choices":[],"timings":{"prompt_ms":NaN}}'),
    _unread_event("Infinity", b'{"choices":[],"timings":{"prompt_ms":Infinity}}'),
    _unread_event("1e999", b'{"choices":[],"timings":{"prompt_ms":1e999}}'),
    _with_event("UTF-16", '{"choices":[]}'.encode("utf-16-le")),
    _with_text("half a character", b"\xf0\x9f\x98"),
    _with_text("an overlong character", b"\xc0\xaf"),
    _half("a high surrogate before a letter", b"\\ud83dA", "\ufffdA"),
    _half("a low surrogate", b"\\ude00", "\ufffd"),
    _half("surrogates in the wrong order", b"\\ude00\\ud83d", "\ufffd\ufffd"),
    _with_text("a raw line feed", b"a\nb"),
    _with_text("a raw NUL", b"a\x00b"),
    _with_text("an unknown escape", b"\\x41"),
    _bad(
        "a surrogate in arguments",
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":"\\ud800"}}]}}]}\n\n',
        end("tool_calls"),
        DONE,
    ),
    _good(
        "a surrogate in a finish reason",
        HI,
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"\\ud800"}]}\n\n',
        DONE,
    ),
    _bad("a surrogate in an error", b'data: {"error":{"message":"\\ud800"}}\n\n', DONE, sees=FAILED),
    _bad("no UTF-8 in an error", b'data: {"error":{"message":"\xff"}}\n\n', DONE, sees=FAILED),
    _good("a second byte order mark", BOM, *GOOD[:1], BOM + end(), DONE),
    _bad("events without an empty line", *(part.rstrip(b"\n") + b"\n" for part in GOOD)),
    _bad("the last event without its empty line", HI, end().rstrip(b"\n")),
    _bad("fields without a colon", b"data\n\n", b"data\n\n"),
    _bad("an event of 5 MiB without an end", b"data: " + b"x" * (5 << 20)),
    _bad("a stream that goes on with nothing", b"\n" * 100_000),
    _good("a name that comes twice", _BEGIN + b'no","content":"Hi' + _END, *GOOD[1:]),
    _good("an escaped NUL", _BEGIN + b"a\\u0000b" + _END, *GOOD[1:], text="a\0b"),
    _good("a pair of surrogates", _BEGIN + b"\\ud83d\\ude00" + _END, *GOOD[1:], text="\U0001f600"),
    _good("no UTF-8 in a field that nobody knows", b'data: {"choices":[],"x":"\xff"}\n\n', *GOOD),
    _good("ids, names and pauses", b"id: 1\nretry: 5\nevent: chunk\n" + HI, *GOOD[1:]),
    Row(
        name="byte by byte",
        answer=STREAM_HEAD + b"".join(b"1\r\n%c\r\n" % byte for byte in HI + end() + USAGE + DONE) + b"0\r\n\r\n",
        sees=None,
        text="Hi",
    ),
)
"""Invalid UTF-8, invalid JSON, JSON beyond the limits, and unusual forms of server-sent events."""


_BODY = b"".join(GOOD)
_EVENTS = "text/event-stream"


def _http(name: str, data: bytes, sees: Reason | None = PROTOCOL) -> Row:
    return Row(name=name, answer=data, sees=sees, text="Hi")


def _head(*lines: str, body: bytes = b"", status: str = "HTTP/1.1 200 OK") -> bytes:
    return "".join(f"{line}\r\n" for line in (status, *lines)).encode("latin-1") + b"\r\n" + body


def _status(status: str, body: bytes, sees: Reason, extra: str = "") -> Row:
    return _http(f"status {status}, {body[:12]!r}", answer(body, status=status, extra=extra), sees)


def _packed(encoding: str, body: bytes) -> bytes:
    return answer(body, _EVENTS, extra=f"Content-Encoding: {encoding}\r\n")


CONNECTIONS = (
    _http("a reset at once", b""),
    _http("garbage", b"\x16\x03\x01\x02\x00 no HTTP at all\r\n\r\n"),
    _http("an SSH server", b"SSH-2.0-OpenSSH_9.6\r\n"),
    _http("HTTP/0.9", b"<html>Hi</html>"),
    _http("a status that is no number", _head(status="HTTP/1.1 abc OK")),
    _http("no head but a body", _BODY),
    _http("a header without a colon", _head("Content-Type text/plain", "Content-Length: 0")),
    _http("NUL in a header", _head("X-A: b\x00c", "Content-Length: 0")),
    _http("a length below nothing", _head(f"Content-Type: {_EVENTS}", "Content-Length: -5", body=_BODY)),
    _http("more than the length", _head(f"Content-Type: {_EVENTS}", f"Content-Length: {len(HI)}", body=_BODY)),
    _http(
        "a length that cuts off the end",
        _head(f"Content-Type: {_EVENTS}", f"Content-Length: {len(_BODY) - len(DONE) - 120}", body=_BODY),
    ),
    _http("chunks that just end", cut(HI)),
    _http("a chunk of a size below nothing", STREAM_HEAD + chunked(HI) + b"-5\r\n"),
    _http("a chunk of a huge size", STREAM_HEAD + chunked(HI) + b"f" * 40 + b"\r\n"),
    _http("a chunk without its line feed", STREAM_HEAD + b"%x\r\n%s0\r\n\r\n" % (len(HI), HI)),
    _http("a page", answer(b"<html>Log in</html>", "text/html")),
    _http("plain text", answer(_BODY, "text/plain")),
    _http("no media type", _head(f"Content-Length: {len(_BODY)}", body=_BODY)),
    _http("a media type that is no text", _head("Content-Type: \xff\xfe/\xed\xa0\x80", "Content-Length: 0")),
    _http("a long media type", _head("Content-Type: " + "x" * 5_000, "Content-Length: 0")),
    _http(
        "JSON in place of a stream", answer(b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}'), None
    ),
    _http("an empty JSON object", answer(b"{}")),
    _http("JSON of nothing", answer(b"")),
    _http("a JSON list", answer(b"[]")),
    _http("JSON that is none", answer(b"<html>")),
    _http("deep JSON in place of a stream", answer(b'{"x":' + b"[" * 50_000)),
    _http("an error as JSON", answer(b'{"error":{"message":"no tea"}}'), FAILED),
    _http("an error text as JSON", answer(b'{"error":"no tea"}'), FAILED),
    _http(
        "an error about the request as JSON",
        answer(b'{"error":{"message":"bad","type":"invalid_request_error"}}'),
        REJECTED,
    ),
    _http("gzip", _packed("gzip", gzip.compress(_BODY)), None),
    _http("gzip in members", _packed("x-gzip", gzip.compress(_BODY[:40]) + gzip.compress(_BODY[40:])), None),
    _http("deflate", _packed("deflate", zlib.compress(_BODY)), None),
    _http("a gzip that is cut", _packed("gzip", gzip.compress(_BODY)[:-30])),
    _http("gzip that is none", _packed("gzip", b"\x1f\x8b no gzip")),
    _http("a gzip that grows", _packed("gzip", gzip.compress(b"\0" * (1 << 20)))),
    _http("brotli", _packed("br", b"\x0b\x02\x80")),
    _http("an unknown encoding", _packed("rot13", _BODY)),
    _http("two encodings", _packed("gzip, identity", gzip.compress(_BODY)), None),
    _status("204 No Content", b"", FAILED),
    _status("206 Partial Content", _BODY, FAILED),
    _status("301 Moved", b"", FAILED, extra="Location: http://127.0.0.1:9/\r\n"),
    _status("418 Teapot", b"\xff\xfe", REJECTED),
    _status("400 Bad", b'{"error":' + b"[" * 50_000, REJECTED),
    _status("400 Bad", b'{"error":{"message":"\\ud800"}}', REJECTED),
    _status("500 Broken", b"<html>Traceback</html>", FAILED),
    _status("500 Broken", b'{"error":{"message":"\xff\xed\xa0\x80"}}', FAILED),
    _status("500 Broken", b'{"error":5}', FAILED),
    _status("500 Broken", b"x" * 1_000_000, FAILED),
    _status("502 Bad Gateway", b'{"detail":[{"msg":"no"}]}', FAILED),
    _status("599 What", b"", FAILED),
    _http("status 999", answer(b"{}", status="999 Strange"), FAILED),
    _http(
        "a refusal that is packed",
        answer(gzip.compress(b"{}"), status="500 Broken", extra="Content-Encoding: gzip\r\n"),
        FAILED,
    ),
    _http("a refusal that just ends", _head("Content-Length: 500", body=b'{"error"', status="HTTP/1.1 500 Broken")),
    _http(
        "an upgrade",
        _head("Connection: upgrade", "Upgrade: websocket", status="HTTP/1.1 101 Switching Protocols"),
        FAILED,
    ),
    _http("a media type with a parameter", answer(_BODY, f"{_EVENTS}; charset=utf-8"), None),
    _http("the encoding 'identity'", _packed("identity", _BODY), None),
    _http(
        "cookies that are none", answer(_BODY, _EVENTS, extra="Set-Cookie: \x01=;;;=\r\n".replace("\x01", "a b")), None
    ),
    _http("chunks after the last one", stream(*GOOD) + LAST_CHUNK),
)
"""Answers that are wrong as HTTP: heads, lengths, chunks, media types, encodings and statuses."""


_DEEP = b'{"data":[],"results":[],"tokens":[],"text":"","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
_JSON_ASKS = (Ask.EMBEDDING, Ask.RERANK, Ask.TOKENIZE, Ask.IMAGE, Ask.TRANSCRIPTION)


def _json(document: object) -> bytes:
    return answer(msgspec.json.encode(document))


def _completion_text(text: object, finish: object = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def _completion(name: str, *events: bytes, sees: Reason | None = PROTOCOL) -> Row:
    return Row(name=f"completion: {name}", answer=stream(*events), sees=sees, text="Hi", ask=Ask.COMPLETION)


def _embedding(name: str, document: object, sees: Reason | None = PROTOCOL) -> Row:
    data = document if isinstance(document, bytes) else _json(document)
    return Row(name=f"embedding: {name}", answer=data, sees=sees, ask=Ask.EMBEDDING)


def _vectors(*values: object, places: tuple[object, ...] = (0, 1), **usage: object) -> dict[str, object]:
    data = [{"index": place, "embedding": value} for place, value in zip(places, values, strict=True)]
    return {"data": data, "usage": {"prompt_tokens": 2, **usage}}


def _call(ask: Ask, name: str, document: object, sees: Reason | None = PROTOCOL) -> Row:
    return Row(name=f"{ask.value}: {name}", answer=_json(document), sees=sees, ask=ask)


def _of_every_call(ask: Ask) -> tuple[Row, ...]:
    """Answers that are wrong for every JSON call."""
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


def _scores(*scores: object, key: str = "relevance_score", places: tuple[object, ...] = (0, 1)) -> list[object]:
    return [{"index": place, key: score} for place, score in zip(places, scores, strict=True)]


def _raw_call(ask: Ask, name: str, body: bytes, sees: Reason | None = PROTOCOL, media_type: str = "") -> Row:
    data = answer(body, media_type or "application/json")
    return Row(name=f"{ask.value}: {name}", answer=data, sees=sees, ask=ask)


def _speech(name: str, data: bytes) -> Row:
    return Row(name=f"speech: {name}", answer=data, sees=PROTOCOL, ask=Ask.SPEECH)


def _transcript(name: str, *events: object, sees: Reason | None = PROTOCOL) -> Row:
    """A stream of events about a transcription, which are documents or bytes."""
    data = stream(*(each if isinstance(each, bytes) else event(each) for each in events))
    return Row(name=f"transcription stream: {name}", answer=data, sees=sees, ask=Ask.TRANSCRIPTION)


_TEA = {"error": {"message": "no tea"}}
_PIECE = {"type": "transcript.text.delta", "delta": "a"}
_ODD_SCORES: tuple[object, ...] = ("0.5", True, None, [0.5], {"score": 0.5})
_ODD_PLACES: tuple[object, ...] = (None, "0", True, -1, 2**40, 0.5, 1)
_NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400)
_ODD_TIMES: tuple[object, ...] = ("1.5", "soon", -1, None, 1e300, True, [1])
_NO_SEGMENTS: tuple[object, ...] = ({}, "a", [[]])
_SOUND = "audio/mpeg"
RERANKS = (
    *(_call(Ask.RERANK, f"a score {score!r}", {"results": _scores(score, 0.5)}) for score in _ODD_SCORES),
    *(
        _raw_call(
            Ask.RERANK,
            f"a score {number[:9].decode()}",
            b'{"results":[{"index":0,"relevance_score":%s},{"index":1,"relevance_score":1}]}' % number,
        )
        for number in _NO_NUMBERS
    ),
    *(_call(Ask.RERANK, f"document {place!r}", {"results": _scores(1, 1, places=(place, 1))}) for place in _ODD_PLACES),
    *(
        _call(Ask.RERANK, f"results {value!r}", {"results": value})
        for value in (None, {"0": 0.5}, "none", [None, None])
    ),
    _call(Ask.RERANK, "one too many", {"results": _scores(1, 1, 1, places=(0, 1, 2))}),
    _call(Ask.RERANK, "an error", _TEA, FAILED),
    _call(Ask.RERANK, "an error of text", {"error": "no tea"}, FAILED),
    _call(Ask.RERANK, "a detail", {"detail": "no tea"}, FAILED),
    _raw_call(Ask.RERANK, "an empty body", b""),
    _raw_call(Ask.RERANK, "plain text", msgspec.json.encode({"results": _scores(1, 1)}), media_type="text/plain"),
    _call(Ask.RERANK, "in order", {"results": _scores(1, 1), "usage": {"total_tokens": 3}}, None),
    _call(Ask.RERANK, "scores by SGLang", _scores(1, 1, key="score"), None),
    _call(Ask.RERANK, "scores by Voyage", {"data": _scores(1, 1)}, None),
    _call(Ask.RERANK, "documents as floats", {"results": _scores(1, 1, places=(0.0, 1.0))}, None),
    _raw_call(
        Ask.RERANK,
        "figures that are no numbers",
        b'{"results":[{"index":0,"relevance_score":1},{"index":1,"relevance_score":1}],"usage":{"total_tokens":NaN}}',
        None,
    ),
)
"""Scores of documents."""
SOUNDS = (
    *(_call(Ask.TRANSCRIPTION, f"a length {time!r}", {"text": "a", "duration": time}, None) for time in _ODD_TIMES),
    *(
        _raw_call(Ask.TRANSCRIPTION, f"a length {number[:9].decode()}", b'{"text":"a","duration":%s}' % number, None)
        for number in _NO_NUMBERS
    ),
    *(
        _call(Ask.TRANSCRIPTION, f"a time {time!r}", {"text": "a", "segments": [{"start": time, "text": "a"}]}, None)
        for time in _ODD_TIMES
    ),
    *(_call(Ask.TRANSCRIPTION, f"a text {text!r}", {"text": text}) for text in (None, 5, {"a": 1})),
    *(_call(Ask.TRANSCRIPTION, f"segments {value!r}", {"text": "a", "segments": value}) for value in _NO_SEGMENTS),
    _call(Ask.TRANSCRIPTION, "a segment of a number", {"text": "a", "segments": [{"text": 5}]}),
    _call(Ask.TRANSCRIPTION, "a word of a number", {"text": "a", "words": [{"word": 5}]}),
    _call(Ask.TRANSCRIPTION, "a word without times", {"text": "a", "words": [{"word": "a", "start": "x"}]}, None),
    _call(Ask.TRANSCRIPTION, "a language of a number", {"text": "a", "language": 5}, None),
    _call(Ask.TRANSCRIPTION, "a doubt of text", {"text": "a", "segments": [{"text": "a", "avg_logprob": "x"}]}, None),
    _call(Ask.TRANSCRIPTION, "an error", _TEA, FAILED),
    _raw_call(Ask.TRANSCRIPTION, "an empty body", b""),
    _raw_call(Ask.TRANSCRIPTION, "plain text", b"a", media_type="text/plain"),
    _transcript("nothing"),
    _transcript("no end", _PIECE),
    _transcript("not JSON", b"data: a\n\n"),
    _transcript("a piece of a number", {**_PIECE, "delta": 5}, DONE),
    _transcript("an error", _PIECE, _TEA, sees=FAILED),
    _transcript("an event 'error' of text", b"event: error\ndata: no tea\n\n", sees=FAILED),
    _transcript(
        "pieces of null", {**_PIECE, "delta": None}, {"type": None}, {"choices": [{"delta": None}]}, DONE, sees=None
    ),
    *(
        _transcript(f"figures {value!r}", {**_PIECE, "type": "transcript.text.done", "text": None, **value}, sees=None)
        for value in (
            {"usage": {"seconds": 1e300}},
            {"usage": {"seconds": 1e17}},
            {"timings": {"predicted_ms": 1e308}},
            {"timings": {"predicted_n": -1}},
            {"timings": None},
            {"language": 5, "duration": [1]},
        )
    ),
    _raw_call(Ask.SPEECH, "nothing", b"", media_type=_SOUND),
    _raw_call(Ask.SPEECH, "a page", b"<html>", media_type="text/html"),
    _raw_call(Ask.SPEECH, "an error", b'{"error":{"message":"no tea"}}', FAILED),
    _raw_call(
        Ask.SPEECH, "an error about the request", b'{"error":{"message":"a","type":"invalid_request_error"}}', REJECTED
    ),
    _raw_call(Ask.SPEECH, "JSON", b"{}"),
    _raw_call(Ask.SPEECH, "events", b"data: a\n\n", media_type=_EVENTS),
    _raw_call(Ask.SPEECH, "a film", b"a", media_type="video/mp4"),
    _raw_call(Ask.SPEECH, "no kind of sound", b"a", media_type="audio/"),
    _raw_call(Ask.SPEECH, "a long kind of sound", b"a", media_type="audio/" + "x" * 300),
    _raw_call(Ask.SPEECH, "a kind with parameters", b"a", None, media_type="Audio/L16; rate=24000"),
    _speech("cut off", answer(b"x" * 500, _SOUND)[:-100]),
    _speech("chunks that just end", _head(f"Content-Type: {_SOUND}", "Transfer-Encoding: chunked", body=chunked(b"a"))),
    _speech("packed", answer(b"x", _SOUND, extra="Content-Encoding: br\r\n")),
)
"""Transcriptions and recordings."""
CALLS = (
    _completion("no finish reason", _completion_text("Hi"), DONE, sees=None),
    _completion("an empty finish reason", _completion_text("H", ""), _completion_text("i", ""), DONE, sees=None),
    _completion("an unknown finish reason", _completion_text("Hi", "done"), DONE, sees=None),
    _completion("abort", _completion_text("Hi", "abort"), DONE, sees=FAILED),
    _completion("text after the finish reason", _completion_text("Hi", "stop"), _completion_text("more"), DONE),
    _completion(
        "another finish reason", _completion_text("Hi", "stop"), _completion_text("", "length"), DONE, sees=None
    ),
    _completion("a text that is none", _completion_text(5, "stop"), DONE),
    _completion(
        "a message",
        event({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}),
        USAGE,
        DONE,
        sees=None,
    ),
    _completion("another choice", event({"choices": [{"index": 3, "text": "Hi", "finish_reason": "stop"}]}), DONE),
    _completion("nothing", _completion_text("", "stop"), DONE),
    _completion("no UTF-8", _completion_text("Hi"), b'data: {"choices":[{"text":"\xff"}]}\n\n', DONE),
    _completion("an error", _completion_text("Hi"), event({"error": "no tea"}), DONE, sees=FAILED),
    _completion("in order", _completion_text("Hi", "stop"), USAGE, DONE, sees=None),
    *(row for ask in _JSON_ASKS for row in _of_every_call(ask)),
    _embedding("nothing", {}),
    _embedding("no figures", {"data": [{"index": 0, "embedding": [0.5]}, {"index": 1, "embedding": [0.5]}]}, sees=None),
    _embedding("one too few", _vectors([0.5], places=(0,))),
    _embedding("one too many", _vectors([0.5], [0.5], [0.5], places=(0, 1, 2))),
    _embedding("one twice", _vectors([0.5], [0.5], places=(1, 1))),
    _embedding("all numbered 0", _vectors([0.5], [0.5], places=(0, 0)), sees=None),
    _embedding("no numbers", _vectors([0.5], [0.5], places=(None, "b")), sees=None),
    _embedding("figures that are no numbers", _vectors([0.5], [0.5], prompt_tokens=None), sees=None),
    _embedding("of another input", _vectors([0.5], [0.5], places=(0, 7))),
    _embedding("below nothing", _vectors([0.5], [0.5], places=(0, -1)), sees=None),
    _embedding("empty vectors", _vectors([], [])),
    _embedding("a vector of texts", _vectors(["a"], ["b"])),
    _embedding("a vector that is a text", _vectors("AAAA", "AAAA")),
    _embedding("a vector of null", _vectors([None], [None])),
    _embedding("too large for 32 bits", _vectors([1e300], [0.5])),
    _embedding("too small for 32 bits", _vectors([-1e300], [0.5])),
    _embedding("1e999", answer(b'{"data":[{"index":0,"embedding":[1e999]},{"index":1,"embedding":[0]}],"usage":{}}')),
    _embedding("NaN", answer(b'{"data":[{"index":0,"embedding":[NaN]},{"index":1,"embedding":[0]}],"usage":{}}')),
    _embedding("tokens below nothing", _vectors([0.5], [0.5], prompt_tokens=-1), sees=None),
    _embedding("tokens beyond all numbers", _vectors([0.5], [0.5], prompt_tokens=10**30), sees=None),
    _call(Ask.RERANK, "one document twice", {"results": [{"index": 0, "relevance_score": 0.5}] * 2}),
    _call(
        Ask.RERANK,
        "a document that is not there",
        {"results": [{"index": place, "relevance_score": 0.5} for place in (0, 9)]},
    ),
    _call(Ask.RERANK, "none", {"results": []}),
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
        sees=None,
    ),
    _call(Ask.TRANSCRIPTION, "no text", {"language": "en"}),
    _call(Ask.TRANSCRIPTION, "a text that is none", {"text": ["a"]}),
    _call(Ask.TRANSCRIPTION, "parts of numbers", {"text": "a", "segments": [1, 2]}),
)
"""Wrong answers to completions, embeddings and the other calls that are not chats."""

ROWS: tuple[Row, ...] = (*ENDS, *CONTENTS, *TEXTS, *CONNECTIONS, *CALLS, *RERANKS, *SOUNDS)
MALFORMED: tuple[Row, ...] = tuple(row for row in ROWS if row.sees is not None)

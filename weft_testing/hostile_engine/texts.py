"""Bytes that are no text, text that is no JSON, JSON beyond every bound, and events of strange forms."""

from weft_testing.hostile_engine.row import GOOD, HI, PROTOCOL, Row, stream
from weft_testing.hostile_engine.server import DONE, STREAM_HEAD, USAGE, end

BOM = b"\xef\xbb\xbf"
DEPTH = 100_000
_BEGIN, _END = b'data: {"choices":[{"index":0,"delta":{"content":"', b'"},"finish_reason":null}]}\n\n'
_TIDY = b"".join(GOOD)


def _bad(name: str, *events: bytes) -> Row:
    return Row(name=name, answer=stream(*events), sees=PROTOCOL)


def _data(name: str, payload: bytes) -> Row:
    """This payload in the middle of an answer that is in order otherwise."""
    return _bad(name, HI, b"data: " + payload + b"\n\n", *GOOD[1:])


def _text(name: str, text: bytes) -> Row:
    """This text, escapes included, as a piece of an answer."""
    return _bad(name, HI, _BEGIN + text + _END, *GOOD[1:])


def _good(name: str, *events: bytes, text: str = "Hi") -> Row:
    return Row(name=name, answer=stream(*events), sees=None, text=text)


ROWS = (
    _data("not JSON", b"Hello"),
    _data("half of JSON", b'{"choices":[{"delta":{"con'),
    _data("JSON and more", b'{"choices":[]} {"choices":[]}'),
    _data("Python's JSON", b"{'choices': []}"),
    _data("a list", b"[]"),
    _data("a text", b'"Hi"'),
    _data("a number", b"5"),
    _data("[done] in small letters", b"[done]"),
    _data("a page in an event", b"<html>502 Bad Gateway</html>"),
    _data("lists without end", b"[" * DEPTH),
    _data("lists in a field that nobody knows", b'{"choices":[],"x":' + b"[" * DEPTH + b"]" * DEPTH + b"}"),
    _data(
        "objects in a field that nobody knows", b'{"choices":[],"x":' + b'{"a":' * DEPTH + b"1" + b"}" * DEPTH + b"}"
    ),
    _data("a number of 5000 digits", b'{"choices":[],"usage":{"prompt_tokens":' + b"9" * 5_000 + b"}}"),
    _data("NaN", b'{"choices":[],"timings":{"prompt_ms":NaN}}'),
    _data("Infinity", b'{"choices":[],"timings":{"prompt_ms":Infinity}}'),
    _data("1e999", b'{"choices":[],"timings":{"prompt_ms":1e999}}'),
    _data("UTF-16", '{"choices":[]}'.encode("utf-16-le")),
    _text("a byte that is no UTF-8", b"\xff"),
    _text("half a character", b"\xf0\x9f\x98"),
    _text("an overlong character", b"\xc0\xaf"),
    _text("a surrogate in UTF-8", b"\xed\xa0\x80"),
    _text("a high surrogate", b"\\ud83d"),
    _text("a high surrogate before a letter", b"\\ud83dA"),
    _text("a low surrogate", b"\\ude00"),
    _text("surrogates in the wrong order", b"\\ude00\\ud83d"),
    _text("a raw line feed", b"a\nb"),
    _text("a raw NUL", b"a\x00b"),
    _text("an unknown escape", b"\\x41"),
    _bad(
        "a surrogate in arguments",
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":"\\ud800"}}]}}]}\n\n',
        end("tool_calls"),
        DONE,
    ),
    _bad(
        "a surrogate in a finish reason",
        HI,
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"\\ud800"}]}\n\n',
        DONE,
    ),
    _bad("a surrogate in an error", b'data: {"error":{"message":"\\ud800"}}\n\n', DONE),
    _bad("no UTF-8 in an error", b'data: {"error":{"message":"\xff"}}\n\n', DONE),
    _bad("a second byte order mark", BOM, *GOOD[:1], BOM + end(), DONE),
    _bad("events without an empty line", *(part.rstrip(b"\n") + b"\n" for part in GOOD)),
    _bad("the last event without its empty line", HI, end().rstrip(b"\n")),
    _bad("fields without a colon", b"data\n\n", b"data\n\n"),
    _bad("an event of 5 MiB", _BEGIN + b"x" * (5 << 20) + _END, *GOOD[1:]),
    _bad("an event of 5 MiB without an end", b"data: " + b"x" * (5 << 20)),
    _bad("an event of many lines", b"data: x\n" * 700_000 + b"\n"),
    _bad("a comment of 5 MiB", b": " + b"x" * (5 << 20) + b"\n\n", *GOOD),
    Row(name="a stream that goes on with nothing", answer=stream(b"\n" * 100_000), sees=PROTOCOL),
    _good("a byte order mark", BOM + HI, *GOOD[1:]),
    Row(
        name="a byte order mark in three chunks", answer=stream(BOM[:1], BOM[1:2], BOM[2:], *GOOD), sees=None, text="Hi"
    ),
    _good("lines that end with CR", _TIDY.replace(b"\n", b"\r")),
    _good("lines that end with CRLF", _TIDY.replace(b"\n", b"\r\n")),
    _good("one event over two lines", HI.replace(b',"delta"', b',\ndata: "delta"'), *GOOD[1:]),
    _good("a name that comes twice", _BEGIN + b'no","content":"Hi' + _END, *GOOD[1:]),
    _good("an escaped NUL", _BEGIN + b"a\\u0000b" + _END, *GOOD[1:], text="a\0b"),
    _good("a pair of surrogates", _BEGIN + b"\\ud83d\\ude00" + _END, *GOOD[1:], text="\U0001f600"),
    _good("no UTF-8 in a field that nobody knows", b'data: {"choices":[],"x":"\xff"}\n\n', *GOOD),
    _good("an empty data field", b"data:\n\n".replace(b"data:", b": "), *GOOD),
    _good("null", b"data: null\n\n", *GOOD),
    _good("ids, names and pauses", b"id: 1\nretry: 5\nevent: chunk\n" + HI, *GOOD[1:]),
    Row(
        name="byte by byte",
        answer=STREAM_HEAD + b"".join(b"1\r\n%c\r\n" % byte for byte in HI + end() + USAGE + DONE) + b"0\r\n\r\n",
        sees=None,
        text="Hi",
    ),
)

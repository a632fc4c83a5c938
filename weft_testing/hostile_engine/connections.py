"""Answers that are wrong as HTTP: heads, lengths, chunks, media types, encodings and statuses."""

import gzip

from weft.kernel.reasons import Reason
from weft_testing.hostile_engine.row import FAILED, GOOD, HI, PROTOCOL, REJECTED, Row, cut, stream
from weft_testing.hostile_engine.server import DONE, LAST_CHUNK, STREAM_HEAD, answer, chunked, end

_BODY = b"".join(GOOD)
_EVENTS = "text/event-stream"


def _row(name: str, data: bytes, sees: Reason | None = PROTOCOL) -> Row:
    return Row(name=name, answer=data, sees=sees, text="Hi")


def _head(*lines: str, body: bytes = b"", status: str = "HTTP/1.1 200 OK") -> bytes:
    return "".join(f"{line}\r\n" for line in (status, *lines)).encode("latin-1") + b"\r\n" + body


def _status(status: str, body: bytes, sees: Reason, extra: str = "") -> Row:
    return _row(f"status {status}, {body[:12]!r}", answer(body, status=status, extra=extra), sees)


def _packed(encoding: str, body: bytes) -> bytes:
    return answer(body, _EVENTS, extra=f"Content-Encoding: {encoding}\r\n")


ROWS = (
    _row("a reset at once", b""),
    _row("garbage", b"\x16\x03\x01\x02\x00 no HTTP at all\r\n\r\n"),
    _row("an SSH server", b"SSH-2.0-OpenSSH_9.6\r\n"),
    _row("HTTP/0.9", b"<html>Hi</html>"),
    _row("HTTP/2", _head(status="HTTP/2 200")),
    _row("a status that is no number", _head(status="HTTP/1.1 abc OK")),
    _row("no head but a body", _BODY),
    _row("half a head", b"HTTP/1.1 200 OK\r\nContent-Ty"),
    _row("a long header", _head("X-Long: " + "x" * 20_000, f"Content-Type: {_EVENTS}")),
    _row("many headers", _head(*("X-A: b" for _ in range(500)))),
    _row("a header without a colon", _head("Content-Type text/plain", "Content-Length: 0")),
    _row("NUL in a header", _head("X-A: b\x00c", "Content-Length: 0")),
    _row("two lengths", _head(f"Content-Type: {_EVENTS}", "Content-Length: 5", "Content-Length: 6", body=_BODY)),
    _row("a length below nothing", _head(f"Content-Type: {_EVENTS}", "Content-Length: -5", body=_BODY)),
    _row(
        "a length and chunks",
        _head(f"Content-Type: {_EVENTS}", "Content-Length: 9", "Transfer-Encoding: chunked", body=_BODY),
    ),
    _row("less than the length", _head(f"Content-Type: {_EVENTS}", "Content-Length: 5000", body=HI)),
    _row("more than the length", _head(f"Content-Type: {_EVENTS}", f"Content-Length: {len(HI)}", body=_BODY)),
    _row(
        "a length that cuts off the end",
        _head(f"Content-Type: {_EVENTS}", f"Content-Length: {len(_BODY) - len(DONE) - 120}", body=_BODY),
    ),
    _row("chunks that just end", cut(HI)),
    _row("a chunk that ends early", STREAM_HEAD + b"ff\r\n" + HI),
    _row("a chunk of no size", STREAM_HEAD + chunked(HI) + b"zz\r\n"),
    _row("a chunk of a size below nothing", STREAM_HEAD + chunked(HI) + b"-5\r\n"),
    _row("a chunk of a huge size", STREAM_HEAD + chunked(HI) + b"f" * 40 + b"\r\n"),
    _row("a chunk without its line feed", STREAM_HEAD + b"%x\r\n%s0\r\n\r\n" % (len(HI), HI)),
    _row("a page", answer(b"<html>Log in</html>", "text/html")),
    _row("plain text", answer(_BODY, "text/plain")),
    _row("no media type", _head(f"Content-Length: {len(_BODY)}", body=_BODY)),
    _row("a media type that is no text", _head("Content-Type: \xff\xfe/\xed\xa0\x80", "Content-Length: 0")),
    _row("a long media type", _head("Content-Type: " + "x" * 5_000, "Content-Length: 0")),
    _row("JSON in place of a stream", answer(b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}')),
    _row("an empty JSON object", answer(b"{}")),
    _row("JSON of nothing", answer(b"")),
    _row("a JSON list", answer(b"[]")),
    _row("JSON that is none", answer(b"<html>")),
    _row("deep JSON in place of a stream", answer(b'{"x":' + b"[" * 50_000)),
    _row("an error as JSON", answer(b'{"error":{"message":"no tea"}}'), FAILED),
    _row("an error text as JSON", answer(b'{"error":"no tea"}'), FAILED),
    _row(
        "an error about the request as JSON",
        answer(b'{"error":{"message":"bad","type":"invalid_request_error"}}'),
        REJECTED,
    ),
    _row("gzip", _packed("gzip", gzip.compress(_BODY))),
    _row("gzip that is none", _packed("gzip", b"\x1f\x8b no gzip")),
    _row("a gzip that grows", _packed("gzip", gzip.compress(b"\0" * (1 << 20)))),
    _row("brotli", _packed("br", b"\x0b\x02\x80")),
    _row("an unknown encoding", _packed("rot13", _BODY)),
    _row("two encodings", _packed("gzip, identity", gzip.compress(_BODY))),
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
    _row("status 999", answer(b"{}", status="999 Strange"), FAILED),
    _row(
        "a refusal that is packed",
        answer(gzip.compress(b"{}"), status="500 Broken", extra="Content-Encoding: gzip\r\n"),
        FAILED,
    ),
    _row("a refusal that just ends", _head("Content-Length: 500", body=b'{"error"', status="HTTP/1.1 500 Broken")),
    _row(
        "an upgrade",
        _head("Connection: upgrade", "Upgrade: websocket", status="HTTP/1.1 101 Switching Protocols"),
        FAILED,
    ),
    _row("a media type with a parameter", answer(_BODY, f"{_EVENTS}; charset=utf-8"), None),
    _row("the encoding 'identity'", _packed("identity", _BODY), None),
    _row("an interim answer", _head(status="HTTP/1.1 100 Continue") + stream(*GOOD), None),
    _row(
        "cookies that are none", answer(_BODY, _EVENTS, extra="Set-Cookie: \x01=;;;=\r\n".replace("\x01", "a b")), None
    ),
    _row("a trailer", stream(*GOOD, last=b"0\r\nX-End: yes\r\n\r\n"), None),
    _row(
        "a body until the end of the connection",
        _head(f"Content-Type: {_EVENTS}", "Connection: close", body=HI + end() + DONE),
        None,
    ),
    Row(
        name="a second answer behind the first", answer=stream(*GOOD) + stream(*GOOD), sees=None, text="Hi", ends=False
    ),
    Row(
        name="half a second answer behind the first",
        answer=stream(*GOOD) + b"HTTP/1.1 200 OK\r\nX-",
        sees=None,
        text="Hi",
        ends=False,
    ),
    Row(name="chunks after the last one", answer=stream(*GOOD) + LAST_CHUNK, sees=PROTOCOL),
)

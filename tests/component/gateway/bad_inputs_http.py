"""Invalid or oversized HTTP."""

from collections.abc import Mapping

from bad_inputs_stage import ENDPOINTS, Case, Endpoint, Send, everywhere, good_body, later, of_kind, request, takes_json
from gateway_script import head

_TOO_LARGE = frozenset({431})
_SLOW = frozenset({408})
_NOT_FOUND = frozenset({404})
_FOREIGN = frozenset({403})
_FINE = frozenset({200})
_UNSUPPORTED = frozenset({415})


def few(endpoint: Endpoint) -> bool:
    """One endpoint of each kind: for refusals before a path is known."""
    return endpoint in _FEW


_FEW = tuple(next(found for found in ENDPOINTS if found.kind == kind) for kind in ("chat", "messages", "read"))
_WITH_BODY = of_kind("chat", "messages", "settings")


def _heading(*lines: bytes, body: bytes = b"") -> Send:
    """A request with these lines after its first one."""

    def send(endpoint: Endpoint) -> bytes:
        first = f"{endpoint.method} {endpoint.address} HTTP/1.1\r\n".encode()
        return first + b"".join(line + b"\r\n" for line in (b"Connection: close", *lines)) + b"\r\n" + body

    return send


def _chunked(body: bytes) -> Send:
    return _heading(b"Host: localhost", b"Content-Type: application/json", b"Transfer-Encoding: chunked", body=body)


def _raw(data: bytes) -> Send:
    return lambda endpoint: data if endpoint.path else b""


def _headed(headers: Mapping[str, str]) -> Send:
    return lambda endpoint: request(endpoint, good_body(endpoint) if takes_json(endpoint) else b"", headers)


def _path(path: str) -> Send:
    return lambda endpoint: head(f"{endpoint.method} {path} HTTP/1.1", {"Host": "localhost", "Connection": "close"})


def _half_a_body(endpoint: Endpoint) -> bytes:
    return request(endpoint, good_body(endpoint))[:-5]


def _compressed(encoding: str) -> Send:
    return lambda endpoint: request(endpoint, good_body(endpoint), {"Content-Encoding": encoding})


def _declared(media_type: str) -> Send:
    """A request as a page could send it without a preflight: Ollama's API takes any type from other callers."""
    headers = {"Content-Type": media_type, "Sec-Fetch-Site": "same-origin"}
    return lambda endpoint: request(endpoint, good_body(endpoint), headers)


_HOST = b"Host: localhost"
_TWO = b"2\r\n{}\r\n0\r\n\r\n"


def _older(*lines: bytes, body: bytes) -> Send:
    return lambda endpoint: _heading(_HOST, *lines, body=body)(endpoint).replace(b"HTTP/1.1", b"HTTP/1.0", 1)


def _upgrading(protocol: bytes, *lines: bytes) -> Send:
    def send(endpoint: Endpoint) -> bytes:
        first = f"{endpoint.method} {endpoint.address} HTTP/1.1".encode()
        head = (first, _HOST, b"Connection: Upgrade, close", b"Upgrade: " + protocol, *lines, b"", b"{}")
        return b"\r\n".join(head)

    return send


_LARGE = b"x" * 100_000


def _endless(*lines: bytes) -> Send:
    """A head without its end."""
    return lambda endpoint: _heading(*lines)(endpoint)[:-2]


SMUGGLING = (
    Case("H1 two equal lengths", _heading(_HOST, b"Content-Length: 2", b"Content-Length: 2", body=b"{}"), applies=few),
    Case("H2 two lengths", _heading(_HOST, b"Content-Length: 2", b"Content-Length: 3", body=b"{}"), applies=few),
    Case("H3 length and chunked", _heading(_HOST, b"Content-Length: 2", b"Transfer-Encoding: chunked"), applies=few),
    Case("H3 chunked and length", _heading(_HOST, b"Transfer-Encoding: chunked", b"Content-Length: 2"), applies=few),
    Case("H3 chunked twice over", _heading(_HOST, b"Transfer-Encoding: chunked, gzip"), applies=few),
    Case("H3 negative length", _heading(_HOST, b"Content-Length: -1"), applies=few),
    Case("H3 length in words", _heading(_HOST, b"Content-Length: 0x10"), applies=few),
    Case("H3 endless length", _heading(_HOST, b"Content-Length: " + b"9" * 40), applies=few),
    Case("H4 bare line feed", _heading(_HOST + b"\nX-Other: a"), applies=few),
    Case("H5 folded header", _heading(_HOST, b"X-Folded: a\r\n b"), applies=few),
    Case("H7 NUL in a header", _heading(_HOST, b"X-Nul: a\x00b"), applies=few),
    Case("H8 bare carriage return", _heading(_HOST, b"X-Cr: a\rb"), applies=few),
    Case("H9 space before the colon", _heading(b"Host : localhost"), applies=few),
    Case("H10 no host", _heading(b"X-Other: a"), applies=everywhere),
    Case("H10 two hosts", _heading(_HOST, _HOST), applies=few),
    Case("H17 chunk of no length", _chunked(b"zz\r\n{}\r\n0\r\n\r\n"), applies=_WITH_BODY),
    Case("H17 chunk larger than a body", _chunked(b"fffffff\r\n{"), frozenset({413}), _WITH_BODY),
    Case("H17 chunk of 2^63", _chunked(b"7fffffffffffffff\r\n"), frozenset({413}), _WITH_BODY),
    Case("H17 chunk too large after a good one", _chunked(b"1\r\n{\r\nfffffff;a=b\r\n "), frozenset({413}), _WITH_BODY),
    Case("H17 chunk below zero", _chunked(b"-1\r\n{}"), applies=_WITH_BODY),
    Case("H17 chunk of 0x2", _chunked(b"0x2\r\n{}"), applies=_WITH_BODY),
    *(
        Case(f"H3 coding {coding.decode()}", _heading(_HOST, b"Transfer-Encoding: " + coding, body=_TWO), applies=few)
        for coding in (b"gzip, chunked", b"gzip", b"identity", b"xchunked", b"chunked;q=1", b'"chunked"', b"")
    ),
    Case("H3 chunked before HTTP/1.1", _older(b"Transfer-Encoding: chunked", body=_TWO), applies=few),
    *(
        Case(f"H3 length {length.decode()!r}", _heading(_HOST, b"Content-Length: " + length, body=b"{}"), applies=few)
        for length in (b"+2", b"2, 2", b"2 2", b"2.0", b"", b"two", b"18446744073709551616")
    ),
    *(
        Case(
            f"H3 expects {what.decode()!r}",
            _heading(_HOST, b"Content-Length: 2", b"Expect: " + what),
            frozenset({417}),
            few,
        )
        for what in (b"200-ok", b"100-continue, more", b"")
    ),
    Case("H22 websocket", _upgrading(b"websocket", b"Sec-WebSocket-Version: 13"), frozenset({426}), few),
    Case("H17 chunk of 2^64", _chunked(b"ffffffffffffffff1\r\n{}"), applies=_WITH_BODY),
)
TOO_MUCH = (
    Case("H11 header of 100 KB", _heading(_HOST, b"X-Large: " + _LARGE), _TOO_LARGE, everywhere),
    Case(
        "H12 header of 60 MB",
        later(lambda: _heading(_HOST, b"X-Large: " + b"x" * 60_000_000)),
        _TOO_LARGE,
        of_kind("chat"),
    ),
    Case("H13 20,000 headers", _heading(_HOST, *(b"X-%d: a" % n for n in range(20_000))), _TOO_LARGE, few),
    Case("H13 headers without an end", _endless(_HOST, *(b"X: a" for _ in range(200))), _TOO_LARGE, everywhere),
    Case("H13 headers of nothing, without an end", _endless(_HOST, *(b"X:" for _ in range(200))), _TOO_LARGE, few),
    Case("H13 a line without an end", _endless(_HOST, b"X: " + _LARGE), _TOO_LARGE, few),
    Case("H13 a name without an end", _endless(_HOST, _LARGE), _TOO_LARGE | {400}, few),
    Case("H13 empty lines before a request", _raw(b"\r\n" * 50_000), _TOO_LARGE, of_kind("chat")),
    Case("H18 trailers without an end", _chunked(b"1\r\n{\r\n0\r\n" + b"X: a\r\n" * 200), _TOO_LARGE, _WITH_BODY),
    Case("H18 101 trailers", _chunked(b"1\r\n{\r\n0\r\n" + b"X: a\r\n" * 101 + b"\r\n"), _TOO_LARGE, _WITH_BODY),
    Case("H18 a trailer without an end", _chunked(b"1\r\n{\r\n0\r\nX: " + b"a" * 300_000), _TOO_LARGE, _WITH_BODY),
    Case("H13 101 headers", _heading(_HOST, *(b"X-%d: a" % n for n in range(101))), _TOO_LARGE, everywhere),
    Case("H14 body of 200 MB declared", _headed({"Content-Length": "200000000"}), frozenset({413}), takes_json),
    Case(
        "H14 body of 11 MB",
        later(lambda: _chunked(b"a00000\r\n" + b" " * 0xA00000 + b"\r\n1\r\n \r\n")),
        frozenset({413}),
        _WITH_BODY,
    ),
    Case("H17 500,000 chunks", later(lambda: _chunked(b"1\r\n \r\n" * 500_000)), frozenset({413, 431}), _WITH_BODY),
    Case("H27 path of 200 KB", _path("/" + "a" * 200_000), _TOO_LARGE, few),
    Case(
        "H27 query of 20 KB",
        _path("/v1/models?a=" + "b" * 20_000 + "&c"),
        frozenset({200, 400, 405}),
        few,
        in_envelope=False,
    ),
)
SLOW = (
    Case("H15 half a head", _raw(b"GET /health HTTP/1.1\r\nHost: lo"), _SLOW, of_kind("chat")),
    Case("H15 nothing at all", _raw(b""), _SLOW, of_kind("chat")),
    Case("H16 half a body", _half_a_body, _SLOW, _WITH_BODY),
    Case("H16 body of one byte", _chunked(b"1\r\n{\r\n"), _SLOW, _WITH_BODY),
)
OTHER_TONGUES = (
    Case("H21 HTTP/0.9", _raw(b"GET /health\r\n\r\n"), applies=of_kind("chat")),
    Case("H21 HTTP/3.7", _raw(b"GET /health HTTP/3.7\r\n\r\n"), applies=of_kind("chat")),
    Case("H21 HTTP/2 preface", _raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), applies=of_kind("chat")),
    Case("H21 TLS", _raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500), applies=of_kind("chat")),
    Case("H21 no HTTP", _raw(b"\x00\xff" * 500 + b"\r\n\r\n"), applies=of_kind("chat")),
    Case("H21 unknown method", _raw(b"FROB / HTTP/1.1\r\nHost: localhost\r\n\r\n"), applies=of_kind("chat")),
    Case("H24 gzip", _compressed("gzip"), applies=takes_json),
    Case("H24 unknown encoding", _compressed("x-zip-bomb"), _UNSUPPORTED, takes_json),
    Case("H24 two encodings", _compressed("gzip, gzip"), _UNSUPPORTED, takes_json),
    Case("H25 no type", _declared(""), applies=takes_json),
    Case("H25 pickle", _declared("application/x-python-pickle"), applies=takes_json),
    Case("H25 text", _declared("text/plain"), applies=takes_json),
    Case("H25 form", _declared("multipart/form-data; boundary=a"), applies=takes_json),
)
PLACES = tuple(
    Case(f"H27 {path}", _path(path), _NOT_FOUND | frozenset({400, 405}), few)
    for path in (
        "//v1/models",
        "/v1/..%2fadmin",
        "/v1/%2e%2e/%2e%2e/etc/passwd",
        "/%00",
        "/v1/models%00",
        "/%252e%252e/",
        "/v1//models",
        "/v1/models/../../health",
        "/./health",
        "/health/",
        "/v1/models/%ff%fe",
        "/v1/models/a%0d%0aX-Injected:%20b",
        "/;/health",
    )
)
CALLERS = (
    *(
        Case(f"H28 host {host}", _headed({"Host": host}), _FOREIGN, everywhere)
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "[::1", "evil.example:80", "")
    ),
    *(
        Case(f"H28 host {host}", _headed({"Host": host}), _FOREIGN | {200, 400}, of_kind("chat"), in_envelope=False)
        for host in ("localhost:99999", "localhost:x", "LOCALHOST", "localhost.", "127.1")
    ),
    *(
        Case(f"H32 origin {origin}", _headed({"Origin": origin}), _FOREIGN, everywhere)
        for origin in ("https://evil.example", "null", "http://localhost.evil.example", "file://")
    ),
)
INFERENCE = of_kind(
    "chat",
    "completions",
    "embeddings",
    "messages",
    "responses",
    "rerank",
    "tokenize",
    "images",
    "speech",
    "task",
    "ollama",
)
HEADERS = (
    *(
        Case(f"H30 request id {value!r}", _headed({"X-Request-Id": value}), _FINE, of_kind("chat"), in_envelope=False)
        for value in ("\xff", "a b", "../x", "x" * 1000, "{}", "a\tb")
    ),
    *(
        Case(f"H31 priority {value}", _headed({"X-Priority": value}), applies=INFERENCE)
        for value in ("system", "HIGH", "", "\xff")
    ),
    *(
        Case(f"H30 {name} {value[:9]!r}", _headed({name: value}), applies=INFERENCE)
        for name, value in (
            ("X-Tenant-ID", "a b"),
            ("X-Tenant-ID", "\xff"),
            ("X-Tenant-ID", ""),
            ("X-Tenant-ID", "x" * 65),
            ("X-Client-Id", "a\xffb"),
            ("X-Session-Id", "x" * 5000),
            ("X-Cache-Mode", "maybe"),
            ("X-Cache-Tag", "x" * 65),
            ("X-Cache-Tag", "\xff"),
            ("X-Request-Timeout-Seconds", "nan"),
            ("X-Request-Timeout-Seconds", "1e9"),
            ("X-Request-Timeout-Seconds", "-1"),
        )
    ),
    Case("H30 traceparent", _headed({"traceparent": "00-\xff-zz-01"}), _FINE, of_kind("chat"), in_envelope=False),
    Case("H6 bytes above ASCII", _headed({"X-Anything": "\xff\xfe"}), _FINE, of_kind("chat"), in_envelope=False),
)
FRAMED_WELL = (Case("H22 h2c without a body", _upgrading(b"h2c"), _FINE | {404}, of_kind("list"), in_envelope=False),)
CASES = (*SMUGGLING, *TOO_MUCH, *SLOW, *OTHER_TONGUES, *PLACES, *CALLERS, *HEADERS, *FRAMED_WELL)

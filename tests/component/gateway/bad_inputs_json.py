"""Invalid, ambiguous or oversized JSON bodies."""

from codecs import BOM_UTF8

from bad_inputs_stage import Case, Send, good_body, later, of_kind, request, takes_json, with_body, with_member

_TOO_LARGE = frozenset({413})
_HANDED_ON = of_kind("chat", "completions", "embeddings", "messages")
_WITH_A_NAME = of_kind(
    "chat", "completions", "embeddings", "messages", "count", "responses", "rerank", "tokenize", "speech"
)

_REFUSES_HALVES = of_kind("operation", "facts", "settings", "declaration")
"""Inference requests, which repeat what others have cut, get U+FFFD instead."""


def _wants_a_body(endpoint: object) -> bool:
    return takes_json(endpoint) and endpoint.kind != "admin"  # type: ignore[arg-type, attr-defined]


_FEW = of_kind("chat", "messages", "settings")
"""For bodies that take long to build and are refused before their fields are checked."""


def _yaml(body: bytes) -> Send:
    return lambda endpoint: request(endpoint, body, {"Content-Type": "application/yaml"})


_LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%b]\n" % (letter, letter, b", ".join([b"*%c" % (letter - 1)] * 9)) for letter in range(98, 110)
)

CASES = (
    Case("J16 YAML that laughs", _yaml(b"kind: model\nname: tiny\n" + _LAUGHS), applies=of_kind("declaration")),
    Case("J16 YAML with a class", _yaml(b"!!python/object/apply:os.system [id]"), applies=of_kind("declaration")),
    Case("J16 YAML of a name twice", _yaml(b"kind: model\nname: a\nname: tiny"), applies=of_kind("declaration")),
    Case("J16 YAML 10,000 deep", _yaml(b"[" * 10_000), applies=of_kind("declaration")),
    Case("J16 YAML of itself", _yaml(b"&a [*a]"), applies=of_kind("declaration")),
    Case("J16 YAML with half a surrogate", _yaml(b'kind: model\nname: "\\ud800"'), applies=of_kind("declaration")),
    Case("J16 YAML that is no UTF-8", _yaml(b"kind: \xff"), applies=of_kind("declaration")),
    Case("J1 empty", with_body(b""), applies=_wants_a_body),
    Case("J1 space", with_body(b" \n "), applies=takes_json),
    *(Case(f"J2 {body!r}", with_body(body)) for body in (b"[]", b"null", b"1", b'"x"', b"true")),
    *(
        Case(f"J3 {body!r}", with_body(body))
        for body in (
            b"{",
            b'{"a"',
            b'{"a":',
            b'{"a":1,}',
            b"{'a':1}",
            b"{a:1}",
            b'{"a":01}',
            b'{"a":.5}',
            b'{"a":"\n"}',
            b'{"a":1 /**/}',
        )
    ),
    Case("J4 depth of 65", with_member(b'"deep":' + b"[" * 64 + b"]" * 64)),
    Case("J4 depth of 65 objects", with_member(b'"deep":' + b'{"a":' * 64 + b"1" + b"}" * 64)),
    Case("J4 depth of 100,000", with_member(b'"deep":' + b"[" * 100_000 + b"]" * 100_000)),
    Case("J4 depth of 100,000 without end", with_body(b'{"deep":' + b"[" * 100_000)),
    Case(
        "J5 1,000,000 names",
        later(lambda: with_body(b"{" + b",".join(b'"%05x":1' % n for n in range(1_000_000)) + b"}")),
        _TOO_LARGE,
        of_kind("chat"),
    ),
    Case("J5 200,001 names", with_member(b'"many":[' + b",".join([b'{"a":1}'] * 200_001) + b"]"), _TOO_LARGE, _FEW),
    Case("J6 a name twice", with_member(b'"model":"other","model":"tiny"')),
    Case("J6 a name twice by another spelling", with_member(b'"x":{"a":1,"\\u0061":2}')),
    *(
        Case(f"J7 {number.decode()}", with_member(b'"temperature":' + number))
        for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"nan", b"0x10")
    ),
    *(
        Case(f"J7 unread {number.decode()}", with_member(b'"unread":[' + number + b"]"))
        for number in (b"NaN", b"1e999")
    ),
    Case("J8 integer of 5,000 digits", with_member(b'"seed":' + b"9" * 5_000)),
    Case("J8 unread integer of 5,000 digits", with_member(b'"unread":' + b"9" * 5_000)),
    Case("J9 half a surrogate pair", with_member(b'"user":"\\ud800"'), applies=_REFUSES_HALVES),
    Case("J9 pair the wrong way round", with_member(b'"unread":"\\udc00\\ud800"'), applies=_REFUSES_HALVES),
    Case("J10 byte that is no UTF-8", with_member(b'"user":"\xff"')),
    Case("J10 overlong encoding", with_member(b'"unread":"\xc0\xaf"')),
    Case("J10 surrogate in UTF-8", with_member(b'"unread":"\xed\xa0\x80"')),
    Case(
        "J11 byte order mark",
        with_body(lambda endpoint: BOM_UTF8 + good_body(endpoint)),
        frozenset({200}),
        _HANDED_ON,
        in_envelope=False,
    ),
    Case("J11 byte order mark twice", with_body(lambda endpoint: BOM_UTF8 * 2 + good_body(endpoint))),
    Case("J11 UTF-16", with_body(lambda endpoint: good_body(endpoint).decode().encode("utf-16"))),
    Case("J11 UTF-32", with_body(lambda endpoint: good_body(endpoint).decode().encode("utf-32-le"))),
    Case("J12 trailing garbage", with_body(lambda endpoint: good_body(endpoint) + b" x")),
    Case("J12 two documents", with_body(lambda endpoint: good_body(endpoint) * 2)),
    Case("J12 trailing NUL", with_body(lambda endpoint: good_body(endpoint) + b"\x00")),
    Case(
        "J14 __proto__",
        with_member(b'"__proto__":{"admin":true},"constructor":1'),
        frozenset({200}),
        _HANDED_ON,
        in_envelope=False,
    ),
    Case(
        "J15 string of 10 MB",
        later(lambda: with_member(b'"user":"' + b"x" * 10_000_000 + b'"')),
        frozenset({400, 413}),
        _WITH_A_NAME,
    ),
    Case(
        "J15 10 MB of brackets in a string",
        later(lambda: with_member(b'"user":"' + b"[{" * 5_000_000 + b'"')),
        frozenset({400, 413}),
        _WITH_A_NAME,
    ),
    Case(
        "J15 5,000,000 numbers",
        later(lambda: with_member(b'"unread":[' + b"1," * 5_000_000 + b'1],"model":[]')),
        applies=of_kind("chat"),
    ),
)

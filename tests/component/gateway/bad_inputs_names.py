"""Names that look like paths, options or other names."""

from urllib.parse import quote

from bad_inputs_stage import Case, Endpoint, Send, of_kind, request, with_fields


def _is_of_a_model(endpoint: Endpoint) -> bool:
    return (endpoint.method, endpoint.path) == ("PUT", "/api/v1/models/{name}")


_MODELS = of_kind("chat", "completions", "embeddings", "messages", "count", "responses", "rerank", "tokenize", "ollama")
_NAMES = (
    "../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "..\\x",
    "a\x00b",
    "a\nb",
    "x" * 10_000,
    "t\u0456ny",
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
    "",
)
_STRANGE = frozenset({200, 400, 404})


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
    *(Case(f"N1 model {name[:20]!r}", with_fields({"model": name}), frozenset({400, 404}), _MODELS) for name in _NAMES),
    *(
        Case(f"N1 model {name!r}", with_fields({"model": name}), _STRANGE, _MODELS, in_envelope=False)
        for name in ("CON", "tiny.", "a:b")
    ),
    *(
        Case(f"N1 model {value!r}", with_fields({"model": value}), applies=_MODELS)
        for value in (None, 7, ["tiny"], {"a": 1})
    ),
    *(
        Case(f"N1 path {place} {name[:20]!r}", _in_path(name), frozenset({400, 404, 405}), _by_path)
        for place, name in enumerate(_NAMES)
        if name
    ),
    Case("N4 1,000,000 capabilities", with_fields({"capabilities": ["x"] * 1_000_000}), applies=_is_of_a_model),
    Case("N4 negative memory", with_fields({"memoryBytes": -1}), applies=of_kind("declaration")),
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

"""Durable tasks: their own fields, errors within their request, and who may run journaled requests."""

from typing import Any

from bad_inputs_stage import Case, Send, of_kind, request, with_fields

_TASK = of_kind("task")
_JOURNALED = of_kind("chat", "completions", "embeddings", "messages", "responses", "images", "speech")
_NEVER_JOURNALED = of_kind("count", "rerank", "tokenize")
_HI = [{"role": "user", "content": "hi"}]
_PATH = "/api/v1/inference-tasks"
_NO_BODIES: tuple[Any, ...] = (None, [], "{}", 7, {})
_NO_DURABLES: tuple[Any, ...] = ("", "later", True, 1, {}, ["wait"])


def _bringing(**fields: Any) -> Send:
    return with_fields({"body": {"model": "tiny", "messages": _HI, **fields}})


def _asking(query: str) -> Send:
    return lambda endpoint: request(endpoint, path=f"{endpoint.address}?{query}")


def _is(path: str, method: str = "GET") -> Any:
    return lambda endpoint: (endpoint.method, endpoint.path) == (method, _PATH + path)


CASES = (
    Case("T1 no body", with_fields({}, without=("body",)), applies=_TASK),
    *(Case(f"T1 body {value!r}", with_fields({"body": value}), applies=_TASK) for value in _NO_BODIES),
    *(
        Case(f"T1 endpoint {value!r}", with_fields({"endpoint": value}), applies=_TASK)
        for value in ("", "/v1/rerank", "../chat", 7, "x" * 10_000)
    ),
    *(
        Case(f"T1 pending limit {value!r}", with_fields({"pending_limit_seconds": value}), applies=_TASK)
        for value in (0, -1, 10**9, "1h", True)
    ),
    *(
        Case(f"T1 attempts {value!r}", with_fields({"max_attempts": value}), applies=_TASK)
        for value in (0, -1, 101, 1.5, "2", 2**70)
    ),
    *(Case(f"T1 model {value!r}", with_fields({"model": value}), applies=_TASK) for value in ("", "other", 7, "a b")),
    *(
        Case(f"T2 {name} {value!r}", _bringing(**{name: value}), applies=_TASK)
        for name, value in (
            ("model", "../x"),
            ("model", 7),
            ("messages", []),
            ("n", 99),
            ("temperature", "hot"),
            ("max_tokens", 2**70),
            ("keep_alive", "soon"),
            ("x_priority", "urgent"),
            ("durable", "later"),
            ("logit_bias", {str(index): 1 for index in range(301)}),
        )
    ),
    *(
        Case(
            f"T3 key {value[:8]!r}",
            lambda endpoint, value=value: request(  # type: ignore[misc]  # one for each value
                endpoint,
                b'{"body":{"model":"tiny","messages":[{"role":"user","content":"hi"}]}}',
                {"Idempotency-Key": value},
            ),
            applies=_TASK,
        )
        for value in ("", "k" * 256, "k\xff")
    ),
    *(
        Case(f"T4 list {query}", _asking(query), applies=_is(""))
        for query in (
            "state=gone",
            "state=pending,",
            "limit=0",
            "limit=1001",
            "limit=x",
            "page_token=x",
            "model=a&model=b",
            "a=b",
        )
    ),
    *(
        Case(f"T4 events {query}", _asking(query), applies=_is("/{id}/events"))
        for query in ("after=-1", "after=1e9", "after=9223372036854775808", "after=", "after=1&after=2", "before=1")
    ),
    *(Case(f"T4 forget {value}", _asking(f"forget={value}"), applies=_is("/{id}", "DELETE")) for value in ("", "yes")),
    *(Case(f"T5 durable {value!r}", with_fields({"durable": value}), applies=_JOURNALED) for value in _NO_DURABLES),
    *(
        Case(
            f"T5 on_disconnect {value!r}", with_fields({"durable": "wait", "on_disconnect": value}), applies=_JOURNALED
        )
        for value in ("", "stay", True, 1)
    ),
    Case("T5 on_disconnect alone", with_fields({"on_disconnect": "keep"}), applies=_JOURNALED),
    Case("T5 durable where it is not", with_fields({"durable": "wait"}), applies=_NEVER_JOURNALED),
)

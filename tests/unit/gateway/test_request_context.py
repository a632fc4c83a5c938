"""What a caller says about a request in headers or in the body, with the base class of all schemas of requests."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.gateway_config import GatewayConfig
from gateway.intake.headers import request_context, request_id_of
from gateway.intake.json_guard import parse
from gateway.intake.request_model import HandledRequest
from gateway.request_facts import FACTS_KEY, RequestFacts
from weft.dispatch.aliases import AskedName
from weft.dispatch.parameter_checks import handling_of, serve_options
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.access.principal import LOCAL, OTHER_USER, Principal
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import CacheMode, Handling, Operation, Priority


def context(
    headers: Mapping[str, str] | None = None,
    *,
    operation: Operation = Operation.CHAT,
    caller: Principal = LOCAL,
    **fields: object,
) -> RequestContext:
    named = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    params = parse(HandledRequest, json.dumps(fields).encode(), max_depth=8)
    scope = {"headers": named, FACTS_KEY: RequestFacts("req-1", 0.0, principal=caller)}
    asked = AskedName("tiny")
    return request_context(scope, GatewayConfig(), params, tenant="default", asked=asked, operation=operation)


def test_body_sets_caller_and_priority() -> None:
    found = context(x_priority="low", x_client_id="nightly", prompt_cache_key="thread-7")
    assert (found.priority, found.names_priority) == (Priority.LOW, True)
    assert (found.client_id, found.session) == ("nightly", "thread-7")


def test_headers_override_caller_and_priority_of_the_body() -> None:
    headers = {"X-Priority": "high", "X-Client-Id": "editor", "X-Session-Affinity": "s-2"}
    found = context(headers, x_priority="low", x_client_id="nightly", prompt_cache_key="thread-7")
    assert (found.priority, found.client_id, found.session) == (Priority.HIGH, "editor", "s-2")
    assert context({**headers, "X-Session-Id": "s-1"}).session == "s-1"


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"X-Claude-Code-Session-Id": "s"}, "s"),
        ({"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a7"}, "s/a7"),
        ({"X-Claude-Code-Agent-Id": "a7"}, ""),
        ({"session_id": "codex"}, "codex"),
        ({"Session-Id": "codex"}, "codex"),
        ({"Session-Id": "root", "Thread-Id": "root"}, "root"),
        ({"Session-Id": "root", "Thread-Id": "child", "X-Codex-Parent-Thread-Id": "root"}, "root/child"),
        ({"X-Session-Id": "opencode", "X-Parent-Session-Id": "parent"}, "opencode"),
    ],
)
def test_sub_agent_session_includes_its_parent_session(headers: dict[str, str], session: str) -> None:
    assert context(headers).session == session


def test_request_of_a_coding_agent_has_labels_and_others_have_none() -> None:
    sub = {"User-Agent": "opencode/1.18.33", "X-Parent-Session-Id": "s-0"}
    assert context(sub).labels == {"program": "opencode", "agent": "sub", "purpose": "turn"}
    assert context({"X-OpenAI-Subagent": "review"}).labels == {"agent": "sub", "purpose": "turn"}
    assert context({"User-Agent": "curl/8.9"}).labels == {}


def test_cache_headers_and_keep_alive_are_the_handling() -> None:
    headers = {"X-Cache-Mode": "none", "X-Cache-Tag": "session-abc123"}
    expected = Handling(cache_mode=CacheMode.NONE, cache_tag="session-abc123", keep_alive_seconds=300.0)
    assert context(headers, keep_alive="5m").handling == expected


def test_keep_alive_of_a_caller_that_may_not_unload_is_ignored() -> None:
    assert context(caller=OTHER_USER, keep_alive=0).handling == Handling(keep_alive_ignored=True)
    assert context(caller=OTHER_USER).handling == Handling()


@pytest.mark.parametrize(
    ("headers", "fields", "seconds"),
    [
        ({}, {"prefix_keep_alive": "10m"}, 600.0),
        ({}, {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1_800.0),
        ({}, {"prompt_cache_options": {"mode": "explicit"}}, 0.0),
        ({}, {"prompt_cache_options": {"ttl": "soon"}}, 0.0),
        ({}, {"prompt_cache_options": {"ttl": "7d"}}, 0.0),
        ({"X-Prefix-Keep-Alive": "60"}, {"prefix_keep_alive": "10m"}, 60.0),
    ],
)
def test_prefix_keep_alive_is_a_header_or_a_field(
    headers: dict[str, str], fields: dict[str, Any], seconds: float
) -> None:
    handling = context(headers, **fields).handling
    assert handling == Handling(prefix_seconds=seconds)
    assert handling_of(serve_options(handling, Priority.NORMAL)) == handling


def test_deadline_and_limit_of_the_wait_are_seconds() -> None:
    found = context({"X-Request-Timeout-Seconds": "20", "X-Max-Wait-Seconds": "2.5"})
    assert (found.timeout_seconds, found.max_wait_seconds) == (20, 2.5)
    with pytest.raises(FieldError, match="X-Max-Wait-Seconds: is only for chats and completions"):
        context({"X-Max-Wait-Seconds": "5"}, operation=Operation.EMBEDDING)


WRONG_TIMES: list[object] = ["soon", "", True, [], {}, "400d", 1e12, "5m5"]
WRONG_SECONDS = ["0", "-1", "nan", "1e9", "soon"]


@pytest.mark.parametrize(
    ("headers", "fields", "field"),
    [
        ({"X-Priority": "system"}, {}, "X-Priority"),
        ({"X-Priority": "urgent"}, {}, "X-Priority"),
        ({"X-Client-Id": "two words"}, {}, "X-Client-Id"),
        ({"X-Client-Id": "x" * 65}, {}, "X-Client-Id"),
        ({"X-Session-Id": "x" * 257}, {}, "X-Session-Id"),
        ({"X-Session-Affinity": "x" * 257}, {}, "X-Session-Affinity"),
        ({"X-Session-Id": "s", "X-Claude-Code-Agent-Id": "x" * 255}, {}, "X-Claude-Code-Agent-Id"),
        ({"X-Cache-Mode": "NONE"}, {}, "X-Cache-Mode"),
        ({"X-Cache-Mode": "never"}, {}, "X-Cache-Mode"),
        ({"X-Cache-Mode": ""}, {}, "X-Cache-Mode"),
        ({"X-Cache-Tag": "x" * 65}, {}, "X-Cache-Tag"),
        ({"X-Cache-Tag": "two words"}, {}, "X-Cache-Tag"),
        ({"X-Cache-Tag": ""}, {}, "X-Cache-Tag"),
        ({"X-Cache-Tag": "\xff"}, {}, "X-Cache-Tag"),
        ({"X-Prefix-Keep-Alive": "soon"}, {}, "X-Prefix-Keep-Alive"),
        *(({"X-Request-Timeout-Seconds": wrong}, {}, "X-Request-Timeout-Seconds") for wrong in WRONG_SECONDS),
        *(({"X-Max-Wait-Seconds": wrong}, {}, "X-Max-Wait-Seconds") for wrong in WRONG_SECONDS),
        *(
            ({"X-Labels": wrong}, {}, "X-Labels")
            for wrong in ("team", "=a", "two words=a", "team=", ",".join(f"k{n}=v" for n in range(17)))
        ),
        ({}, {"x_priority": "system"}, "x_priority"),
        ({}, {"x_priority": 1}, "x_priority"),
        ({}, {"x_client_id": "x" * 65}, "x_client_id"),
        ({}, {"x_client_id": "-x"}, "x_client_id"),
        ({}, {"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
        ({}, {"prefix_keep_alive": "25h"}, "prefix_keep_alive"),
        ({}, {"prefix_keep_alive": -1}, "prefix_keep_alive"),
        *(({}, {"keep_alive": wrong}, "keep_alive") for wrong in WRONG_TIMES),
    ],
    ids=str,
)
def test_wrong_header_or_field_is_refused_by_name(headers: dict[str, str], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        context(headers, **fields)
    assert refused.value.field == field


@pytest.mark.parametrize("given", ["a b", "\xff", "x" * 200, "", "-rf"])
def test_unsafe_request_id_is_replaced(given: str) -> None:
    assert request_id_of({b"x-request-id": given.encode("latin-1")}).startswith("req-")
    assert request_id_of({b"x-request-id": b"mine-1"}) == "mine-1"

"""Callers' priority class, client and session, in headers or in the body."""

import json
from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, Step, delta, finished, hello, serving, started

from weft.dispatch.request_trace import RequestContext
from weft.kernel.request import Priority

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
}
GENERATING = ("/v1/chat/completions", "/v1/completions")


def _body(path: str, **fields: object) -> bytes:
    return json.dumps({**BODIES[path], **fields}).encode()


async def _context(path: str, headers: dict[str, str], **fields: object) -> RequestContext:
    async with serving(ScriptedDispatcher(hello(), vectors=[[0.5]])) as gateway:
        response = await gateway.request("POST", path, _body(path, **fields), headers)
        assert response.status == 200, response
        (context,) = gateway.dispatcher.contexts
    return context


@pytest.mark.parametrize("path", BODIES)
async def test_body_sets_caller_and_priority(path: str) -> None:
    context = await _context(path, {}, x_priority="low", x_client_id="nightly", prompt_cache_key="thread-7")
    assert (context.priority, context.names_priority) == (Priority.LOW, True)
    assert (context.client_id, context.session) == ("nightly", "thread-7")


@pytest.mark.parametrize("path", BODIES)
async def test_headers_override_caller_and_priority_of_the_body(path: str) -> None:
    headers = {"X-Priority": "high", "X-Client-Id": "editor", "X-Session-Affinity": "s-2"}
    context = await _context(path, headers, x_priority="low", x_client_id="nightly", prompt_cache_key="thread-7")
    assert (context.priority, context.client_id, context.session) == (Priority.HIGH, "editor", "s-2")
    headers["X-Session-Id"] = "s-1"
    assert (await _context(path, headers)).session == "s-1"


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
async def test_sub_agent_session_includes_its_parent_session(headers: dict[str, str], session: str) -> None:
    assert (await _context("/v1/chat/completions", headers)).session == session


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"X-Priority": "system"}, {}, "X-Priority"),
        ({"X-Priority": "urgent"}, {}, "X-Priority"),
        ({}, {"x_priority": "system"}, "x_priority"),
        ({}, {"x_priority": 1}, "x_priority"),
        ({"X-Client-Id": "two words"}, {}, "X-Client-Id"),
        ({"X-Client-Id": "x" * 65}, {}, "X-Client-Id"),
        ({}, {"x_client_id": "x" * 65}, "x_client_id"),
        ({}, {"x_client_id": "-x"}, "x_client_id"),
        ({"X-Session-Id": "x" * 257}, {}, "X-Session-Id"),
        ({"X-Session-Affinity": "x" * 257}, {}, "X-Session-Affinity"),
        ({"X-Session-Id": "s", "X-Claude-Code-Agent-Id": "x" * 255}, {}, "X-Claude-Code-Agent-Id"),
        ({}, {"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
    ],
)
async def test_invalid_caller_fields_return_400_by_name(
    path: str, headers: dict[str, str], fields: dict[str, object], param: str
) -> None:
    async with serving() as gateway:
        response = await gateway.request("POST", path, _body(path, **fields), headers)
        assert gateway.dispatcher.contexts == []
    assert response.status == 400
    assert response.error["param"] == param


async def test_warning_survives_single_frame_answers_and_retries() -> None:
    path = GENERATING[0]
    one_frame: list[Step] = [[started(), delta("Hi"), delta(finish="STOP"), finished()]]
    retried: list[Step] = [[started("a")], [started("b")], [delta("Hi")], [delta(finish="STOP"), finished()]]
    for steps in (one_frame, retried):
        async with serving(ScriptedDispatcher(steps)) as gateway:
            answer = await gateway.request("POST", path, _body(path, x_task="draft"))
        assert [warning["field"] for warning in answer.json["warnings"]] == ["x_task"]

"""What a caller says about a request in headers or in the body: priority, client, session, cache and keep-alive."""

from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, Step, delta, finished, serving, started

from weft.dispatch.parameter_checks import handling_of, serve_options
from weft.dispatch.request_trace import RequestContext
from weft.kernel.request import CacheMode, Handling, Priority

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
}
CHAT = "/v1/chat/completions"


async def _context(path: str, headers: dict[str, str], **fields: object) -> RequestContext:
    async with serving(ScriptedDispatcher(vectors=[[0.5]])) as gateway:
        (await gateway.request("POST", path, {**BODIES[path], **fields}, headers)).of(200)
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
    assert (await _context(CHAT, headers)).session == session


@pytest.mark.parametrize("path", BODIES)
async def test_cache_headers_and_keep_alive_reach_the_dispatcher(path: str) -> None:
    headers = {"X-Cache-Mode": "none", "X-Cache-Tag": "session-abc123"}
    expected = Handling(cache_mode=CacheMode.NONE, cache_tag="session-abc123", keep_alive_seconds=300.0)
    assert (await _context(path, headers, keep_alive="5m")).handling == expected


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
@pytest.mark.parametrize("path", BODIES)
async def test_prefix_keep_alive_is_a_header_or_a_field(
    path: str, headers: dict[str, str], fields: dict[str, Any], seconds: float
) -> None:
    handling = (await _context(path, headers, **fields)).handling
    assert handling == Handling(prefix_seconds=seconds)
    assert handling_of(serve_options(handling, Priority.NORMAL)) == handling


INVALID_HEADERS = [
    ("X-Priority", "system"),
    ("X-Priority", "urgent"),
    ("X-Client-Id", "two words"),
    ("X-Client-Id", "x" * 65),
    ("X-Session-Id", "x" * 257),
    ("X-Session-Affinity", "x" * 257),
    ("X-Cache-Mode", "NONE"),
    ("X-Cache-Mode", "never"),
    ("X-Cache-Mode", ""),
    ("X-Cache-Tag", "x" * 65),
    ("X-Cache-Tag", "two words"),
    ("X-Cache-Tag", ""),
    ("X-Cache-Tag", "\xff"),
    ("X-Prefix-Keep-Alive", "soon"),
]
WRONG_TIMES: list[object] = ["soon", "", True, [], {}, "400d", 1e12, "5m5"]
INVALID_FIELDS: list[tuple[str, object]] = [
    ("x_priority", "system"),
    ("x_priority", 1),
    ("x_client_id", "x" * 65),
    ("x_client_id", "-x"),
    ("prompt_cache_key", "x" * 257),
    ("prefix_keep_alive", "25h"),
    ("prefix_keep_alive", -1),
    *(("keep_alive", wrong) for wrong in WRONG_TIMES),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        *(({name: value}, {}, name) for name, value in INVALID_HEADERS),
        *(({}, {name: value}, name) for name, value in INVALID_FIELDS),
        ({"X-Session-Id": "s", "X-Claude-Code-Agent-Id": "x" * 255}, {}, "X-Claude-Code-Agent-Id"),
    ],
    ids=str,
)
async def test_invalid_header_or_field_returns_400_by_name(
    path: str, headers: dict[str, str], fields: dict[str, object], param: str
) -> None:
    async with serving() as gateway:
        answer = await gateway.request("POST", path, {**BODIES[path], **fields}, headers)
        assert (answer.refusal[::2], gateway.dispatcher.contexts) == ((400, param), [])


async def test_warning_survives_single_frame_answers_and_retries() -> None:
    one_frame: list[Step] = [[started(), delta("Hi"), delta(finish="STOP"), finished()]]
    retried: list[Step] = [[started("a")], [started("b")], [delta("Hi")], [delta(finish="STOP"), finished()]]
    for steps in (one_frame, retried):
        async with serving(ScriptedDispatcher(steps)) as gateway:
            answer = await gateway.request("POST", CHAT, {**BODIES[CHAT], "x_task": "draft"})
        assert [warning["field"] for warning in answer.json["warnings"]] == ["x_task"]

"""Options of the prefix cache and of the keep-alive, and their effect on answers."""

import json
from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, hello, serving

from weft.dispatch.parameter_checks import handling_of, serve_options
from weft.kernel.request import CacheMode, Handling, Priority

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
}
GENERATING = ("/v1/chat/completions", "/v1/completions")


def _body(path: str, **fields: object) -> bytes:
    return json.dumps({**BODIES[path], **fields}).encode()


@pytest.mark.parametrize("path", BODIES)
async def test_cache_headers_and_field_reach_the_dispatcher(path: str) -> None:
    headers = {"X-Cache-Mode": "none", "X-Cache-Tag": "session-abc123"}
    async with serving(ScriptedDispatcher(hello())) as gateway:
        await gateway.request("POST", path, _body(path, keep_alive="5m"), headers)
        (context,) = gateway.dispatcher.contexts
    expected = Handling(cache_mode=CacheMode.NONE, cache_tag="session-abc123", keep_alive_seconds=300.0)
    assert context.handling == expected


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
    async with serving(ScriptedDispatcher(hello())) as gateway:
        await gateway.request("POST", path, _body(path, **fields), headers)
        handling = gateway.dispatcher.contexts[0].handling
    assert handling == Handling(prefix_seconds=seconds)
    assert handling_of(serve_options(handling, Priority.NORMAL)) == handling


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("prefix_keep_alive", "25h"),
        ("prefix_keep_alive", -1),
        ("X-Prefix-Keep-Alive", "soon"),
    ],
)
async def test_invalid_prefix_keep_alive_returns_400_by_name(field: str, given: Any) -> None:
    path, is_header = GENERATING[0], field.startswith("X-")
    body = _body(path) if is_header else _body(path, **{field: given})
    async with serving() as gateway:
        response = await gateway.request("POST", path, body, {field: given} if is_header else {})
    assert (response.status, response.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Cache-Mode", "NONE"),
        ("X-Cache-Mode", "never"),
        ("X-Cache-Mode", ""),
        ("X-Cache-Tag", "x" * 65),
        ("X-Cache-Tag", "two words"),
        ("X-Cache-Tag", ""),
        ("X-Cache-Tag", "\xff"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_invalid_cache_header_returns_400_by_name(path: str, header: str, value: str) -> None:
    async with serving() as gateway:
        response = await gateway.request("POST", path, _body(path), {header: value})
        assert gateway.dispatcher.contexts == []
    assert response.status == 400
    assert response.error["param"] == header


@pytest.mark.parametrize("given", ["soon", "", True, [], {}, "400d", 1e12, "5m5"])
@pytest.mark.parametrize("path", BODIES)
async def test_invalid_keep_alive_returns_400_by_name(path: str, given: object) -> None:
    async with serving() as gateway:
        response = await gateway.request("POST", path, _body(path, keep_alive=given))
        assert gateway.dispatcher.contexts == []
    assert response.status == 400
    assert response.error["param"] == "keep_alive"

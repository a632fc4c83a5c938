"""Every answer that is not 2xx, on every route: the client's error format, the request's id, and the retry headers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from admin_script import admin_ports
from asgi_call import answer_of
from file_script import MemoryBatches, MemoryFiles
from gateway_script import FixedFleet, RawResponse, ScriptedDispatcher, app_of, model, serving
from registry_script import ScriptedRegistry
from starlette.responses import Response
from structlog.testing import capture_logs
from task_script import ScriptedTasks

from gateway.app import bare_app, gateway_deps
from gateway.gateway_config import GatewayConfig
from gateway.openapi import OperationDoc
from gateway.ports import GatewayPorts
from gateway.routing import ApiRouter, EdgeApp, needs_of, routes_of
from weft.extension import own_extensions
from weft.kernel.access.principal import KeyRing
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

VERSION = (b"anthropic-version", b"2023-06-01")
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
FAILURES = [
    (RuntimeError("/etc/weft/secret"), 500, "internal"),
    (WeftError(Reason.RATE_LIMIT_EXCEEDED, "too often", retry_after_seconds=900), 429, "rate_limit_exceeded"),
    (WeftError(Reason.QUEUE_FULL, "full", retry_after_seconds=0.1), 503, "queue_full"),
    (WeftError(Reason.OUT_OF_MEMORY, "does not fit"), 503, "out_of_memory"),
    (WeftError(Reason.DEADLINE_EXCEEDED, "late"), 504, "deadline_exceeded"),
]


@dataclass(frozen=True)
class NoKeys:
    """A gate that admits no caller."""

    ring: KeyRing = field(default_factory=KeyRing)
    is_ready: bool = True


def make_app(config: GatewayConfig, *, keys: NoKeys | None = None, fleet: FixedFleet | None = None) -> EdgeApp:
    ports = GatewayPorts(
        dispatcher=ScriptedDispatcher(),
        fleet=fleet or FixedFleet.of(model("tiny")),
        registry=ScriptedRegistry(),
        admin=admin_ports(),
        tasks=ScriptedTasks(),
        files=MemoryFiles(),
        batches=MemoryBatches(),
        keys=keys,
        extensions=own_extensions(),
    )
    return app_of(config, ports)


@cache
def small_app() -> EdgeApp:
    app = make_app(GatewayConfig(max_body_bytes=10))
    for api in app._deferred:
        api.load()(app)
    return app


def routes(app: EdgeApp, *, with_open: bool = True) -> Iterator[tuple[str, str]]:
    """Every method and path, with something for each parameter; `with_open`: those that need no key, too."""
    for route in routes_of(app.served):
        if needs_of(route).is_open and not with_open:
            continue
        path = route.path.replace("{id:path}", "x/y")
        while "{" in path:
            start, _, rest = path.partition("{")
            path = start + "x" + rest.partition("}")[2]
        for method in sorted(route.methods or ()):
            yield method, path


def is_anthropic(path: str, headers: tuple[tuple[bytes, bytes], ...]) -> bool:
    """The contract, restated by the test."""
    parts = path.split("/")[:3]
    return parts == ["", "v1", "messages"] or (parts == ["", "v1", "models"] and VERSION in headers)


def is_ollama(path: str) -> bool:
    """As above."""
    parts = path.split("/")
    return parts[:2] == ["", "api"] and parts[2:3] != ["v1"]


def require_contract(
    answer: RawResponse, path: str, headers: tuple[tuple[bytes, bytes], ...], status: int, code: str
) -> dict[str, Any]:
    """The error in an answer, after all checks of the contract."""
    where = (path, headers, answer)
    assert answer.status == status, where
    assert answer.headers["content-type"] == f"application/json{'; charset=utf-8' if is_ollama(path) else ''}", where
    document = json.loads(answer.body)
    # Clients of Ollama's API read text; the machine's part is beside it.
    error: dict[str, Any] = {**document, "message": document["error"]} if is_ollama(path) else document["error"]
    request_id = answer.headers["x-request-id"]
    assert request_id, where
    assert document["request_id"] == request_id, where
    assert error["code"] == code, where
    assert "secret" not in error["message"], where
    if is_anthropic(path, headers):
        assert document["type"] == "error", where
        assert error["type"] == ANTHROPIC_TYPES[status], where
        assert answer.headers["request-id"] == request_id, where
    elif is_ollama(path):
        assert isinstance(document["error"], str), where
        assert not {"type", "message"} & set(document), where
        assert "request-id" not in answer.headers, where
    else:
        assert "type" not in document, where
        assert error["type"] == OPENAI_TYPES[status], where
        assert "param" in error, where
        assert "request-id" not in answer.headers, where
    require_honest_retries(answer)
    return error


def require_honest_retries(answer: RawResponse) -> None:
    if answer.status in {429, 503}:
        # Only a limit that has no room for longer says so, and that clients should not wait for it.
        if answer.headers["retry-after"] not in {str(seconds) for seconds in range(1, 61)}:
            assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("900", "false")
            assert b"rate_limit" in answer.body
        assert answer.headers["x-should-retry"] in {"true", "false"}
    else:
        assert "retry-after" not in answer.headers


def test_route_enumeration_covers_every_surface() -> None:
    paths = {path for _, path in routes(small_app())}
    assert {"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/health"} <= paths
    assert {"/api/v1/models", "/metrics", "/openapi.json", "/api/chat", "/api/tags", "/"} <= paths


@pytest.mark.parametrize("headers", [(), (VERSION,)], ids=["plain", "with anthropic-version"])
@pytest.mark.parametrize(("failure", "status", "code"), FAILURES, ids=[code for _, _, code in FAILURES])
async def test_every_route_error_uses_the_format_of_its_api(
    headers: tuple[tuple[bytes, bytes], ...], failure: Exception, status: int, code: str
) -> None:
    async def fail() -> Response:
        raise failure

    asked, failing = list(routes(small_app())), ApiRouter("failing")
    for route in routes_of(small_app().served):
        for method in (route.methods or set()) - {"HEAD"}:
            add = getattr(failing, f"add_{method.lower()}")
            add(route.path, None, fail, OperationDoc(), with_head=method == "GET")
    ports = GatewayPorts(dispatcher=ScriptedDispatcher(), fleet=FixedFleet.of(), registry=ScriptedRegistry())
    app = bare_app("failing", gateway_deps(GatewayConfig(), ports))
    app.serve(failing)
    # One traceback per route is too much output.
    with capture_logs():
        for method, path in asked:
            require_contract(await answer_of(app, method, path, headers=headers), path, headers, status, code)


CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(("failure", "status", "code"), FAILURES, ids=[code for _, _, code in FAILURES])
async def test_every_model_call_error_uses_the_format_of_its_api(
    path: str, failure: Exception, status: int, code: str
) -> None:
    script = ScriptedDispatcher([failure], vectors=failure)
    async with serving(script, fleet=FixedFleet.of(model("tiny"))) as mesh:
        for more in ({}, {"stream": True}) if path != "/v1/embeddings" else ({},):
            body = json.dumps({"model": "tiny", **CALLS[path], **more}).encode()
            answer = await mesh.request("POST", path, body)
            require_contract(answer, path, (), status, code)


@pytest.mark.parametrize("headers", [(), (VERSION,)], ids=["plain", "with anthropic-version"])
async def test_unsupported_method_returns_405_with_the_allowed_methods(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    app = small_app()
    for path in sorted({path for _, path in routes(app)}):
        answer = await answer_of(app, "TRACE", path, headers=headers)
        require_contract(answer, path, headers, 405, "method_not_allowed")
        assert {method for method, other in routes(app) if other == path} <= set(answer.headers["allow"].split(", "))


async def test_allow_header_lists_methods_of_all_routes_of_a_path() -> None:
    answers = [
        await answer_of(small_app(), "TRACE", path) for path in ("/v1/models", "/api/v1/agents/x", "/v1/messages")
    ]
    assert [answer.headers["allow"] for answer in answers] == ["GET, HEAD", "DELETE, GET, PUT", "POST"]


@pytest.mark.parametrize("headers", [(), (VERSION,)], ids=["plain", "with anthropic-version"])
async def test_unknown_path_returns_404(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    paths = [
        "//",
        "/api/",
        "/api/nope",
        "/v1/messages/",
        "/v1/messages/nope",
        "/v1/messagesx",
        "/v1/models/a//c",
        "/v1/nope",
        "/v1/models/",
    ]
    for path in paths:
        require_contract(await answer_of(small_app(), "GET", path, headers=headers), path, headers, 404, "not_found")


async def test_unknown_model_returns_404_in_the_format_of_the_api() -> None:
    for headers in ((), (VERSION,)):
        for path in ("/v1/models/nope", "/v1/models/agent/nope", "/v1/models/route/nope"):
            require_contract(
                await answer_of(small_app(), "GET", path, headers=headers), path, headers, 404, "model_not_found"
            )


@pytest.mark.parametrize("headers", [(), (VERSION,)], ids=["plain", "with anthropic-version"])
@pytest.mark.parametrize(
    ("body", "status", "code"), [(b"{" * 11, 413, "request_too_large"), (b"{", 400, "malformed_request")]
)
async def test_invalid_body_error_uses_the_format_of_the_surface(
    headers: tuple[tuple[bytes, bytes], ...], body: bytes, status: int, code: str
) -> None:
    app = small_app()
    posts = [path for method, path in routes(app) if method == "POST" and takes_json(path)]
    assert len(posts) >= 5
    for path in posts:
        require_contract(await answer_of(app, "POST", path, headers=headers, body=body), path, headers, status, code)


def takes_json(path: str) -> bool:
    """Whether a POST there reads a JSON body before any other check."""
    if path in {"/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull"}:
        return True
    return path.startswith("/v1/") and not any(
        part in path for part in ("/admin/", "/audio/", "/images/", "/files", "/cancel", "/compact", "/input_tokens")
    )


@pytest.mark.parametrize("headers", [(), (VERSION,)], ids=["plain", "with anthropic-version"])
async def test_missing_key_error_uses_the_format_of_the_surface(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    app = make_app(GatewayConfig(), keys=NoKeys())
    for method, path in routes(app, with_open=False):
        require_contract(await answer_of(app, method, path, headers=headers), path, headers, 401, "invalid_api_key")

"""Web pages of other origins: which may call, what their browsers are told, and what stays refused."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from file_script import MemoryFiles
from gateway_script import WORKBENCH, RawResponse, ScriptedDispatcher, delta, serving
from kit.keys import Keys, bearer
from messages_script import body as message
from pydantic import TypeAdapter, ValidationError

from gateway.endpoints import gateway_routers
from gateway.gateway_config import CorsConfig, GatewayConfig
from gateway.http.cors import EXPOSED_HEADERS, METHODS, REQUEST_HEADERS, host_name, is_allowed_origin, may_be_called
from gateway.routing import routes_of
from weft.extension import own_extensions
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

PAGE = "https://app.example.org"
CONFIG = GatewayConfig(port=0, cors=CorsConfig(allowed_origins=(PAGE, "https://*.example.net", "app://obsidian.md")))
CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
WANTED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def cors_headers(answer: RawResponse) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


def require_readable(answer: RawResponse, origin: str = PAGE) -> None:
    """The page may read this answer, with the headers that are told; and no cookie takes part."""
    found = cors_headers(answer)
    assert found["access-control-allow-origin"] == origin
    assert "access-control-allow-credentials" not in found
    assert set(found["access-control-expose-headers"].split(", ")) == set(EXPOSED_HEADERS)
    assert "Origin" in answer.headers["vary"].split(", ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/api/v1/models", "/nowhere"])
async def test_preflight_is_answered_without_a_key(path: str) -> None:
    async with serving(config=CONFIG, keys=Keys()) as gateway:
        answer = await gateway.request("OPTIONS", path, headers={"Origin": PAGE, **WANTED})
    assert answer.status == 200
    found = cors_headers(answer)
    assert found["access-control-allow-origin"] == PAGE
    assert set(found["access-control-allow-methods"].split(", ")) == set(METHODS)
    allowed = {name.lower() for name in found["access-control-allow-headers"].split(", ")}
    assert {"authorization", "content-type", "x-api-key", "x-tenant-id", "anthropic-version"} <= allowed
    assert found["access-control-max-age"] == "600"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "wanted",
    [
        {"Access-Control-Request-Method": "TRACE"},
        {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-unheard-of"},
    ],
)
async def test_preflight_for_unsupported_methods_or_headers_is_rejected_in_the_envelope(wanted: dict[str, str]) -> None:
    async with serving(config=CONFIG) as gateway:
        answer = await gateway.request("OPTIONS", "/v1/models", headers={"Origin": PAGE, **wanted})
    error = answer.error
    assert (answer.status, error["code"]) == (403, "permission_denied")
    assert "gateway.cors.allowed_headers" in error["message"]
    assert "access-control-allow-methods" not in answer.headers


async def test_additional_header_is_allowed_by_name() -> None:
    cors = CorsConfig(allowed_origins=(PAGE,), allowed_headers=("x-my-app",), max_age_seconds=5)
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "X-My-App"}
    async with serving(config=GatewayConfig(port=0, cors=cors)) as gateway:
        answer = await gateway.request("OPTIONS", "/v1/models", headers={"Origin": PAGE, **wanted})
    assert (answer.status, answer.headers["access-control-max-age"]) == (200, "5")


async def test_public_page_can_request_private_network_access() -> None:
    wanted = {**WANTED, "Access-Control-Request-Private-Network": "true"}
    async with serving(config=CONFIG) as gateway:
        answer = await gateway.request("OPTIONS", "/v1/models", headers={"Origin": PAGE, **wanted})
    assert answer.headers["access-control-allow-private-network"] == "true"


async def test_answer_and_receipt_headers_are_readable() -> None:
    async with serving(config=CONFIG) as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", CHAT, {"Origin": PAGE})
    assert answer.status == 200
    require_readable(answer)
    told = {name for name in answer.headers if name.startswith("x-")} - {"x-content-type-options"}
    assert told <= set(EXPOSED_HEADERS)
    assert {"x-request-id", "x-queue-wait-ms", "x-cache-hit"} <= told


@pytest.mark.parametrize(
    ("path", "raw"),
    [("/v1/chat/completions", STREAM), ("/v1/messages", message(stream=True))],
    ids=["chat", "messages"],
)
async def test_stream_is_readable_from_its_first_byte(path: str, raw: bytes) -> None:
    script = ScriptedDispatcher([[delta("Hel")], asyncio.Event()])
    async with serving(script, config=CONFIG) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post(path, raw).replace(b"\r\n\r\n", f"\r\nOrigin: {PAGE}\r\n\r\n".encode(), 1))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Hel" in await reader.readuntil(b"Hel")
    answer = RawResponse.parse(head)
    assert answer.headers["content-type"].startswith("text/event-stream")
    require_readable(answer)


@pytest.mark.parametrize(
    ("method", "path", "raw", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("GET", "/v1/models/nope", b"", 404),
        ("GET", "/nowhere", b"", 404),
        ("TRACE", "/v1/models", b"", 405),
    ],
)
async def test_error_is_readable_too(method: str, path: str, raw: bytes, status: int) -> None:
    async with serving(config=CONFIG) as gateway:
        answer = await gateway.request(method, path, raw, {"Origin": PAGE})
    assert answer.status == status
    assert answer.error
    require_readable(answer)


async def test_missing_key_and_full_queue_errors_are_readable() -> None:
    full = ScriptedDispatcher([WeftError(Reason.QUEUE_FULL, "full", retry_after_seconds=3)])
    async with serving(full, config=CONFIG, keys=Keys()) as gateway:
        keyless = await gateway.request("POST", "/v1/chat/completions", CHAT, {"Origin": PAGE})
        busy = await gateway.request("POST", "/v1/chat/completions", CHAT, {"Origin": PAGE, **bearer()})
    assert (keyless.status, busy.status, busy.headers["retry-after"]) == (401, 503, "3")
    require_readable(keyless)
    require_readable(busy)


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
async def test_request_of_another_page_is_rejected_without_cors_headers_and_not_run(method: str) -> None:
    async with serving(config=CONFIG) as gateway:
        headers = {"Origin": "https://evil.example", **WANTED}
        answer = await gateway.request(method, "/v1/chat/completions", CHAT, headers)
        assert gateway.dispatcher.calls == []
    assert (answer.status, cors_headers(answer)) == (403, {})


IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
OPENED = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
FETCHED = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
PAGE_FILE = f"/ui/{WORKBENCH.version}/diagram.html"


@pytest.mark.parametrize("path", ["/v1/models/tiny", "/api/v1/watch", "/ui/", "/health", "/metrics", "/", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        IMAGE,
        {**IMAGE, "Sec-Fetch-Site": "same-site"},
        {**IMAGE, "Sec-Fetch-Dest": "script"},
        {**IMAGE, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Site": "cross-site"},
        {**FETCHED, "Origin": "https://evil.example"},
    ],
)
async def test_foreign_page_cannot_embed_or_read(path: str, headers: dict[str, str]) -> None:
    async with serving(config=CONFIG) as gateway:
        answers = [await gateway.request(method, path, headers=headers) for method in ("GET", "HEAD")]
    assert [(each.status, cors_headers(each)) for each in answers] == [(403, {})] * 2
    assert answers[0].error["code"] == "permission_denied"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/ui/", OPENED, 200),
        ("/v1/models", {**OPENED, "Sec-Fetch-Site": "same-site"}, 200),
        (PAGE_FILE, IMAGE, 200),
        (PAGE_FILE, {**FETCHED, "Origin": "null"}, 200),
        ("/v1/results/file-1?tenant=default&expires=9&signature=x", IMAGE, 404),
        ("/v1/models", {**FETCHED, "Origin": PAGE}, 200),
        ("/v1/models", {"Sec-Fetch-Site": "same-origin"}, 200),
        ("/v1/models", {"Sec-Fetch-Site": "none"}, 200),
        ("/v1/models", FETCHED, 200),
    ],
    ids=[
        *("opened page", "opened document", "page file", "file of a sandboxed frame", "signed result"),
        *("allowed origin", "own page", "typed address", "application that checks no origins"),
    ],
)
async def test_page_may_be_opened_and_load_what_holds_no_data(path: str, headers: dict[str, str], status: int) -> None:
    async with serving(config=CONFIG, files=MemoryFiles(), result_key=bytes(32)) as gateway:
        assert (await gateway.request("GET", path, headers=headers)).status == status


@pytest.mark.parametrize(
    ("request_line", "policy"),
    [
        ("GET /v1/models", "same-origin"),
        ("GET /ui/", "same-origin"),
        ("GET /nowhere", "same-origin"),
        ("POST /v1/chat/completions", "same-origin"),
        ("BREW /v1/models", "same-origin"),
        (f"GET {PAGE_FILE}", "cross-origin"),
        ("GET /v1/results/file-1", "cross-origin"),
    ],
)
async def test_every_answer_tells_browsers_who_may_embed_it_and_as_what(request_line: str, policy: str) -> None:
    async with serving(config=CONFIG, files=MemoryFiles(), result_key=bytes(32)) as gateway:
        method, path = request_line.split()
        answer = await gateway.request(method, path, CHAT if method == "POST" else b"")
    assert answer.headers["cross-origin-resource-policy"] == policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "origin", "called", "is_own"),
    [
        ("0.0.0.0", "http://10.0.0.9:3000", "10.0.0.5:8080", False),
        ("0.0.0.0", "http://10.0.0.5:3000", "10.0.0.5:8080", True),
        ("0.0.0.0", "https://10.0.0.5:8080", "10.0.0.5:8080", True),
        ("::", "https://[2001:db8::9]", "[2001:db8::5]:8080", False),
        ("::", "https://[2001:db8::5]:8080", "[2001:db8::5]:8080", True),
        ("0.0.0.0", "https://10.0.0.9", "mesh.example", False),
        ("10.0.0.5", "http://10.0.0.5:3000", "10.0.0.5:8080", True),
        ("10.0.0.5", "http://10.0.0.9", "10.0.0.5:8080", False),
    ],
)
def test_pages_of_other_addresses_are_foreign_to_a_gateway_on_all_addresses(
    host: str, origin: str, called: str, is_own: bool
) -> None:
    config = GatewayConfig(host=host, allowed_hosts=frozenset({"mesh.example"}))
    assert is_allowed_origin(origin.encode(), called.encode(), config) is is_own
    assert may_be_called(host_name(f"//{called}"), config), "callers may use any address that leads here"


@pytest.mark.parametrize(
    "names",
    [
        "authorization,cache-control,content-type,http-referer,x-title",
        "api-key,baggage,content-type,pragma,sentry-trace,x-goog-api-key",
        "content-type,copilot-integration-id,editor-version,openai-intent,x-initiator,x-receipt-comment",
    ],
)
async def test_preflight_for_headers_sent_by_apps_is_answered(names: str) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
    async with serving() as gateway:
        answer = await gateway.request("OPTIONS", "/v1/models", headers={"Origin": "app://obsidian.md", **wanted})
    assert answer.status == 200


def test_pages_may_send_every_documented_header() -> None:
    table = (Path(__file__).parents[3] / "docs" / "api.md").read_text().split("## Headers in\n")[1].split("\n## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    named = {name.lower() for cell in cells for name in re.findall("`([^`]+)`", cell)}
    assert len(named) > 10
    assert named <= set(REQUEST_HEADERS)


async def test_caller_without_an_origin_gets_no_cors_headers() -> None:
    async with serving() as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", CHAT)
        options = await gateway.request("OPTIONS", "/v1/chat/completions", headers=WANTED)
    assert cors_headers(answer) == cors_headers(options) == {}
    assert options.status == 405


async def test_allowed_page_cannot_make_changes_without_auth() -> None:
    async with serving(config=CONFIG) as gateway:
        answer = await gateway.request("DELETE", "/api/v1/models/tiny", headers={"Origin": PAGE})
    assert answer.status == 403
    require_readable(answer)


def test_every_endpoint_method_is_in_the_cors_method_list() -> None:
    assert {method for route in routes_of(gateway_routers(own_extensions())) for method in route.methods or ()} == set(
        METHODS
    )


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "https://*", "http://*:8080", "app.example.org", "https://a/b", "https://a b", "https://*.*", "://a"],
)
def test_origin_list_rejects_a_global_wildcard(origin: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(CorsConfig).validate_python({"allowed_origins": [origin]})


def test_origins_are_normalized_as_browsers_send_them() -> None:
    config = TypeAdapter(CorsConfig).validate_python({"allowed_origins": ["HTTPS://App.Example.org/"]})
    assert config.allowed_origins == (PAGE,)

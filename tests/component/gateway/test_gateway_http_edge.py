import asyncio
import contextlib
import gzip
import sys
from collections.abc import Callable
from itertools import product

import pytest
from gateway_script import RawResponse, RunningGateway, ScriptedDispatcher, delta, finished, head, serving, usage

from gateway.gateway_config import ConnectionLimits, GatewayConfig

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = "/v1/chat/completions"
GOOD = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'


def require_envelope(response: RawResponse, status: int, code: str) -> str:
    """The message of an error, after checks of its format."""
    assert response.status == status, response
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "Traceback" not in error["message"]
    return str(error["message"])


async def require_still_serving(gateway: RunningGateway) -> None:
    assert (await gateway.request("POST", CHAT, GOOD)).status == 200


async def test_path_of_a_wrong_base_url_returns_404_and_suggests_the_right_one() -> None:
    async with serving() as gateway:
        for method, path, meant in (
            ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
            ("POST", "/v1/v1/messages", "/v1/messages"),
            ("POST", "//v1/chat/completions", "/v1/chat/completions"),
            ("POST", "/v1//chat//completions", "/v1/chat/completions"),
            ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
            ("POST", "/chat/completions", "/v1/chat/completions"),
            ("POST", "/api/v1/chat/completions", "/v1/chat/completions"),
            ("POST", "/openai/v1/chat/completions", "/v1/chat/completions"),
            ("POST", "/embeddings", "/v1/embeddings"),
            ("POST", "/api/embeddings/", "/api/embeddings"),
            ("POST", "/v1/api/chat", "/api/chat"),
            ("POST", "/api/api/chat", "/api/chat"),
            ("GET", "/v1/v1/models/", "/v1/models"),
            ("GET", "/models", "/v1/models"),
            ("GET", "/models/tiny", "/v1/models/{model}"),
            ("GET", "/v1/v1/models/tiny", "/v1/models/{model}"),
            ("GET", "/health/", "/health"),
            ("GET", "/v1/messages/", "/v1/messages"),
        ):
            response = await gateway.request(method, path, GOOD if method == "POST" else b"")
            assert response.status == 404
            assert f"did you mean {meant}?" in response.body.decode()


async def test_path_with_thousands_of_segments_returns_404_cheaply() -> None:
    async with serving() as gateway:
        message = require_envelope(await gateway.request("GET", "/a" * 10_000), 404, "not_found")
    assert "/openapi.json" in message


COMPRESSED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("X-GZip", gzip.compress),
    ("zstd", zstd.compress),
    ("identity, gzip", gzip.compress),
]


async def test_compressed_body_is_decoded() -> None:
    """It was refused with 400."""
    async with serving() as gateway:
        for coding, compress in COMPRESSED:
            response = await gateway.request("POST", CHAT, compress(GOOD), {"Content-Encoding": coding})
            assert response.status == 200, response
            assert len(gateway.dispatcher.payloads[-1].messages) == 1


async def test_size_limit_applies_to_the_decompressed_body() -> None:
    long = GOOD[:-1] + b',"user":"' + b"x" * 200_000 + b'"}'
    async with serving(config=GatewayConfig(port=0, max_body_bytes=100_000)) as gateway:
        for coding, compress in COMPRESSED:
            response = await gateway.request("POST", CHAT, compress(long), {"Content-Encoding": coding})
            await require_still_serving(gateway)
            require_envelope(response, 413, "request_too_large")


async def test_compressed_form_is_decoded() -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n' + b"a" * 3_000_000 + b"\r\n--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Content-Encoding": "gzip"}
    async with serving() as gateway:
        response = await gateway.request("POST", "/v1/images/edits", gzip.compress(body), headers)
    # The form was read, and lacks fields.
    assert "cannot be decoded" not in require_envelope(response, 400, "invalid_argument")


async def test_json_with_a_charset_or_suffix_is_accepted() -> None:
    async with serving() as gateway:
        for media_type in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
            response = await gateway.request("POST", CHAT, GOOD, {"Content-Type": media_type})
            assert response.status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/api/v1/resources:apply"])
async def test_body_may_begin_with_a_byte_order_mark(path: str) -> None:
    async with serving() as gateway:
        marked = await gateway.request("POST", path, b"\xef\xbb\xbf{}")
        plain = await gateway.request("POST", path, b"{}")
    assert (marked.status, marked.json | {"request_id": ""}) == (plain.status, plain.json | {"request_id": ""})
    assert marked.status != 200


async def test_upgrade_is_answered_without_advice_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    socket = {"Host": "localhost", "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    async with serving(ScriptedDispatcher()) as gateway:
        response = await gateway.exchange(head("GET /v1/models HTTP/1.1", socket))
        assert "Upgrade" in require_envelope(response, 426, "malformed_request")
        # Codex falls back to HTTP after this status only; a proxy may have removed the offer.
        without = {"Host": "localhost", "Connection": "close"}
        refused = await gateway.exchange(head("GET /v1/responses HTTP/1.1", without))
        assert "by POST" in require_envelope(refused, 426, "malformed_request")
        plain = {**socket, "Connection": "Upgrade, close", "Upgrade": "h2c"}
        assert (await gateway.exchange(head("GET /v1/models HTTP/1.1", plain))).status == 200
    assert [record.message for record in caplog.records if record.name.startswith("uvicorn")] == []


OFFERS = [
    {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA"},
    {"Connection": "keep-alive, upgrade", "Upgrade": "TLS/1.3, h2c"},
    {"Connection": "Upgrade", "Upgrade": "websocket"},
    {"Upgrade": "h2c", "Connection": "HTTP2-Settings, Upgrade"},
]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_upgrade_offer_with_a_body_is_ignored(is_chunked: bool) -> None:
    """Java's HttpClient and `curl --http2` offer HTTP/2 with each POST, which was refused."""
    framing = {"Transfer-Encoding": "chunked"} if is_chunked else {"Content-Length": str(len(GOOD))}
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD) if is_chunked else GOOD
    last = head("GET /health HTTP/1.1", {"Host": "localhost", "Connection": "close"})
    async with serving() as gateway:
        for offer, size in product(OFFERS, (1, 7, 4096)):
            headers = {"Host": "localhost", "Content-Type": "application/json", **offer, **framing}
            sent = (head(f"POST {CHAT} HTTP/1.1", headers) + body) * 2 + last
            async with gateway.connection() as (reader, writer):
                for start in range(0, len(sent), size):
                    writer.write(sent[start : start + size])
                answers = await reader.read()
            assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3, (offer, size)
            assert answers.count(b'"object":"chat.completion"') == 2


async def test_connect_method_is_rejected() -> None:
    async with serving() as gateway:
        for target in ("localhost:80", "/x"):
            refused = await gateway.exchange(head(f"CONNECT {target} HTTP/1.1", {"Host": "localhost"}))
            require_envelope(refused, 400, "malformed_request")
        await require_still_serving(gateway)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_http_1_0_client_gets_no_chunked_encoding(is_streamed: bool) -> None:
    """Its stream was sent in chunks, whose lengths it takes for content."""
    body = GOOD[:-1] + b',"stream":true}' if is_streamed else GOOD
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Expect": "100-continue"}
    script = ScriptedDispatcher([[delta("Hel")], [delta("lo", finish="STOP"), usage(), finished()]])
    async with serving(script) as gateway:
        answer = await gateway.exchange(head(f"POST {CHAT} HTTP/1.0", headers) + body)
        page = await gateway.exchange(head("GET /ui/ HTTP/1.0", {"Host": "localhost"}))
        missing = await gateway.exchange(head("GET /nowhere HTTP/1.0", {}))
        probe = await gateway.exchange(head("HEAD /health HTTP/1.0", {}))
    assert [each.status for each in (answer, page, missing, probe)] == [200, 200, 404, 200]
    assert all("transfer-encoding" not in each.headers for each in (answer, page, missing))
    assert answer.headers["connection"] == "close"
    assert int(missing.headers["content-length"]) == len(missing.body)
    if is_streamed:
        assert answer.body.startswith(b"data: {")
        assert answer.body.endswith(b"data: [DONE]\n\n")
    else:
        assert answer.json["object"] == "chat.completion"


async def test_endless_body_is_dropped_after_the_response() -> None:
    config = GatewayConfig(port=0, max_body_bytes=10, connections=ConnectionLimits(linger_seconds=0.05))
    async with serving(config=config) as gateway, gateway.connection() as (reader, writer):
        headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": "100000000"}
        writer.write(head(f"POST {CHAT} HTTP/1.1", headers) + b"x" * 1000)
        top = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in top
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 20)


async def test_caller_that_closes_reads_the_refusal_of_its_whole_upload() -> None:
    """Regression: the connection was reset while the body still arrived, and the refusal could be lost."""
    body = b"x" * 4_000_000
    headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
    async with serving(config=GatewayConfig(port=0, max_body_bytes=10)) as gateway:
        refused = await gateway.exchange(head(f"POST {CHAT} HTTP/1.1", {**headers, "Connection": "close"}) + body)
        older = await gateway.exchange(head(f"POST {CHAT} HTTP/1.0", headers) + body)
    for each in (refused, older):
        require_envelope(each, 413, "request_too_large")
        assert each.headers["connection"] == "close"


async def test_endless_body_of_a_caller_that_closes_is_dropped_for_a_limited_time() -> None:
    config = GatewayConfig(port=0, max_body_bytes=10, connections=ConnectionLimits(linger_seconds=0.05))
    async with serving(config=config) as gateway, gateway.connection() as (reader, writer):
        headers = {"Content-Type": "application/json", "Content-Length": "100000000", "Connection": "close"}
        writer.write(head(f"POST {CHAT} HTTP/1.1", {"Host": "localhost", **headers}) + b"x" * 1000)
        assert b" 413 " in await reader.read()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(_write_forever(writer), 20)


async def _write_forever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 100_000)
        await writer.drain()


@pytest.mark.parametrize("name", ["X-Tenant-ID", "Origin"])
async def test_duplicate_origin_headers_are_rejected(name: str) -> None:
    value = "http://localhost" if name == "Origin" else "a"
    twice = f"{name}: {value}\r\n{name.lower()}: {value}\r\n"
    async with serving() as gateway:
        response = await gateway.exchange(
            f"GET /health HTTP/1.1\r\nHost: localhost\r\n{twice}Connection: close\r\n\r\n".encode()
        )
    assert name.lower() in require_envelope(response, 400, "malformed_request")


async def test_connection_over_the_limit_gets_503_until_another_closes() -> None:
    config = GatewayConfig(port=0, connections=ConnectionLimits(max_connections=1))
    async with serving(config=config) as gateway:
        async with gateway.connection() as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"}")
            refused = await gateway.exchange(b"")
            require_envelope(refused, 503, "queue_full")
        await require_still_serving(gateway)

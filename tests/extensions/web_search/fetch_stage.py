"""A gateway whose models read pages: hosts of the web by name, all on one server of this machine."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_script import RunningGateway, delta, finished, serving, started, usage
from media_script import Answer, HostileHost, hostile_host, response

from gateway.gateway_config import GatewayConfig, WebSearchConfig
from weft.api.common.v1 import event_pb2
from weft.dispatch.call import RequestDispatcher

FETCH = {"type": "web_fetch_20250910", "name": "web_fetch"}
PAGE = "http://weft.example/mesh"
PLAIN = {"Content-Type": "text/plain; charset=utf-8"}
ASKED = [{"role": "user", "content": f"What does {PAGE} say?"}]


def read(*urls: object, beside: str = "") -> list[Any]:
    """A pass in which the model reads pages, and calls another function `beside` them."""
    calls = [
        event_pb2.ToolCallDelta(
            index=at, id=f"c{at}", name="web_fetch", arguments_text=json.dumps({"url": url}, separators=(",", ":"))
        )
        for at, url in enumerate(urls)
    ]
    if beside:
        calls.append(event_pb2.ToolCallDelta(index=len(calls), id="c9", name=beside, arguments_text="{}"))
    return [[started()], [delta(tool_calls=calls)], [delta(finish="TOOL_CALLS"), usage(7, 3), finished()]]


def text(body: str | bytes, kind: str = PLAIN["Content-Type"], **headers: str) -> bytes:
    """An answer with a page."""
    data = body if isinstance(body, bytes) else body.encode()
    return response(data, headers={"Content-Type": kind} | {name.replace("_", "-"): v for name, v in headers.items()})


def moved(to: str, status: str = "302 Found") -> bytes:
    """An answer that redirects."""
    return response(b"", status=status, headers={"Location": to})


def site(pages: Mapping[str, bytes]) -> Answer:
    """Answers by host and path, such as `weft.example/mesh`; 404 for others."""
    hosts: list[HostileHost] = []

    async def answer(_reader: Any, writer: Any) -> None:
        head = hosts[0].requests[-1].decode()
        path = head.split(" ", 2)[1]
        host = next(line[6:] for line in head.splitlines() if line.startswith("Host: "))
        writer.write(pages.get(f"{host}{path}", response(b"", status="404 Not Found")))
        await writer.drain()

    answer.hosts = hosts  # type: ignore[attr-defined]  # set once the server runs
    return answer


@asynccontextmanager
async def reading(
    monkeypatch: pytest.MonkeyPatch,
    model: RequestDispatcher,
    pages: Mapping[str, bytes] | Answer,
    *,
    section: Mapping[str, Any] | None = None,
    addresses: list[list[str]] | None = None,
    **ports: Any,
) -> AsyncIterator[tuple[RunningGateway, HostileHost]]:
    """A gateway that reads pages. `section`: more settings of `gateway.web_search`."""
    answer = site(pages) if isinstance(pages, Mapping) else pages
    async with hostile_host(answer, tls=False, addresses=addresses) as host:
        getattr(answer, "hosts", []).append(host)
        monkeypatch.setattr("weft_extensions.web_search.web_fetch.Network", lambda: host.network)
        config = GatewayConfig(port=0, web_search=WebSearchConfig(**{"fetch": True, **(section or {})}))
        async with serving(model, config=config, result_key=b"k" * 32, **ports) as gateway:
            yield gateway, host


def asked_for(host: HostileHost) -> list[str]:
    """The host and path of each request that reached the server."""
    found = []
    for request in host.requests:
        lines = request.decode().splitlines()
        found.append(next(line[6:] for line in lines if line.startswith("Host: ")) + lines[0].split()[1])
    return found

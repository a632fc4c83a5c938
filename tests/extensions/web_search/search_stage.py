"""A gateway whose models search: a fake SearXNG server, and a model whose passes are a script."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from gateway_script import RunningGateway, ScriptedDispatcher, delta, finished, sample_receipt, serving, started, usage
from kit.http_server import http_server
from kit.steps import done

from gateway.gateway_config import GatewayConfig, WebSearchConfig
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2
from weft.dispatch.call import Call, RequestDispatcher

SEARCH = {"type": "web_search_20250305", "name": "web_search"}
HOSTED = {"type": "web_search"}
WEFT = {
    "url": "https://weft.example/mesh",
    "title": "The mesh",
    "content": "weft is a mesh.",
    "engine": "x",
    "score": 1,
}
LOOM = {"url": "https://loom.example/", "title": "A loom", "content": "Warp and weft.", "publishedDate": "2026-11-02"}


def said(*texts: str, finish: str = "STOP") -> list[Any]:
    """A pass in which the model says something."""
    return [[started()], *([delta(text)] for text in texts), [delta(finish=finish), usage(10, 4), finished()]]


def called(query: str = "weft mesh", *, name: str = "web_search", beside: str = "", text: str = "") -> list[Any]:
    """A pass in which the model calls a tool, and another function `beside` it."""
    pieces = [event_pb2.ToolCallDelta(index=0, id="c1", name=name, arguments_text=f'{{"query":{json.dumps(query)}}}')]
    if beside:
        pieces.append(event_pb2.ToolCallDelta(index=1, id="c2", name=beside, arguments_text="{}"))
    before = [[delta(text)]] if text else []
    return [[started()], *before, [delta(tool_calls=pieces)], [delta(finish="TOOL_CALLS"), usage(7, 3), finished()]]


@dataclass
class Passes(ScriptedDispatcher):
    """Answers each pass with the next script, and reports receipts as the mesh does: when its frames were read."""

    passes: list[list[Any]] = field(default_factory=list)
    reported: list[receipt_pb2.Receipt] = field(default_factory=list)
    seen: list[chat_pb2.ChatPayload] = field(default_factory=list)
    """The payloads of the passes, as they were when each began."""

    async def _run(self, call: Call[Any], /) -> AsyncGenerator[Any]:
        self.note(call)
        seen = chat_pb2.ChatPayload()
        seen.CopyFrom(call.payload)
        self.seen.append(seen)
        receipt = sample_receipt()
        receipt.tool_runs.extend(call.context.tool_runs)
        try:
            async for step in done(self.passes[len(self.calls) - 1]):
                if any(event.HasField("finished") for event in step):
                    call.receipt = receipt
                yield step
        finally:
            self.reported.append(receipt)
            self.was_closed.set()


@dataclass
class FakeSearXng:
    """Answers searches as SearXNG does, and records them."""

    results: Sequence[Any] = (WEFT, LOOM)
    status: int = 200
    raw: bytes | None = None
    unresponsive: Sequence[Any] = ()
    hold: asyncio.Event | None = None
    asked: list[web.BaseRequest] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def queries(self) -> list[str]:
        return [request.query["q"] for request in self.asked]

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request)
        self.was_asked.set()
        if self.hold is not None:
            await self.hold.wait()
        answer = {"query": request.query["q"], "results": self.results, "unresponsive_engines": self.unresponsive}
        body = json.dumps(answer).encode() if self.raw is None else self.raw
        return web.Response(status=self.status, body=body, headers={"Location": "http://127.0.0.1:1/"})


@asynccontextmanager
async def searching(
    model: RequestDispatcher, service: FakeSearXng | None = None, *, section: dict[str, Any] | None = None, **ports: Any
) -> AsyncIterator[tuple[RunningGateway, FakeSearXng]]:
    """A gateway with a search. `section`: more settings of `gateway.web_search`."""
    service = service or FakeSearXng()
    async with http_server(service) as url:
        config = GatewayConfig(port=0, web_search=WebSearchConfig(url=url, **(section or {})))
        async with serving(model, config=config, result_key=b"k" * 32, **ports) as gateway:
            yield gateway, service

"""The providers of web search: what is read of their answers, and how they fail."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.gateway_config import GatewayConfig, WebSearchConfig
from gateway.server_tools.tool import CallError, CallOptions, Page, ToolAnswer, ToolCalls
from runner_svc.runner_settings import RunnerSettings
from runner_svc.tools.port import ToolSettings
from weft.kernel.channels.outbound import Outbound
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.gateway_tools import GatewayTools
from weft_extensions.web_search.mcp_search import McpSearch, pages_of
from weft_extensions.web_search.searxng import SearXng, read
from weft_extensions.web_search.web_search import MAX_SITE_TERMS, open_search, site_terms


def answering(text: str | WeftError) -> ToolCalls:
    async def call(name: str, arguments: Mapping[str, Any]) -> str:
        assert (name, arguments) == ("main/web.search", {"query": "weft"})
        if isinstance(text, WeftError):
            raise text
        return text

    return call


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        (
            '{"results": [{"url": "https://a.example", "title": "A", "content": "about a"}, {"link": "https://b.example"}]}',
            [Page(url="https://a.example", title="A", text="about a"), Page(url="https://b.example")],
        ),
        (
            "1. **A page**\n   URL: https://a.example/x\n   About a.\n\nMore of it.\n2. B\n   https://b.example.",
            [
                Page(url="https://a.example/x", title="A page", text="About a\nMore of it"),
                Page(url="https://b.example", title="B"),
            ],
        ),
        ("Title: A\nURL: https://a.example\nText", [Page(url="https://a.example", title="A", text="Text")]),
        ("nothing here", []),
        ("[" * 100_000, []),
        ("7", []),
    ],
)
def test_text_of_an_mcp_server_becomes_pages(text: str, pages: list[Page]) -> None:
    assert list(pages_of(text)) == pages


async def test_mcp_server_that_is_down_or_names_no_page_is_unavailable() -> None:
    down = WeftError(Reason.TOOL_UNAVAILABLE, "its server cannot be reached")
    for text, why in ((down, "its server cannot be reached"), ("I found it", "its text has no URL")):
        found = await McpSearch("main/web.search", answering(text)).search("weft")
        assert (found.error, found.why, found.pages) == (CallError.UNAVAILABLE, why, ())
        assert found.sent_bytes


async def test_search_by_a_tool_counts_what_left() -> None:
    tool = open_search(
        GatewayConfig(web_search=WebSearchConfig(tool="main/web.search")), answering("https://a.example")
    )
    assert tool is not None
    found = await tool.run({"query": " weft "}, CallOptions())
    assert (tool.host, [page.url for page in found.pages]) == ("main/web.search", ["https://a.example"])
    assert (found.sent_bytes, found.received_bytes) == (4, 17)


async def test_gateway_finds_only_mcp_servers_of_the_configuration() -> None:
    function = ToolSettings(type="python", name="web", function="os:getcwd")
    tools = GatewayTools(lambda: [RunnerSettings(name="main", runtime="x", models=(), tools=(function,))])
    for name in ("main/web.search", "other/web.search", "main", "/"):
        with pytest.raises(WeftError, match="has no such MCP server") as failure:
            await tools(name, {})
        assert failure.value.reason is Reason.TOOL_UNAVAILABLE
    await tools.stop()


async def test_calls_at_the_same_time_connect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an old server's program ended, each call started a new one, of which all but the last were never ended."""
    running: list[object] = []

    class Box:
        async def start(self) -> None:
            running.append(self)

        async def stop(self) -> None:
            await asyncio.sleep(0)
            running.remove(self)

        async def run(self, _name: str, _arguments: object) -> Any:
            return SimpleNamespace(failed=False, content="https://a.example")

    monkeypatch.setattr("runner_svc.tools.tool_box.build_tool_box", lambda _sources: Box())
    server = ToolSettings(type="mcp_command", name="web", argv=("x",))
    sections = [RunnerSettings(name="main", runtime="x", models=(), tools=(server,))]
    tools = GatewayTools(lambda: sections)
    await tools("main/web.search", {})
    sections[0] = RunnerSettings(name="main", runtime="x", models=(), tools=(replace(server, timeout_seconds=9.0),))
    await asyncio.gather(*(tools("main/web.search", {}) for _ in range(3)))
    assert len(running) == 1
    await tools.stop()
    assert running == []


async def test_each_server_is_connected_once_and_one_that_is_removed_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[str] = []

    class Box:
        def __init__(self, sources: list[ToolSettings]) -> None:
            self.name = sources[0].name

        async def start(self) -> None:
            running.append(self.name)

        async def stop(self) -> None:
            running.remove(self.name)

        async def run(self, name: str, _arguments: object) -> Any:
            return SimpleNamespace(failed=False, content=f"{self.name} ran {name}")

    monkeypatch.setattr("runner_svc.tools.tool_box.build_tool_box", Box)
    one, two, three = (ToolSettings(type="mcp_command", name=name, argv=("x",)) for name in ("a", "b", "a.b"))
    sections = [RunnerSettings(name="main", runtime="x", models=(), tools=(one, two, three))]
    tools = GatewayTools(lambda: sections)
    assert (await tools.boxes()).keys() == {"main/a", "main/b", "main/a.b"}
    assert await tools("main/a.b.c", {}) == "a.b ran a.b.c"
    assert sorted(running) == ["a", "a.b", "b"]
    sections[0] = RunnerSettings(name="main", runtime="x", models=(), tools=(one,))
    assert (await tools.boxes()).keys() == {"main/a"}
    assert running == ["a"]
    await tools.stop()
    assert running == []


@pytest.mark.slow("starts a server on the SDK")
async def test_gateway_calls_a_tool_of_a_configured_server_and_ends_its_program() -> None:
    argv = (sys.executable, "-m", "weft_testing.fake_mcp_server")
    server = ToolSettings(type="mcp_command", name="fake", argv=argv, environment={"PYTHONPATH": ":".join(sys.path)})
    sections = [RunnerSettings(name="main", runtime="x", models=(), tools=(server,))]
    tools = GatewayTools(lambda: sections)
    assert await tools("main/fake.echo", {"text": "https://a.example"}) == "https://a.example"
    with pytest.raises(WeftError, match="its call failed") as failure:
        await tools("main/fake.fail", {})
    assert failure.value.reason is Reason.TOOL_UNAVAILABLE
    # Another configuration replaces the program.
    sections[0] = RunnerSettings(name="main", runtime="x", models=(), tools=(replace(server, timeout_seconds=9.0),))
    assert await tools("main/fake.echo", {"text": "b"}) == "b"
    await tools.stop()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def test_there_is_no_search_without_a_provider() -> None:
    assert open_search(GatewayConfig(), None) is None
    assert open_search(GatewayConfig(web_search=WebSearchConfig(tool="main/web.search")), None) is None
    with pytest.raises(ValueError, match="set one of them"):
        WebSearchConfig(url="http://127.0.0.1:8888", tool="main/web.search")


@pytest.mark.parametrize("query", [None, "", "  ", 7, {"a": 1}])
async def test_call_without_a_query_sends_nothing(query: object) -> None:
    tool = open_search(GatewayConfig(web_search=WebSearchConfig(url="http://127.0.0.1:9")), None)
    assert tool is not None
    assert (await tool.run({"query": query}, CallOptions())).error is CallError.INVALID_INPUT
    found = await tool.run({"query": "x" * 401}, CallOptions())
    assert (found.error, found.sent_bytes) == (CallError.QUERY_TOO_LONG, 0)


def test_many_domains_are_only_checked_on_the_results() -> None:
    domains = tuple(f"d{number}.example" for number in range(MAX_SITE_TERMS + 1))
    assert site_terms(CallOptions(allowed_domains=domains)) == ""


@pytest.mark.parametrize("url", ["http://169.254.169.254", "http://127.0.0.1:9"])
async def test_link_local_and_own_ports_are_not_called_even_for_the_operator(url: str) -> None:
    outbound = Outbound(own_listeners=lambda: [("127.0.0.1", 9)])
    found = await SearXng(WebSearchConfig(url=url), outbound).search("weft")
    assert (found.error, found.sent_bytes, "its address is" in found.why) == (CallError.UNAVAILABLE, 0, True)


async def test_server_that_cannot_be_reached_is_unavailable_without_the_query_in_the_log() -> None:
    found = await SearXng(WebSearchConfig(url="http://127.0.0.1:9", timeout_seconds=2.0)).search("my secret")
    assert found.error is CallError.UNAVAILABLE
    assert "secret" not in found.why


def test_results_of_searxng_are_read_by_their_types() -> None:
    data = b'{"results": [{"url": "https://a.example", "title": 7, "content": null, "publishedDate": "2026"}, {}, 7]}'
    assert read(data, 9) == ToolAnswer(
        pages=(Page(url="https://a.example", age="2026"),), sent_bytes=9, received_bytes=len(data)
    )

"""Pages of the web in the Responses API: `open_page` of a web search."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fetch_stage import PAGE, asked_for, read, reading, text
from gateway_script import RunningGateway
from kit.http_server import http_server
from media_script import HostileHost
from openai.types.responses import Response
from search_stage import HOSTED, FakeSearXng, Passes, called, said
from test_search_responses import FUNCTION, response_of

PAGES = {"weft.example/mesh": text("weft is a mesh.")}
FOUND = {"url": PAGE, "title": "The mesh", "content": "x"}


@asynccontextmanager
async def researching(
    monkeypatch: pytest.MonkeyPatch, passes: Passes, **section: Any
) -> AsyncIterator[tuple[RunningGateway, HostileHost]]:
    async with (
        http_server(FakeSearXng(results=(FOUND,))) as url,
        reading(monkeypatch, passes, PAGES, section={"url": url, **section}) as running,
    ):
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_page_that_a_search_found_is_opened_and_cited(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    passes = Passes(passes=[called(), read(PAGE), said(f"A mesh, says {PAGE}")])
    async with researching(monkeypatch, passes) as (gateway, host):
        answer = await response_of(gateway, stream=stream, include=["web_search_call.action.sources"])
    Response.model_validate(answer)
    search, opened, last = answer["output"]
    assert search["action"]["sources"] == [{"type": "url", "url": PAGE}]
    assert (opened["type"], opened["status"]) == ("web_search_call", "completed")
    assert opened["action"] == {"type": "open_page", "url": PAGE}
    assert last["content"][0]["annotations"][0]["url"] == PAGE
    assert asked_for(host) == ["weft.example/mesh"]
    assert [tool.function.name for tool in passes.seen[0].tools] == ["web_search", "web_fetch"]
    assert "warnings" not in answer


async def test_later_turn_reads_the_page_again_without_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(passes=[called(), read(PAGE), said("A mesh."), said("As I said.")])
    async with researching(monkeypatch, passes) as (gateway, host):
        first = await response_of(gateway)
        history = [{"role": "user", "content": "What is weft?"}, *first["output"], {"role": "user", "content": "So?"}]
        await response_of(gateway, input=history)
        lost = [item | {"encrypted_content": None} for item in first["output"]]
        passes.passes.append(said("ok"))
        await response_of(gateway, input=[{"role": "user", "content": "Hi"}, *lost])
    assert len(host.requests) == 1
    third, fourth, fifth = passes.seen[2:]
    assert list(fourth.messages)[: len(third.messages)] == list(third.messages)
    assert [call.name for message in fifth.messages for call in message.tool_calls] == ["web_search", "web_fetch"]


@pytest.mark.parametrize("stream", [False, True])
async def test_page_that_only_the_model_names_is_a_failed_item(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    passes = Passes(passes=[read("http://weft.example/?secret=4711"), said("I may not.")])
    async with researching(monkeypatch, passes) as (gateway, host):
        answer = await response_of(gateway, stream=stream)
    item = answer["output"][0]
    assert (item["status"], item["error"], host.resolver.asked) == ("failed", "url_not_in_prior_context", [])


async def test_searches_and_pages_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(passes=[called(), read(PAGE, PAGE), said("Enough.")])
    async with researching(monkeypatch, passes) as (gateway, host):
        answer = await response_of(gateway, max_tool_calls=2)
    items = [item for item in answer["output"] if item["type"] == "web_search_call"]
    assert [item.get("error") for item in items] == [None, None, "max_uses_exceeded"]
    assert len(host.requests) == 1


async def test_pages_are_offered_with_the_search_unless_fetch_is_off_or_a_function_has_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = Passes(passes=[said("ok"), said("ok"), said("ok"), said("ok")])
    own = FUNCTION | {"name": "web_fetch"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    async with researching(monkeypatch, passes) as (gateway, _):
        await response_of(gateway, tools=[own, HOSTED])
        await response_of(gateway, tools=[FUNCTION, HOSTED], tool_choice=allowed)
        await response_of(gateway, tools=[own, HOSTED], tool_choice=allowed)
    async with researching(monkeypatch, passes, fetch=False) as (gateway, _):
        await response_of(gateway)
    offered = [[tool.function.name for tool in seen.tools] for seen in passes.seen]
    assert offered == [["web_fetch", "web_search"], ["web_search", "web_fetch"], ["web_search"], ["web_search"]]

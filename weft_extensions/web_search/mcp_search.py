"""Searches by a tool of an MCP server, whose results are text."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.server_tools.tool import CallError, Page, ToolAnswer, ToolCalls
from weft.kernel.errors.error_tree import WeftError

_URL = re.compile(r"https?://[^\s<>\"'`\])]+")
_LABEL = re.compile(r"^(?:[\s#*>\[\]()-]|\d+[.)]|title:|url:|link:|\*\*)+", re.IGNORECASE)
_TEXTS = ("content", "text", "snippet", "description", "summary", "body")
_URLS = ("url", "link", "href")


class McpSearch:
    """A search tool of an MCP server. It gets one argument, `query`."""

    def __init__(self, tool: str, calls: ToolCalls) -> None:
        """`tool`: as `RUNNER/SERVER.TOOL`."""
        self._tool = tool
        self._calls = calls
        self.host = tool

    async def search(self, query: str) -> ToolAnswer:
        """See `Provider.search`."""
        sent = len(query.encode())
        try:
            text = await self._calls(self._tool, {"query": query})
        except WeftError as error:
            return ToolAnswer(error=CallError.UNAVAILABLE, why=error.message, sent_bytes=sent)
        pages, received = tuple(pages_of(text)), len(text.encode())
        if not pages and text.strip():
            why = "its text has no URL"
            return ToolAnswer(error=CallError.UNAVAILABLE, why=why, sent_bytes=sent, received_bytes=received)
        return ToolAnswer(pages=pages, sent_bytes=sent, received_bytes=received)


def pages_of(text: str) -> Iterator[Page]:
    """Yields the pages in a tool's text: entries with a URL of its JSON, otherwise its paragraphs with one."""
    try:
        entries = list(_entries(json.loads(text)))
    except (ValueError, RecursionError):
        entries = []
    yield from entries or _paragraphs(text)


def _entries(value: Any) -> Iterator[Page]:
    if isinstance(value, list):
        for each in value:
            yield from _entries(each)
    elif isinstance(value, Mapping):
        url = next((value[name] for name in _URLS if isinstance(value.get(name), str)), "")
        if _URL.match(url):
            body = next((value[name] for name in _TEXTS if isinstance(value.get(name), str)), "")
            yield Page(url=url, title=str(value.get("title") or ""), text=body)
        else:
            for each in value.values():
                yield from _entries(each)


def _paragraphs(text: str) -> Iterator[Page]:
    """Yields a page for each paragraph with a URL; paragraphs without one belong to the page before."""
    url, lines = "", list[str]()
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*\d+[.)]\s)", text):
        found = _URL.search(paragraph)
        if found is not None:
            if url:
                yield _page(url, lines)
            url, lines = found[0].rstrip(".,;:"), []
        lines += paragraph.splitlines()
    if url:
        yield _page(url, lines)


def _page(url: str, lines: list[str]) -> Page:
    plain = [_LABEL.sub("", line.replace(url, "")).strip(" \t*.,;:") for line in lines]
    said = [line for line in plain if line]
    return Page(url=url, title=said[0] if said else "", text="\n".join(said[1:]))

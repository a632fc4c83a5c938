"""Many tabs of one browser: they share one stream of the mesh's state, and hidden ones keep no connection."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from chat_steps import asked, behave
from mesh_process import MeshProcess
from pages import expect, finished, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext, Page, Request

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

LISTENERS = """async () => {
  const folder = document.querySelector("link[rel=icon]").href.replace("icon.svg", "");
  const {whilePresent} = await import(folder + "app/presence.js");
  const {signal} = new AbortController();
  let left = 0;
  signal.addEventListener = () => (left += 1);
  signal.removeEventListener = () => (left -= 1);
  for (let tries = 0; tries < 10; tries += 1) await whilePresent(async () => {}, signal);
  return left;
}"""
TABS = 12
WATCH, EVENTS = "/api/v1/watch", "/events"
HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", {configurable: true, get: () => isHidden});
  document.dispatchEvent(new Event("visibilitychange", {bubbles: true}));
}"""
"""Tabs of a headless browser are never hidden."""


@pytest.fixture
def context(browser: "Browser") -> "Iterator[BrowserContext]":
    context = browser.new_context()
    context.set_default_timeout(15_000)
    yield context
    context.close()


class Streams:
    """The open streams of a browser's tabs, by the end of their path."""

    def __init__(self, context: "BrowserContext") -> None:
        self._open: set[Request] = set()
        context.on("request", self._begun)
        context.on("requestfinished", self._ended)
        context.on("requestfailed", self._ended)

    def _begun(self, request: "Request") -> None:
        self._open.add(request)

    def _ended(self, request: "Request") -> None:
        self._open.discard(request)

    def count(self, end: str) -> int:
        left = [request for request in self._open if not request.frame.page.is_closed()]
        return sum(urlsplit(request.url).path.endswith(end) for request in left)


def until_live(page: "Page") -> None:
    page.get_by_role("banner").get_by_text("live", exact=True).wait_for()


def shown_model(page: "Page") -> None:
    """Waits for what only the stream brings."""
    page.get_by_role("main").get_by_role("link", name="m-a", exact=True).first.wait_for()


def seen_everywhere(asking: "Page", tabs: "list[Page]") -> None:
    """Asks for an answer, and waits until each tab lists its request."""
    request_id = asking.evaluate(
        """async () => {
          const body = JSON.stringify({model: "pool", max_tokens: 1, messages: [{role: "user", content: "Hi"}]});
          const headers = {"Content-Type": "application/json"};
          const answer = await fetch("/v1/chat/completions", {method: "POST", headers, body});
          await answer.text();
          return answer.headers.get("x-request-id");
        }"""
    )
    for tab in tabs:
        tab.get_by_role("main").get_by_role("link", name=request_id[:12]).first.wait_for()


def test_twelve_tabs_show_live_data_from_one_stream(context: "BrowserContext", mesh: MeshProcess) -> None:
    """The seventh tab never loaded: a browser opens six connections to a host."""
    streams = Streams(context)
    tabs = [context.new_page() for _ in range(TABS)]
    for at, tab in enumerate(tabs):
        opened(tab, mesh, "requests" if at % 2 else "models")
        until_live(tab)
        if not at % 2:
            shown_model(tab)
    assert streams.count(WATCH) == 1
    seen_everywhere(tabs[0], tabs[1::2])


def test_tabs_stay_live_when_the_one_that_reads_the_stream_is_closed(
    context: "BrowserContext", mesh: MeshProcess
) -> None:
    streams = Streams(context)
    tabs = [context.new_page() for _ in range(4)]
    for tab in tabs:
        opened(tab, mesh, "requests", "Requests")
        until_live(tab)
    tabs.pop(0).close()
    seen_everywhere(tabs[0], tabs)
    tabs.pop(0).close()
    seen_everywhere(tabs[0], tabs)
    assert streams.count(WATCH) == 1


def test_tab_that_hangs_is_replaced_as_the_reader_of_the_stream(context: "BrowserContext", mesh: MeshProcess) -> None:
    first, second = context.new_page(), context.new_page()
    for tab in (first, second):
        opened(tab, mesh, "requests", "Requests")
        until_live(tab)
    first.evaluate("() => void setTimeout(() => { const end = Date.now() + 25_000; while (Date.now() < end); }, 0)")
    other = context.new_page()
    opened(other, mesh, "models", "Models")
    seen_everywhere(other, [second])


def test_ten_addresses_in_one_tab_load_one_after_the_other(context: "BrowserContext", mesh: MeshProcess) -> None:
    """A page that was left kept its stream, as the browser may come back to it: the seventh waited for a minute."""
    streams = Streams(context)
    page = context.new_page()
    for at in range(10):
        opened(page, mesh, ("models", "requests", "tasks", "runners", "usage")[at % 5] + f"?at={at}")
        until_live(page)
    assert streams.count(WATCH) == 1
    page.go_back()
    until_live(page)


def test_hidden_tab_ends_its_stream_and_is_live_again_when_it_is_shown(
    context: "BrowserContext", mesh: MeshProcess
) -> None:
    streams = Streams(context)
    page = context.new_page()
    opened(page, mesh, "requests", "Requests")
    until_live(page)
    page.evaluate(HIDE, True)
    page.get_by_role("banner").get_by_text("connecting", exact=True).wait_for()
    assert streams.count(WATCH) == 0
    other = context.new_page()
    opened(other, mesh)
    page.evaluate(HIDE, False)
    until_live(page)
    seen_everywhere(other, [page])


def test_streams_that_begin_again_and_again_leave_no_listeners(page: "Page", mesh: MeshProcess) -> None:
    """A log that is followed for days opens its stream after each end."""
    opened(page, mesh)
    assert page.evaluate(LISTENERS) == 0


def test_many_running_answers_leave_a_connection_free_and_all_come_to_their_end(
    context: "BrowserContext", mesh: MeshProcess
) -> None:
    streams = Streams(context)
    behave(mesh, "a", tokens_per_second=10.0, answer_tokens=150)
    try:
        tabs = [context.new_page() for _ in range(7)]
        answers = []
        for tab in tabs:
            opened(tab, mesh, "chat?model=pool", "Chat")
            answers.append(asked(tab, "Count"))
        assert streams.count(EVENTS) <= 5
        other = context.new_page()
        opened(other, mesh, "models", "Models")
        shown_model(other)
        behave(mesh, "a", tokens_per_second=0.0, answer_tokens=5)
        for answer in answers:
            expect(answer.locator(".receipt")).to_contain_text("completed", timeout=60_000)
    finally:
        finished(mesh.reset("a"))


def test_hidden_chat_keeps_no_stream_and_sends_what_is_queued(context: "BrowserContext", mesh: MeshProcess) -> None:
    streams = Streams(context)
    behave(mesh, "a", tokens_per_second=20.0, answer_tokens=160)
    try:
        page = context.new_page()
        opened(page, mesh, "chat?model=pool", "Chat")
        asked(page, "One").get_by_text("tok0 tok1").wait_for()
        page.get_by_role("textbox", name="Message").fill("Two")
        page.keyboard.press("Enter")
        page.evaluate(HIDE, True)
        page.get_by_role("banner").get_by_text("connecting", exact=True).wait_for()
        page.wait_for_timeout(100)
        assert streams.count(EVENTS) == 0
        expect(page.locator(".said")).to_have_text(["One", "Two"])
        page.evaluate(HIDE, False)
        expect(page.get_by_role("article").last.locator(".receipt")).to_contain_text("completed")
    finally:
        finished(mesh.reset("a"))

"""Requests and the queue in a real browser: lists, one request with its timeline, explain and cancel."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest
from mesh_process import MeshProcess
from pages import accessibility_faults, opened, picture
from requests_kit import busy, call, chat, served_mesh

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    with served_mesh(tmp_path_factory.mktemp("requests")) as mesh:
        for number in range(3):
            chat(mesh, "quick", f"quick-{number}")
        with suppress(HTTPError):
            chat(mesh, "quick", "refused-0", messages=[{"role": "user", "content": "word " * 60_000}])
        yield mesh


def test_requests_appear_in_the_list_live_and_update_as_they_end(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "requests", "Requests")
    page.get_by_role("link", name="quick-2").wait_for()
    with busy(mesh, 1):
        running = page.get_by_role("row").filter(has_text="slow-0")
        running.get_by_text("running").wait_for()
        waiting = page.get_by_role("row").filter(has_text="slow-1")
        waiting.get_by_text("queued").wait_for()
        waiting.get_by_text("slot of slow is busy").wait_for()
        picture(page, "requests")
        call(mesh, "POST", "/v1/requests/slow-1/cancel")
        waiting.get_by_text("cancelled", exact=True).wait_for()


def test_list_filters_by_outcome_and_search_text(page: "Page", mesh: MeshProcess) -> None:
    chat(mesh, "quick", "looked-for")
    opened(page, mesh, "requests?state=completed", "Requests")
    page.get_by_role("link", name="looked-for").wait_for()
    assert not page.get_by_role("link", name="slow-1").count()
    page.get_by_label("Find").fill("looked")
    page.get_by_text("1 shown").wait_for()
    page.reload()
    page.get_by_text("1 shown").wait_for()
    page.get_by_label("Show").select_option("cancelled")
    page.get_by_text("No request matches the filter.").wait_for()


def test_request_page_shows_timeline_receipt_and_decisions(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "requests", "Requests")
    page.get_by_role("link", name="quick-0").click()
    page.get_by_role("heading", level=1, name="quick-0").wait_for()
    page.get_by_role("img", name="Timeline: ").wait_for()
    told = page.get_by_role("img", name="Timeline: ").get_attribute("aria-label") or ""
    assert "until its first token" in told
    assert "answer" in told
    facts = page.locator("dl.facts")
    facts.get_by_text("m-a").wait_for()
    facts.get_by_text("24", exact=True).wait_for()
    page.get_by_role("cell", name="attempt 1 sent to m-a").wait_for()
    picture(page, "request")


def test_failed_request_page_shows_the_engine_exit_and_its_last_log_lines(page: "Page", mesh: MeshProcess) -> None:
    with pytest.raises(HTTPError):
        chat(mesh, "dying", "failed-0")
    opened(page, mesh, "requests/failed-0", "failed-0")
    attempt = page.get_by_role("listitem").filter(has_text="m-c on c").first
    attempt.get_by_text("the engine died while it processed the request (signal SIGKILL)").wait_for()
    attempt.get_by_text("Engine ended: signal SIGKILL", exact=True).wait_for()
    assert "listening on" in attempt.get_by_role("group", name="Engine log").inner_text()
    picture(page, "request-failed")


def test_waiting_request_is_explained_and_its_page_updates(page: "Page", mesh: MeshProcess) -> None:
    with busy(mesh, 1):
        opened(page, mesh, "requests/slow-1", "slow-1")
        page.get_by_role("status").filter(has_text="Waiting: the slot of slow is busy").wait_for()
        picture(page, "request-waiting")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("slow-1 is cancelled.").wait_for()
        page.locator(".state").get_by_text("cancelled").wait_for()


def test_unknown_request_is_reported(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "requests/no-such", "no-such")
    page.get_by_role("alert").get_by_text("no request no-such is known").wait_for()


def test_queue_shows_waiting_requests_with_reasons_and_cancels_them(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "queue", "Queue")
    page.get_by_text("No requests are waiting.").wait_for()
    with busy(mesh):
        page.get_by_text("3 waiting, 1 running.").wait_for()
        rows = page.get_by_role("table", name="Waiting requests").get_by_role("row")
        cells = [rows.nth(at).get_by_role("cell").all_inner_texts()[:3] for at in (1, 2, 3)]
        assert cells == [["1", "slow-1", "slow"], ["2", "slow-2", "slow"], ["3", "slow-3", "slow"]]
        queues = page.get_by_role("table", name="Queues").get_by_role("row")
        queues.filter(has_text="slow").get_by_role("img", name="Queue of slow: wait 3 of 16").wait_for()
        picture(page, "queue")
        page.get_by_role("button", name="Cancel slow-2").click()
        page.get_by_role("button", name="Cancel the request").click()
        page.get_by_text("2 waiting, ").wait_for()
        # The one behind it moves up.
        page.get_by_role("row").filter(has_text="slow-3").get_by_role("cell", name="2", exact=True).wait_for()
        page.get_by_role("link", name="Explain slow-3").click()
        page.get_by_role("heading", level=1, name="slow-3").wait_for()
        page.get_by_role("heading", name="Decisions").wait_for()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
@pytest.mark.parametrize("path", ["requests", "requests/quick-0", "queue"])
def test_request_pages_have_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, theme: str, width: int, path: str
) -> None:
    def ready(page: "Page") -> None:
        page.get_by_text("waiting, " if path == "queue" else "quick-0").first.wait_for()
        picture(page, f"{path.replace('/', '-')}-{theme}-{width}")

    with busy(mesh, 2):
        assert not accessibility_faults(browser, f"{mesh.url}/ui/{path}", theme=theme, width=width, after=ready)

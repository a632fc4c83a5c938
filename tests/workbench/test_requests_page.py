"""Requests in a real browser: the list with its tabs and filters, and one request with its waterfall."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest
from chat_steps import asked
from mesh_process import MeshProcess
from pages import accessibility_faults, expect, opened, picture
from requests_kit import busy, call, chat, served_mesh

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

TEN_THOUSAND_ROWS = """async () => {
  const folder = document.querySelector("link[rel=icon]").href.replace("icon.svg", "");
  const {h, render} = await import("preact");
  const {Table} = await import(folder + "app/parts/table.js");
  const box = document.querySelector("main").appendChild(document.createElement("div"));
  const rows = Array.from({length: 10_000}, (_, at) => ({name: `r-${at}`}));
  const columns = [{title: "Request", cell: (row) => row.name}];
  const frame = () => new Promise(requestAnimationFrame);
  const began = performance.now();
  render(h(Table, {label: "Many", rows, columns, rowKey: (row) => row.name, height: "20rem"}), box);
  await frame();
  const first = box.querySelector("tbody tr:not(.spacer)").innerText;
  box.firstElementChild.scrollTop = 1e7;
  for (let at = 0; at < 60 && !box.innerText.includes("r-9999"); at += 1) await frame();
  return [[first, [...box.querySelectorAll("tbody tr:not(.spacer)")].at(-1).innerText], performance.now() - began];
}"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    with served_mesh(tmp_path_factory.mktemp("requests")) as mesh:
        for number in range(3):
            chat(mesh, "quick", f"quick-{number}")
        with suppress(HTTPError):
            chat(mesh, "quick", "refused-0", messages=[{"role": "user", "content": "word " * 60_000}])
        with suppress(HTTPError):
            chat(mesh, "dying", "failed-0")
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


def test_list_is_filtered_by_state_model_time_and_text(page: "Page", mesh: MeshProcess) -> None:
    chat(mesh, "quick", "looked-for")
    opened(page, mesh, "requests?state=completed", "Requests")
    page.get_by_role("link", name="looked-for").wait_for()
    assert not page.get_by_role("link", name="slow-1").count()
    page.get_by_label("Find").fill("looked")
    page.get_by_text("1 shown").wait_for()
    page.get_by_label("Arrived").select_option("Last 5 min")
    page.get_by_label("Model").select_option("quick")
    page.reload()
    page.get_by_text("1 shown").wait_for()
    expect(page.get_by_label("Arrived")).to_have_value("300")
    expect(page.get_by_label("Model")).to_have_value("quick")
    page.get_by_label("Outcome").select_option("Cancelled")
    page.get_by_text("No request matches the filter.").wait_for()
    page.get_by_role("navigation", name="States").get_by_role("link", name="All").click()
    page.get_by_text("1 shown").wait_for()


def test_requests_of_several_tenants_are_listed_and_filtered(page: "Page", mesh: MeshProcess) -> None:
    chat(mesh, "quick", "of-another", tenant="another")
    opened(page, mesh, "requests", "Requests")
    page.get_by_label("Tenant").select_option("another")
    expect(page.get_by_role("table", name="Requests").locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="of-another").click()
    page.locator("dl.facts").get_by_text("another", exact=True).wait_for()


def test_request_links_to_its_trace(page: "Page", mesh: MeshProcess) -> None:
    chat(mesh, "quick", "traced")

    def with_trace(route: "Route") -> None:
        record = route.fetch().json()
        route.fulfill(json=record | {"receipt": record["receipt"] | {"traceId": "ab" * 16}})

    def with_url(route: "Route") -> None:
        route.fulfill(json=route.fetch().json() | {"traceUrl": "https://traces.example/trace/{trace_id}"})

    page.route("**/v1/requests/traced?*", with_trace)
    page.route("**/api/v1/caller", with_url)
    opened(page, mesh, "requests/traced", "traced")
    link = page.get_by_role("link", name="ab" * 16)
    expect(link).to_have_attribute("href", f"https://traces.example/trace/{'ab' * 16}")


def test_bars_of_the_list_have_the_parts_of_each_request_and_sort(page: "Page", mesh: MeshProcess) -> None:
    with busy(mesh, 1):
        chat(mesh, "quick", "short")
        opened(page, mesh, "requests", "Requests")
        row = page.get_by_role("row").filter(has_text="short")
        expect(row.get_by_role("img", name="Duration: ")).to_have_attribute(
            "aria-label", re.compile("until first token .*answer")
        )
        page.get_by_role("row").filter(has_text="slow-1").get_by_role("img", name="Duration: queue").wait_for()
        page.get_by_role("button", name="Duration").click()
        page.get_by_role("button", name="Duration ↑").click()
        first = page.get_by_role("table", name="Requests").locator("tbody tr").first
        expect(first).to_contain_text("slow-0")
        expect(first.locator(".parts > span")).to_have_attribute("style", re.compile("width: ?100%"))


def test_ten_thousand_requests_scroll_with_few_rows_drawn(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "requests", "Requests")
    drawn, milliseconds = page.evaluate(TEN_THOUSAND_ROWS)
    assert drawn == ["r-0", "r-9999"]
    assert milliseconds < 2_000, "some frames, on a busy machine"
    assert page.get_by_role("table", name="Many").get_by_role("row").count() < 100


def test_generated_ids_are_short_and_copied_whole(page: "Page", mesh: MeshProcess) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat(mesh, "quick")
    whole = next(each["requestId"] for each in call(mesh, "GET", "/v1/requests?state=ended&limit=1")["items"])
    opened(page, mesh, "requests", "Requests")
    link = page.get_by_title(whole)
    expect(link).to_have_text(f"{whole[:12]}…")
    page.get_by_role("button", name=f"Copy {whole}").click()
    page.get_by_role("button", name=f"{whole} is copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == whole


def test_new_requests_do_not_move_what_is_read(page: "Page", mesh: MeshProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: chat(mesh, "quick", f"many-{number}"), range(30)))
    opened(page, mesh, "requests?text=many", "Requests")
    page.get_by_text("30 shown").wait_for()
    page.get_by_role("region", name="Requests").evaluate("box => box.scrollTop = 150")
    row = page.get_by_role("table", name="Requests").locator("tbody tr").nth(10)
    name, before = row.get_by_role("link").inner_text(), row.bounding_box()
    chat(mesh, "quick", "many-more")
    button = page.get_by_role("button", name="Show 1 new request")
    button.wait_for()
    expect(row.get_by_role("link")).to_have_text(name)
    assert before
    assert row.bounding_box() == before
    button.click()
    expect(page.get_by_role("table", name="Requests").locator("tbody tr").first).to_contain_text("many-more")
    expect(page.get_by_role("link", name="many-more")).to_be_in_viewport()


def test_request_page_shows_waterfall_summary_and_decisions(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "requests", "Requests")
    page.get_by_role("link", name="quick-0").click()
    page.get_by_role("heading", level=1, name="quick-0").wait_for()
    pieces = page.get_by_role("list", name="Timeline").get_by_role("listitem")
    pieces.filter(has_text="Attempt 1: m-a on a").wait_for()
    pieces.filter(has_text=re.compile("Prompt processing|Until first token")).wait_for()
    pieces.filter(has_text="Tokens").get_by_text("24 tokens").wait_for()
    facts = page.locator("dl.facts")
    facts.get_by_text("m-a").wait_for()
    facts.get_by_text("24", exact=True).wait_for()
    page.get_by_role("cell", name="attempt 1 sent to m-a").get_by_text(
        "m-a on a: chosen (first token), score "
    ).wait_for()
    page.get_by_text("Cannot be repeated here: no conversation").wait_for()
    picture(page, "request")


def test_captured_prompt_and_answer_are_shown_as_text_to_who_asks_and_capture_is_marked_on_every_page(
    page: "Page", mesh: MeshProcess
) -> None:
    opened(page, mesh, "requests/quick-0", "quick-0")
    page.get_by_text(
        "Not captured. To capture the next requests, declare tenant default with capture: true."
    ).wait_for()
    assert page.get_by_role("note").count() == 0
    hostile = "<img src=x onerror=\"document.title='hit'\"> canary"
    call(mesh, "PUT", "/api/v1/tenants/acme", {"kind": "tenant", "name": "acme", "capture": True})
    page.get_by_role("note").get_by_text(
        "Capture is on: the mesh stores prompts and answers of tenant acme."
    ).wait_for()
    answered = chat(mesh, "quick", "captured-0", tenant="acme", messages=[{"role": "user", "content": hostile}])
    opened(page, mesh, "requests/captured-0", "captured-0")
    assert "canary" not in page.locator("main").inner_text(), "nobody has asked for it"
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("group", name="prompt")).to_have_text(f"[user]\n{hostile}")
    expect(page.get_by_role("group", name="answer")).to_have_text(answered["choices"][0]["message"]["content"])
    assert page.locator("main img").count() == 0
    picture(page, "request-captured")
    (read,) = [each for each in call(mesh, "GET", "/v1/admin/audit")["items"] if each["event"] == "capture.read"]
    assert "captured-0" in str(read)
    call(mesh, "PUT", "/api/v1/tenants/acme", {"kind": "tenant", "name": "acme"})
    expect(page.get_by_role("note")).to_have_count(0)
    page.reload()
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_role("alert").get_by_text("are not stored").wait_for()


def test_failed_attempt_is_drawn_with_its_error_engine_log_and_exit(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "requests/failed-0", "failed-0")
    attempt = page.get_by_role("list", name="Timeline").get_by_role("listitem").filter(has_text="Attempt 1: m-c on c")
    attempt.locator(".span-failed").wait_for(state="attached")
    attempt.get_by_text("the engine died while it processed the request (signal SIGKILL)").first.wait_for()
    attempt.get_by_text("Engine ended: signal SIGKILL", exact=True).wait_for()
    assert "listening on" in attempt.get_by_role("group", name="Engine log").inner_text()
    picture(page, "request-failed")
    attempt.get_by_role("link", name="Engine log of m-c on c").click()
    page.get_by_role("heading", level=1, name="c", exact=True).wait_for()
    page.get_by_role("log", name="Engine log of m-c").wait_for()


def test_refused_request_says_so_in_its_waterfall(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "requests/refused-0", "refused-0")
    page.get_by_role("list", name="Timeline").get_by_role("listitem").filter(has_text="Refused").wait_for()


def test_request_of_the_chat_is_repeated_with_its_model_options_and_messages(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=quick", "Chat")
    page.get_by_role("button", name="Options").click()
    page.get_by_label("System prompt").fill("Be brief.")
    for text in ("The first message", "The second message"):
        answer = asked(page, text)
        expect(answer.locator(".receipt")).to_contain_text("completed")
    answer.locator(".receipt summary").click()
    answer.locator(".receipt").get_by_role("link").click()
    page.get_by_role("button", name="Repeat").click()
    page.get_by_role("heading", level=1, name="Chat").wait_for()
    expect(page.get_by_role("textbox", name="Message")).to_have_value("The second message")
    expect(page.get_by_role("combobox", name="Model")).to_have_value("quick")
    expect(page.locator(".said")).to_have_text(["The first message"])
    page.get_by_role("button", name="Options").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")


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


def test_waiting_requests_are_shown_in_their_order_and_cancelled(page: "Page", mesh: MeshProcess) -> None:
    # The address of the page that is now a tab.
    opened(page, mesh, "queue", "Requests")
    page.wait_for_url("**/ui/requests?state=waiting")
    page.get_by_text("No requests are waiting.").wait_for()
    with busy(mesh):
        page.get_by_text("3 waiting, 1 running, 3 shown").wait_for()
        page.get_by_role("link", name="Waiting (3)").wait_for()
        rows = page.get_by_role("table", name="Requests").get_by_role("row")
        cells = [rows.nth(at).get_by_role("cell").all_inner_texts()[:3] for at in (1, 2, 3)]
        assert cells == [["1", "slow-1", "slow"], ["2", "slow-2", "slow"], ["3", "slow-3", "slow"]]
        queues = page.get_by_role("table", name="Queues").get_by_role("row")
        queues.filter(has_text="slow").get_by_role("img", name="Queue of slow: waiting 3 of 16").wait_for()
        picture(page, "queue")
        page.get_by_role("button", name="Cancel slow-2").click()
        page.get_by_role("button", name="Cancel the request").click()
        page.get_by_text("2 waiting, ").wait_for()
        # The one behind it moves up.
        page.get_by_role("row").filter(has_text="slow-3").get_by_role("cell", name="2", exact=True).wait_for()
        page.get_by_role("link", name="Explain slow-3").click()
        page.get_by_role("heading", level=1, name="slow-3").wait_for()
        page.get_by_role("heading", name="Decisions").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_request_pages_have_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, theme: str, width: int
) -> None:
    with busy(mesh, 2):
        for path, text in (
            ("requests", "quick-0"), ("requests?state=waiting", "slow-2"), ("requests/quick-0", "Attempt 1"),
            ("requests/failed-0", "Engine ended"),
        ):  # fmt: skip

            def ready(page: "Page", path: str = path, text: str = text) -> None:
                page.get_by_text(text).first.wait_for()
                picture(page, f"{re.sub('[^a-z0-9]+', '-', path)}-{theme}-{width}")

            assert not accessibility_faults(browser, f"{mesh.url}/ui/{path}", theme=theme, width=width, after=ready)


def test_failed_requests_show_their_reason_in_sight_on_one_line_and_one_scrollbar(
    browser: "Browser", mesh: MeshProcess
) -> None:
    """At 1440 pixels the column was outside of the window, and made rows up to 190 pixels tall."""
    for at in range(40):
        with suppress(HTTPError):
            chat(mesh, f"no-such-model-{at}-{'x' * 60}", f"refused-{at}")
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = opened(context.new_page(), mesh, "requests?state=failed", "Requests")
    table = page.get_by_role("table", name="Requests")
    table.locator("tbody tr").nth(5).wait_for()
    heads = table.get_by_role("columnheader").all_text_contents()
    assert heads[1:3] == ["State", "Reason"]
    assert not {"First token", "In", "Out", "Client"} & {*heads}
    reason = table.locator("tbody tr").first.locator("td").nth(2).locator("span")
    box = reason.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] < 1440
    assert reason.get_attribute("title") == reason.inner_text()
    assert max(table.locator("tbody tr").evaluate_all("all => all.map((row) => row.clientHeight)")) < 50
    heights = page.evaluate("[document.documentElement.scrollHeight, innerHeight]")
    assert heights[0] <= heights[1], heights
    picture(page, "requests-failed")
    widths = table.evaluate("table => [table.parentElement.scrollWidth, table.parentElement.clientWidth]")
    assert widths[0] <= widths[1], widths
    context.close()

"""The search over the whole workbench (Ctrl+K) and the list of shortcuts (?)."""

from typing import TYPE_CHECKING

import pytest
from chat_steps import asked
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, expect, opened, picture
from test_models_added import declare_many

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Locator, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


def searched(page: "Page", text: str) -> "Locator":
    """Opens the search by its key and types; its results."""
    page.keyboard.press("Control+k")
    field = page.get_by_role("dialog", name="Search").get_by_role("combobox")
    expect(field).to_be_focused()
    page.keyboard.type(text)
    return page.get_by_role("dialog", name="Search").get_by_role("option")


def test_pages_models_and_actions_are_found_and_opened_by_keyboard(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh)
    expect(searched(page, "usa")).to_have_text(["Usage"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Usage").wait_for()
    results = searched(page, "m-a")
    expect(results).to_have_text(["m-a model, active", "pool chat"])
    picture(page, "search")
    expect(results.first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Chat").wait_for()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("pool")
    expect(searched(page, "theme dark")).to_have_count(1)
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    expect(searched(page, "queue").first).to_have_text("Waiting requests queue")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/requests?state=waiting")
    searched(page, "no such thing at all")
    page.get_by_text("Nothing found.").wait_for()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_conversations_are_found_by_their_text_and_requests_by_id(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "A long beginning\n" * 10 + "then the pangolin appears")
    expect(answer.locator(".receipt")).to_contain_text("completed")
    address = page.url
    answer.locator(".receipt summary").click()
    request = answer.locator(".receipt").get_by_role("link").inner_text()
    opened(page, mesh)
    result = searched(page, "PANGOLIN tok3")
    expect(result).to_have_count(1)
    expect(result).to_contain_text("the pangolin appears")
    page.keyboard.press("Enter")
    page.locator(".said").get_by_text("the pangolin appears").wait_for()
    assert page.url == address
    expect(searched(page, request[:-4])).to_contain_text([request])
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name=request).wait_for()


def test_request_of_long_ago_is_opened_by_its_whole_id(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh)
    expect(searched(page, "req-0123456789ab")).to_have_text(["req-0123456789ab"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="req-0123456789ab").wait_for()


def test_question_mark_lists_the_shortcuts_but_not_in_a_field(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    field = page.get_by_role("textbox", name="Message")
    expect(field).to_be_focused()
    page.keyboard.type("?")
    expect(field).to_have_value("?")
    page.get_by_role("heading", level=1, name="Chat").click()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard shortcuts").get_by_text("Ctrl").wait_for()
    picture(page, "shortcuts")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_search_has_no_accessibility_violations(browser: "Browser", mesh: MeshProcess, theme: str, width: int) -> None:
    def searching(page: "Page") -> None:
        expect(searched(page, "m").first).to_be_visible()

    def listing(page: "Page") -> None:
        page.keyboard.press("?")
        page.get_by_role("dialog").wait_for()

    for after in (searching, listing):
        assert not accessibility_faults(browser, f"{mesh.url}/ui/", theme=theme, width=width, after=after)


def test_all_of_more_than_a_hundred_models_are_found_and_all_pages_listed(page: "Page", tmp_path: "Path") -> None:
    """Of 162 models the last 62 had no entry, and six of eleven pages were listed."""

    def many(route: "Route") -> None:
        found = route.fetch().json()
        found["data"] = [{**found["data"][0], "id": f"pool-{at:03}"} for at in range(130)]
        route.fulfill(json=found)

    with running_mesh(tmp_path / "home", "--config", str(write_config(tmp_path, fake_runner("a")))) as mesh:
        declare_many(mesh.url)
        opened(page, mesh)
        pages = page.get_by_role("navigation", name="Pages").get_by_role("link").all_text_contents()
        results = searched(page, "")
        expect(page.get_by_role("group", name="Pages").get_by_role("option")).to_have_text(pages)
        page.keyboard.type("model-0999")
        expect(results).to_have_text(["model-0999 model, inactive"])
        page.get_by_role("combobox", name="Search").fill("model-09")
        results.filter(has_text="94 more").click()
        expect(results).to_have_count(100)
        page.route("**/v1/models", many)
        opened(page, mesh, "chat?model=pool-000", "Chat")
        page.get_by_role("combobox", name="Model").click()
        page.get_by_role("option", name="Show more (30)").click()
        expect(page.get_by_role("listbox", name="Model").get_by_role("option")).to_have_count(130)
        page.get_by_role("option", name="pool-129").click()
        page.get_by_role("heading", name="pool-129").wait_for()

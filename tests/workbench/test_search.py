"""The search over the whole workbench (Ctrl+K) and the list of shortcuts (?)."""

from typing import TYPE_CHECKING

import pytest
from chat_steps import asked
from mesh_process import MeshProcess
from pages import accessibility_faults, expect, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

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

"""Messages of the chat that are not sent yet: drafts, and messages that wait for the answer before them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chat_steps import asked, behave, until_idle
from mesh_process import MeshProcess
from pages import accessibility_faults, expect, finished, opened, picture

from weft_testing.media_files import png

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

RENAMED_WHILE_MUCH_IS_STORED = """async (title) => {
  const folder = document.querySelector("link[rel=icon]").href.replace("icon.svg", "");
  const {keep} = await import(folder + "app/pages/chat_store.js");
  const {shown, change} = await import(folder + "app/pages/chat_state.js");
  for (let at = 0; at < 200; at += 1) void keep(shown.value);
  change((conversation) => { conversation.title = title; });
  location.reload();
}"""

SENT_AT_ONCE = """
new MutationObserver((_, observer) => {
  const field = document.querySelector("textarea[aria-label=Message]");
  if (!field) return;
  observer.disconnect();
  field.value = "At once";
  field.dispatchEvent(new Event("input", {bubbles: true}));
  field.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true}));
}).observe(document, {childList: true, subtree: true});
"""


@pytest.fixture(autouse=True)
def slow_model(mesh: MeshProcess) -> Iterator[None]:
    """Answers that take three seconds."""
    behave(mesh, "a", tokens_per_second=20.0, answer_tokens=60)
    yield
    finished(mesh.reset("a"))


def queue(page: "Page", *texts: str) -> None:
    """Writes messages while an answer comes."""
    for text in texts:
        page.get_by_role("textbox", name="Message").fill(text)
        page.keyboard.press("Enter")
    expect(page.get_by_role("list", name="Queued messages").get_by_role("listitem")).to_have_count(len(texts))


def test_enter_queues_messages_which_are_sent_in_order_also_after_a_reload(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    asked(page, "One").get_by_text("tok0 tok1").wait_for()
    queue(page, "Two", "Three", "Dropped")
    picture(page, "chat-queued")
    page.get_by_role("button", name="Remove queued message").last.click()
    page.reload()
    expect(page.locator(".said")).to_have_text(["One", "Two", "Three"], timeout=30_000)
    expect(page.get_by_role("article").last.locator(".receipt")).to_contain_text("completed")
    expect(page.get_by_role("list", name="Queued messages")).to_have_count(0)
    sent = [each["content"] for each in until_idle(mesh, "a").last_request_body["messages"]]
    assert sent[::2] == ["One", "Two", "Three"]


def test_change_is_stored_though_the_page_is_reloaded_at_once(page: "Page", mesh: MeshProcess) -> None:
    """A removed message was sent after a reload: its transaction was not committed yet, and was undone."""
    opened(page, mesh, "chat?model=pool", "Chat")
    asked(page, "One").get_by_text("tok0 tok1").wait_for()
    for title in ("Renamed", "Renamed again", "Renamed a third time"):
        with page.expect_navigation():
            page.evaluate(f"(title) => void ({RENAMED_WHILE_MUCH_IS_STORED})(title)", title)
        expect(page.get_by_role("link", name=title, exact=True)).to_be_visible()


def test_stopped_answer_holds_the_queue(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    asked(page, "One").get_by_text("tok0 tok1").wait_for()
    queue(page, "Two", "Three")
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    expect(page.locator(".said")).to_have_text(["One"])
    page.get_by_role("button", name="Edit queued message").last.click()
    field = page.get_by_role("textbox", name="Message")
    expect(field).to_have_value("Three")
    expect(field).to_be_focused()
    page.get_by_role("button", name="Send now").click()
    expect(page.locator(".said")).to_have_text(["One", "Two"])
    page.keyboard.press("Escape")


def test_message_sent_as_soon_as_the_chat_is_drawn_is_sent(page: "Page", mesh: MeshProcess) -> None:
    """The chat began a new conversation for the model of the address only after it was drawn."""
    page.add_init_script(SENT_AT_ONCE)
    opened(page, mesh, "chat?model=pool", "Chat")
    expect(page.locator(".said")).to_have_text("At once")


def test_message_without_a_model_is_kept_and_says_why(page: "Page", mesh: MeshProcess) -> None:
    page.route("**/v1/models*", lambda route: route.abort())
    opened(page, mesh, "chat", "Chat")
    field = page.get_by_role("textbox", name="Message")
    field.fill("Waiting")
    field.press("Enter")
    page.get_by_role("alert").get_by_text("Choose a model first.").wait_for()
    expect(field).to_have_value("Waiting")


def test_draft_is_kept_by_conversation(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    field = page.get_by_role("textbox", name="Message")
    field.fill("A new thought")
    page.locator("input[type=file][accept*='image']").set_input_files(
        {"name": "cat.png", "mimeType": "image/png", "buffer": png(3, 2)}
    )
    page.get_by_role("list", name="Files").wait_for()
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Overview").click()
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Chat").click()
    expect(field).to_have_value("A new thought")
    page.get_by_role("button", name="Remove cat.png").click()
    page.keyboard.press("Escape")
    field.press("Enter")
    expect(page.locator(".said")).to_have_text("A new thought")
    field.fill("A second thought")
    page.reload()
    expect(field).to_have_value("A second thought")
    page.get_by_role("button", name="New conversation").click()
    expect(field).to_have_value("")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_queue_has_no_accessibility_violations(browser: "Browser", mesh: MeshProcess, theme: str, width: int) -> None:
    behave(mesh, "a", tokens_per_second=20.0, answer_tokens=0)

    def queued(page: "Page") -> None:
        asked(page, "One").get_by_text("tok0 tok1").wait_for()
        queue(page, "Two")
        page.keyboard.press("Escape")
        page.get_by_text("Stopped.").wait_for()

    assert not accessibility_faults(browser, f"{mesh.url}/ui/chat?model=pool", theme=theme, width=width, after=queued)

"""Versions in the chat: messages sent again, answers regenerated and edited, and a message that is deleted."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chat_steps import asked, behave, until_idle
from mesh_process import MeshProcess
from pages import accessibility_faults, expect, finished, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def echo(mesh: MeshProcess) -> Iterator[None]:
    """Answers that repeat the message."""
    behave(mesh, "a", echo=True, tokens_per_second=0.0)
    yield
    finished(mesh.reset("a", "b"))


def completed(answer: "Locator") -> None:
    """Waits for the receipt of an answer."""
    expect(answer.locator(".receipt")).to_contain_text("completed")


def edited(page: "Page", text: str) -> None:
    """Sends the first message again with another text."""
    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.get_by_role("textbox", name="Edited message").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".said")).to_have_text([text])
    completed(page.get_by_role("article").last)


def test_edited_message_keeps_its_versions_with_what_followed(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    completed(asked(page, "first"))
    completed(asked(page, "second"))
    edited(page, "better")
    message = page.locator(".asked").first
    expect(message.locator(".versions")).to_contain_text("2/2")
    picture(page, "chat-versions")
    page.reload()
    message.get_by_role("button", name="Previous version").press("Enter")
    expect(page.locator(".said")).to_have_text(["first", "second"])
    expect(page.get_by_role("article").locator(".markdown")).to_have_text(["first", "second"])
    completed(asked(page, "third"))
    sent = until_idle(mesh, "a").last_request_body["messages"]
    assert [each["content"] for each in sent] == ["first", "first", "second", "second", "third"]
    message.get_by_role("button", name="Next version").press("Enter")
    expect(message.get_by_role("button", name="Next version")).to_be_focused()
    expect(page.locator(".said")).to_have_text(["better"])


def test_regenerated_answer_keeps_its_versions_and_the_shown_one_is_sent(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    completed(asked(page, "first"))
    behave(mesh, "a", text="Another.", tokens_per_second=0.0)
    page.get_by_role("button", name="Regenerate").click()
    answer = page.get_by_role("article").first
    answer.get_by_text("Another.").wait_for()
    completed(answer)
    expect(answer.locator(".versions")).to_contain_text("2/2")
    answer.get_by_role("button", name="Previous version").click()
    expect(answer.locator(".markdown")).to_have_text("first")
    completed(asked(page, "second"))
    sent = until_idle(mesh, "a").last_request_body["messages"]
    assert [each["content"] for each in sent] == ["first", "first", "second"]


def test_answer_is_regenerated_with_another_model(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "b", text="The answer of b.", tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Who?")
    completed(answer)
    answer.get_by_role("button", name="Other model").click()
    dialog = page.get_by_role("dialog", name="Regenerate with another model")
    dialog.get_by_role("combobox").fill("other")
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Regenerate").click()
    answer.get_by_text("The answer of b.").wait_for()
    answer.get_by_role("heading", name="other").wait_for()
    completed(answer)
    expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value("pool")
    answer.get_by_role("button", name="Next version").click()
    answer.get_by_role("heading", name="pool").wait_for()


def test_edited_answer_is_sent_as_it_was_edited(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "first")
    completed(answer)
    answer.get_by_role("button", name="Edit answer").click()
    page.get_by_role("textbox", name="Edited answer").fill("*Corrected*")
    answer.get_by_role("button", name="Save").click()
    answer.get_by_text("Edited.").wait_for()
    page.reload()
    expect(answer.locator(".versions")).to_contain_text("2/2")
    completed(asked(page, "second"))
    sent = until_idle(mesh, "a").last_request_body["messages"]
    assert [each["content"] for each in sent] == ["first", "*Corrected*", "second"]


def test_deleted_message_is_not_sent_and_leaves_no_task(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    completed(asked(page, "first"))
    edited(page, "again")
    completed(asked(page, "second"))
    page.get_by_role("region", name="Message 1").get_by_role("button", name="Delete message").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".said")).to_have_text(["second"])
    completed(asked(page, "third"))
    page.reload()
    expect(page.locator(".said")).to_have_text(["second", "third"])
    sent = until_idle(mesh, "a").last_request_body["messages"]
    assert [each["content"] for each in sent] == ["second", "second", "third"]
    tasks = page.request.get(f"{mesh.url}/api/v1/inference-tasks?limit=1000").json()["data"]
    conversation = page.url.rpartition("/")[2]
    assert len([task for task in tasks if task["metadata"].get("conversation") == conversation]) == 2


def test_exported_conversation_keeps_its_versions(page: "Page", mesh: MeshProcess, tmp_path: Path) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    completed(asked(page, "first"))
    edited(page, "better")
    page.get_by_text("More").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    download.value.save_as(tmp_path / "all.json")
    page.locator("input[type=file][accept*=json]").set_input_files(tmp_path / "all.json")
    page.get_by_role("complementary", name="Conversations").get_by_role("link", name="first").first.click()
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".said")).to_have_text(["first"])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_versions_have_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, theme: str, width: int
) -> None:
    def changed(page: "Page") -> None:
        completed(asked(page, "first"))
        edited(page, "better")
        page.get_by_role("button", name="Edit answer").click()

    assert not accessibility_faults(browser, f"{mesh.url}/ui/chat?model=pool", theme=theme, width=width, after=changed)

"""Durable answers in the chat: a reload, another browser, a killed engine and a restarted mesh lose no text."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

import httpx2
import pytest
from chat_steps import asked, behave, until_idle
from keyed_mesh import new_key
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import expect, finished, opened, picture

from weft_testing.free_port import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

TOKENS = 120
WHOLE = " ".join(f"tok{number}" for number in range(TOKENS))


@contextmanager
def mesh_in(folder: Path, port: int = 0, *, keys: bool = False) -> Iterator[MeshProcess]:
    """A mesh with one model, which answers for six seconds."""
    runner = fake_runner("a", tokens_per_second=20.0, answer_tokens=TOKENS)
    config = write_config(folder, runner, port=port, auth={"required": keys})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    with mesh_in(tmp_path_factory.mktemp("durable")) as mesh:
        yield mesh


def text_of(answer: "Locator") -> str:
    """The exact text of an answer that is complete."""
    expect(answer.locator(".receipt")).to_contain_text("completed", timeout=60_000)
    text: str = answer.locator("> .markdown").inner_text()
    return text


def test_reload_mid_answer_keeps_the_text_and_gets_the_rest(page: "Page", mesh: MeshProcess) -> None:
    before = until_idle(mesh, "a").requests_started
    opened(page, mesh, "chat?model=pool", "Chat")
    asked(page, "Count").get_by_text("tok10 tok11").wait_for()
    page.reload()
    answer = page.get_by_role("article").last
    answer.get_by_text("tok10 tok11").wait_for()
    expect(answer).to_have_attribute("aria-busy", "true")
    assert text_of(answer) == WHOLE
    assert until_idle(mesh, "a").requests_started == before + 1


def test_answer_opened_elsewhere_continues_and_is_stopped_everywhere(
    browser: "Browser", page: "Page", mesh: MeshProcess
) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    asked(page, "Count *elsewhere*").get_by_text("tok10 tok11").wait_for()
    page.close()
    phone = browser.new_context().new_page()
    opened(phone, mesh, "chat", "Chat")
    phone.get_by_text("From other browsers").click()
    phone.get_by_role("link", name="Count *elsewhere*").click()
    answer = phone.get_by_role("article").last
    answer.get_by_text("tok10 tok11").wait_for()
    phone.locator(".said").get_by_text("Count *elsewhere*").wait_for()
    assert text_of(answer) == WHOLE
    picture(phone, "chat-elsewhere")
    asked(phone, "Again").get_by_text("tok10 tok11").wait_for()
    other = browser.new_context().new_page()
    other.goto(phone.url)
    assert other.get_by_role("article").first.locator(".markdown").inner_text() == WHOLE
    second = other.get_by_role("article").last
    second.get_by_text("tok10 tok11").wait_for()
    other.get_by_role("button", name="Stop", exact=True).last.click()
    for each in (second, phone.get_by_role("article").last):
        each.get_by_text("Stopped.").wait_for()
    until_idle(mesh, "a")
    phone.context.close()
    other.context.close()


def test_message_of_another_browser_appears_in_the_shown_conversation(
    browser: "Browser", page: "Page", mesh: MeshProcess
) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    assert text_of(asked(page, "Count here")) == WHOLE
    phone = browser.new_context().new_page()
    phone.goto(page.url)
    assert text_of(phone.get_by_role("article").last) == WHOLE
    asked(phone, "Count there")
    page.locator(".said").get_by_text("Count there").wait_for()
    assert text_of(page.get_by_role("article").nth(1)) == WHOLE
    asked(page, "Count here again")
    phone.locator(".said").get_by_text("Count here again").wait_for()
    assert text_of(phone.get_by_role("article").last) == WHOLE
    phone.context.close()


def test_stopped_answer_is_continued_and_the_shorter_one_stays_a_version(
    browser: "Browser", page: "Page", mesh: MeshProcess
) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Count in parts")
    answer.get_by_text("tok10 tok11").wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    answer.get_by_text("Stopped.").wait_for()
    begun = answer.locator(".markdown").inner_text()
    answer.get_by_role("button", name="Continue").click()
    expect(answer).to_have_attribute("aria-busy", "false", timeout=60_000)
    assert text_of(answer).replace(" ", "") == (begun + WHOLE).replace(" ", "")
    assert answer.locator("details", has_text="Interrupted").count() == 0
    phone = browser.new_context().new_page()
    phone.goto(page.url)
    assert text_of(phone.get_by_role("article").last).replace(" ", "") == (begun + WHOLE).replace(" ", "")
    assert phone.get_by_role("article").count() == 1
    phone.context.close()
    answer.get_by_role("button", name="Previous version").click()
    assert answer.locator(".markdown").inner_text() == begun


def test_engine_killed_mid_answer_keeps_its_text_and_the_next_attempt_answers(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Die on the way")
    # An engine that dies earlier leaves what the page had by then, which may be nothing.
    answer.get_by_text("tok10 tok11").wait_for()
    os.kill(finished(mesh.describe("a")).process_id, SIGKILL)
    lost = answer.locator("details", has_text="Interrupted: ")
    lost.get_by_text("the engine died").wait_for(timeout=30_000)
    lost.locator("summary").click()
    kept = lost.locator(".markdown").inner_text()
    assert kept.startswith("tok0 tok1 tok2")
    assert WHOLE.startswith(kept)
    picture(page, "chat-interrupted")
    assert text_of(answer) == WHOLE


def test_engine_that_died_before_the_page_had_a_token_leaves_no_interruption(page: "Page", mesh: MeshProcess) -> None:
    """The failed attempt is in the request's timeline; the answer is that of the next attempt, whole."""
    until_idle(mesh, "a")
    behave(mesh, "a", crash_after_tokens=5, fail_times=1)
    opened(page, mesh, "chat?model=pool", "Chat")
    held: list[Route] = []
    page.route("**/events*", lambda route: held.append(route))  # noqa: PLW0108  # Playwright sets an attribute
    with page.expect_request("**/events*") as request:
        answer = asked(page, "Die unseen")
    task = request.value.url.partition("/events")[0]
    deadline = time.monotonic() + 60
    while not (held and any(each["error"] for each in httpx2.get(task).json()["attempts"])):
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)
    held[0].continue_()
    page.unroute("**/events*")
    assert text_of(answer) == WHOLE
    assert answer.locator("details", has_text="Interrupted").count() == 0


def test_mesh_restarted_mid_answer_is_shown_and_the_answer_ends(page: "Page", tmp_path: Path) -> None:
    port = free_port()
    with mesh_in(tmp_path, port) as mesh:
        opened(page, mesh, "chat?model=pool", "Chat")
        answer = asked(page, "Count on")
        answer.get_by_text("tok10 tok11").wait_for()
        mesh.process.send_signal(SIGKILL)
        answer.get_by_text("The mesh does not answer. Trying again…").wait_for()
        expect(answer).to_contain_text("tok10 tok11")
    with mesh_in(tmp_path, port):
        assert text_of(answer) == WHOLE
        expect(answer.locator("details", has_text="Interrupted")).to_contain_text("tok0 tok1")


def test_answer_of_a_key_that_may_not_follow_tasks_ends_with_its_page(page: "Page", tmp_path: Path) -> None:
    with mesh_in(tmp_path, keys=True) as mesh:
        page.goto(f"{mesh.url}/ui/chat?model=pool")
        page.get_by_label("API key").fill(new_key(mesh, "--scope", "models:view", "--scope", "inference:create"))
        page.get_by_role("button", name="Sign in").click()
        # It is kept every 3 seconds.
        asked(page, "Count").get_by_text("tok80 tok81").wait_for()
        page.reload()
        answer = page.get_by_role("article").last
        answer.get_by_text("The page was closed before the answer was complete.").wait_for()
        expect(answer).to_contain_text("tok0 tok1 tok2")

"""The tasks behind answers of the chat: submitted once, ended, changed in another browser, and deleted."""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from chat_steps import asked, behave
from mesh_process import MeshProcess, fake_runner, run_weft, running_mesh, write_config
from pages import expect, finished, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

TASKS = "/api/v1/inference-tasks"
AGENT = {"name": "clerk", "model": "m-a"}
ALIAS = b"kind: alias\nname: fast\npattern: gpt-clerk\ntarget: agent/clerk\n"


@pytest.fixture(scope="module")
def task_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A model, an agent and an alias of the agent."""
    folder = tmp_path_factory.mktemp("chat-tasks")
    config = write_config(folder, {**fake_runner("a"), "agents": [AGENT]})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        code, _, err = finished(run_weft("apply", "-f", "-", home=mesh.home, stdin=ALIAS))
        assert code == 0, err
        yield mesh


@pytest.fixture
def mesh(task_mesh: MeshProcess) -> Iterator[MeshProcess]:
    """The mesh with the usual behaviour of its fake before and after each test."""
    yield task_mesh
    finished(task_mesh.reset("a"))


@pytest.fixture
def other(browser: "Browser") -> "Iterator[Page]":
    """A tab of another browser."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


def completed(answer: "Locator") -> "Locator":
    """The answer once its receipt is there."""
    expect(answer.locator(".receipt")).to_contain_text("completed")
    return answer


def submissions(page: "Page", *statuses: int) -> list[Any]:
    """The submissions of tasks from now on; the first get these statuses, though the mesh has accepted them."""
    seen: list[Any] = []

    def answer(route: "Route") -> None:
        if route.request.method != "POST":
            route.fallback()
            return
        seen.append(route.request)
        if len(seen) > len(statuses):
            route.continue_()
            return
        status = statuses[len(seen) - 1]
        if status == 503:
            route.fetch()
        route.fulfill(status=status, json={"error": {"message": "no"}})

    page.route(f"**{TASKS}", answer)
    return seen


def refuse(page: "Page", status: int, message: str) -> None:
    """Refuses to have tasks followed."""
    page.route("**/events*", lambda route: route.fulfill(status=status, json={"error": {"message": message}}))


def tasks_of(page: "Page", mesh: MeshProcess, conversation: str) -> list[Any]:
    """The tasks that the mesh has of a conversation."""
    found: list[Any] = page.request.get(f"{mesh.url}{TASKS}").json()["data"]
    return [task for task in found if (task.get("metadata") or {}).get("conversation") == conversation]


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_ended_answer_opened_elsewhere_has_its_text(page: "Page", other: "Page", mesh: MeshProcess, end: str) -> None:
    failure = {"out_of_memory_after_tokens": 5, "fail_times": 1} if end == "failed" else {}
    behave(mesh, "a", tokens_per_second=50.0, answer_tokens=0, **failure)
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Count")
    answer.get_by_text("tok0 tok1").wait_for()
    if end == "stopped":
        page.keyboard.press("Escape")
    expect(answer).to_have_attribute("aria-busy", "false")
    other.goto(page.url)
    there = other.get_by_role("article").last
    there.get_by_text("Stopped." if end == "stopped" else "out_of_memory", exact=True).wait_for()
    expect(there).to_contain_text("tok0 tok1")


def test_answer_regenerated_elsewhere_keeps_later_messages(page: "Page", other: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text="Old.", tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    completed(asked(page, "One"))
    other.goto(page.url)
    completed(other.get_by_role("article").last)
    completed(asked(page, "Two"))
    behave(mesh, "a", text="New.", tokens_per_second=0.0)
    # The second message may be there already.
    other.get_by_role("region", name="Message 1").get_by_role("button", name="Regenerate").click()
    completed(other.get_by_role("article").filter(has_text="New."))
    for _ in range(2):
        page.reload()
        page.get_by_role("article").first.get_by_text("New.").wait_for()
        expect(page.locator(".said")).to_have_text(["One", "Two"])
        expect(page.get_by_role("article").locator(".markdown")).to_have_text(["New.", "Old."])


def test_message_edited_elsewhere_changes_no_message_that_is_stored(
    page: "Page", other: "Page", mesh: MeshProcess
) -> None:
    behave(mesh, "a", text="Old.", tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    completed(asked(page, "One"))
    completed(asked(page, "Two"))
    other.goto(page.url)
    completed(other.get_by_role("article").last)
    other.get_by_role("button", name="Edit").first.click()
    other.get_by_role("textbox", name="Edited message").fill("Edited")
    other.get_by_role("button", name="Send again").click()
    expect(other.locator(".said")).to_have_text(["Edited"])
    completed(other.get_by_role("article").last)
    page.reload()
    page.get_by_text("Another browser has changed an earlier message").wait_for()
    expect(page.locator(".said")).to_have_text(["One", "Two"])


def test_submission_without_an_answer_is_repeated_and_is_one_task(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text="Once.", tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    seen = submissions(page, 503)
    completed(asked(page, "Repeat")).get_by_text("Once.").wait_for()
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    assert len(seen) == 2
    assert len(tasks_of(page, mesh, page.url.rpartition("/")[2])) == 1


@pytest.mark.parametrize(("status", "tries"), [(413, 1), (429, 1), (501, 1), (503, 3)])
def test_answer_without_a_task_is_streamed(page: "Page", mesh: MeshProcess, status: int, tries: int) -> None:
    behave(mesh, "a", text="Streamed.", tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    seen = submissions(page, *[status] * 4)
    with page.expect_request("**/v1/chat/completions"):
        completed(asked(page, "Stream")).get_by_text("Streamed.").wait_for()
    assert len(seen) == tries


def test_agent_is_asked_for_one_attempt(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text="Done.", tokens_per_second=0.0)
    attempts = {}
    for model in ("agent/clerk", "gpt-clerk", "pool"):
        opened(page, mesh, f"chat?model={model}", "Chat")
        seen = submissions(page)
        completed(asked(page, "Do it"))
        attempts[model] = json.loads(seen[0].post_data).get("max_attempts")
        page.unroute_all()
    assert attempts == {"agent/clerk": 1, "gpt-clerk": 1, "pool": 2}


def test_following_ends_if_the_mesh_refuses_it_and_goes_on_if_it_is_away(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text="There.", tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    for status, shown in ((503, "The mesh does not answer. Trying again…"), (429, "too many")):
        refuse(page, status, "too many")
        answer = asked(page, f"Wait for {status}")
        answer.get_by_text(shown).wait_for()
        page.unroute_all()
        completed(answer).get_by_text("There.").wait_for()
    refuse(page, 400, "not like this")
    asked(page, "End").get_by_role("alert").get_by_text("not like this").wait_for()


def test_deleted_conversation_leaves_no_task_on_the_mesh(page: "Page", other: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text="Text.", tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    completed(asked(page, "One"))
    page.get_by_role("button", name="Regenerate").click()
    completed(page.get_by_role("article").last)
    other.goto(page.url)
    completed(other.get_by_role("article").last)
    completed(asked(other, "Two"))
    conversation = page.url.rpartition("/")[2]
    gone, *_ = tasks = tasks_of(page, mesh, conversation)
    assert len(tasks) == 3
    page.route(f"**{TASKS}?limit=1000*", lambda route: route.continue_(url=route.request.url.replace("=1000", "=1")))
    page.route(f"**{TASKS}/{gone['id']}*", lambda route: route.fulfill(status=500, json={"error": {"message": "no"}}))
    page.get_by_text("More").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_text("1 of 3 answers could not be deleted from the mesh.").wait_for()
    assert [task["id"] for task in tasks_of(page, mesh, conversation)] == [gone["id"]]


def test_where_conversations_are_kept_is_always_shown(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text="Text.", tokens_per_second=0.0)
    body = {"model": "pool", "messages": [{"role": "user", "content": "Untold"}]}
    about = {"conversation": "chat-untitled", "turn": "turn-1", "column": "0"}
    accepted = page.request.post(f"{mesh.url}{TASKS}", data={"body": {**body, "metadata": about}})
    assert accepted.ok, accepted.text()
    opened(page, mesh, "chat?model=pool", "Chat")
    page.get_by_text("From other browsers").click()
    page.get_by_role("link", name="Untitled").click()
    completed(page.get_by_role("article").last)
    for number in range(8):
        opened(page, mesh, "chat?model=pool", "Chat")
        completed(asked(page, f"Number {number}"))
    page.get_by_role("searchbox", name="Search conversations").fill("number 3")
    expect(page.get_by_role("complementary", name="Conversations").get_by_role("link")).to_have_count(1)
    expect(page.get_by_text("prompts and answers on the mesh too, by default for 7 days")).to_be_visible()


def test_failed_attempt_is_told_with_its_cause_and_the_time_of_the_next(page: "Page", mesh: MeshProcess) -> None:
    """For 15 s and four failures the page said that it waits for the first token."""
    behave(mesh, "a", status=500, status_body='{"error": {"message": "the kernel was lost", "code": 500}}')
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Fail")
    wait = answer.locator(".wait")
    expect(wait).to_contain_text(re.compile(r"Attempt 1 of 2 failed: the engine answered 500: .*\. Next try in \d s\."))
    picture(page, "chat-retry")
    expect(answer.get_by_role("alert")).to_contain_text("the engine answered 500")
    answer.get_by_role("button", name="Retry").click()
    answer.get_by_role("button", name="Stop trying").click()
    answer.get_by_text("Stopped.").wait_for()

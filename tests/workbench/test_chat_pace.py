"""The pace of an answer in the chat: tokens as they arrive, their rate, the elapsed time and the time it thinks."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chat_steps import asked, behave
from mesh_process import MeshProcess
from pages import expect, finished, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

PACE = re.compile(r"(\d+) s · (\d+) tokens · ([\d.]+) tokens/s")


@pytest.fixture(autouse=True)
def usual_model(mesh: MeshProcess) -> Iterator[None]:
    yield
    finished(mesh.reset("a"))


def pace_of(answer: "Locator", token: int) -> tuple[int, float]:
    """The tokens and the rate of an answer once it has that token and its rate is shown."""
    answer.get_by_text(f"tok{token} ").wait_for()
    pace = answer.locator(".pace")
    expect(pace).to_have_text(PACE)
    found = PACE.search(pace.inner_text())
    assert found
    return int(found[2]), float(found[3])


def test_pace_counts_the_tokens_that_arrive_and_none_that_are_repeated(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", tokens_per_second=20.0, answer_tokens=0)
    opened(page, mesh, "chat?model=pool", "Chat")
    tokens, rate = pace_of(asked(page, "Count"), 60)
    assert tokens >= 60
    assert rate <= 40
    picture(page, "chat-pace")
    expect(page.get_by_role("button", name="Stop")).to_have_count(1)
    page.reload()
    tokens, rate = pace_of(page.get_by_role("article").last, 80)
    assert tokens >= 80
    assert rate <= 40
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()


def test_thinking_time_is_shown_while_it_thinks_and_afterwards(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", tokens_per_second=10.0, answer_tokens=5, reasoning_text="so " * 25)
    opened(page, mesh, "chat?model=pool", "Chat")
    thinking = asked(page, "Think").locator(".thinking summary")
    expect(thinking).to_have_text(re.compile(r"^Thinking… \d s$"))
    expect(thinking).to_have_text(re.compile(r"^Thinking · \d\.\d s$"))


def test_silent_engine_has_no_rate_but_the_time_of_its_silence(page: "Page", mesh: MeshProcess) -> None:
    """A rate of 20 tokens/s was shown for a minute without a token."""
    behave(mesh, "a", tokens_per_second=20.0, answer_tokens=0, stall_after_tokens=40)
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Count")
    expect(answer.locator(".pace")).to_have_text(PACE)
    answer.get_by_text("tok39").wait_for()
    expect(answer.locator(".pace")).to_have_text(re.compile(r"^\d+ s · 40 tokens · no token for \d+ s$"))
    page.get_by_role("button", name="Stop", exact=True).click()

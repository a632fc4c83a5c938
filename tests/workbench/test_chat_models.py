"""The chat with what a mesh has: agents with tools and signals, routes, aliases, sleeping models, keys."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chat_steps import asked, until_idle
from kit.demo_answers import WITHOUT_END
from mesh_process import MeshProcess, fake_runner, run_weft, running_mesh, write_config
from pages import expect, finished, opened, picture

from weft_app.compose.demo import DEMO_MODEL, demo_runner_document

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

DECISION = {"question": "Which <b>shard</b>?", "options": ["a", "b"]}
TURNS = [
    {"calls": [{"name": "desk_echo", "arguments": '{"text": "<img src=x onerror=alert(1)>"}'}]},
    {"text": "Before I go on: ", "calls": [{"name": "NEEDS_MANAGER_DECISION", "arguments": json.dumps(DECISION)}]},
]
AGENT = {
    "name": "clerk",
    "model": "m-a",
    "description": "Looks <script>things</script> up",
    "tools": ["desk.echo"],
    "signals": ["NEEDS_MANAGER_DECISION"],
}
TIRELESS = {
    "name": "counter",
    "model": DEMO_MODEL,
    "default_params": {**WITHOUT_END, "max_tokens": 4096},
    "repetition": "off",
}
"""The real model without the tokens that end its answers: it writes on until it is stopped."""
DECLARED = """
kind: route
name: usual
candidates: [pool, other]
---
kind: alias
name: fast
pattern: gpt-fast
target: route/usual
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """An agent with a tool and a signal, a route, an alias, and a model that wakes slowly."""
    folder = tmp_path_factory.mktemp("chat-models")
    argv = [sys.executable, "-m", "weft_testing.fake_mcp_server", "--bare"]
    desk = {"type": "mcp_command", "name": "desk", "argv": argv}
    runner = {**fake_runner("a", turns=TURNS), "tools": [desk], "agents": [AGENT]}
    config = write_config(folder, runner, fake_runner("b", pool="other", load_seconds=2, text="Awake."))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        code, _, err = finished(run_weft("apply", "-f", "-", home=mesh.home, stdin=DECLARED.encode()))
        assert code == 0, err
        yield mesh


def test_agent_tools_and_signals_appear_in_order_in_its_answer(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=agent/clerk", "Chat")
    answer = asked(page, "Delete a shard")
    expect(answer.locator(".receipt")).to_contain_text("completed")
    shown = answer.locator(".notice-part, .markdown")
    expect(shown).to_have_count(3)
    expect(shown.nth(0)).to_contain_text("Tool desk.echo done")
    expect(shown.nth(1)).to_have_text("Before I go on:")
    expect(shown.nth(2)).to_contain_text("Signal NEEDS_MANAGER_DECISION")
    shown.nth(0).locator("summary").click()
    expect(shown.nth(0)).to_contain_text('"text": "<img src=x onerror=alert(1)>"')
    shown.nth(2).locator("summary").click()
    expect(shown.nth(2)).to_contain_text("Which <b>shard</b>?")
    assert answer.locator("img, b").count() == 0
    picture(page, "chat-agent")
    answer.locator(".receipt summary").click()
    answer.locator(".receipt").get_by_role("link").click()
    tokens = page.get_by_role("list", name="Timeline").get_by_role("listitem").filter(has_text="Tokens")
    tokens.get_by_text("1 tool call", exact=False).wait_for()
    tool = page.get_by_role("list", name="Timeline").get_by_role("listitem").filter(has_text="Tool desk.echo")
    expect(tool.locator(".value")).to_have_text(re.compile(r"[\d.]+ m?s"))
    picture(page, "request-tools")


def test_chat_models_are_searchable_by_name_and_selectable_by_keyboard(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat", "Chat")
    field = page.get_by_role("combobox", name="Model")
    expect(field).not_to_have_value("")
    field.click()
    options = page.get_by_role("listbox", name="Model").get_by_role("option")
    for name in ("pool", "other", "agent/clerk", "route/usual", "gpt-fast"):
        options.filter(has=page.locator(".name", has_text=name)).first.wait_for()
    options.filter(has_text="Looks <script>things</script> up").wait_for()
    picture(page, "chat-picker")
    field.fill("usual rout")
    expect(options).to_have_count(1)
    field.fill("o")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    field.fill("gpt")
    page.keyboard.press("Enter")
    expect(field).to_have_value("gpt-fast")
    field.click()
    field.fill("nobody/knows-this")
    page.get_by_text("Enter asks for").wait_for()
    page.keyboard.press("Escape")
    expect(field).to_have_value("gpt-fast")
    answer = asked(page, "Through an alias to a route")
    answer.get_by_text("The answer is empty.").wait_for()
    expect(answer.locator(".receipt")).to_contain_text("completed")


def test_typed_name_is_taken_on_leaving_the_field_and_is_the_next_choice(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat", "Chat")
    field = page.get_by_role("combobox", name="Model")
    expect(field).not_to_have_value("")
    for typed, chosen in (("other", "other"), ("oth", "other"), ("not/known", "not/known"), ("pool", "pool")):
        field.fill(typed)
        page.keyboard.press("Tab")
        expect(field).to_have_value(chosen)
    answer = asked(page, "Who are you?")
    answer.get_by_role("heading", name="pool").wait_for()
    opened(page, mesh, "chat?model=m-b", "Chat")
    opened(page, mesh, "chat", "Chat")
    expect(field).to_have_value("pool")


def test_sleeping_model_is_marked_and_shows_that_it_loads(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=other", "Chat")
    code, _, err = finished(run_weft("unload", "m-b", home=mesh.home))
    assert code == 0, err
    page.locator(".picker .state").get_by_text("hibernating").wait_for()
    page.get_by_role("textbox", name="Message").fill("word " * 1000)
    page.get_by_text("other is not loaded, so its tokens are not counted.").wait_for()
    expect(page.locator(".picker .state").get_by_text("hibernating")).to_be_visible()
    answer = asked(page, "Wake up")
    answer.get_by_text("Loading the model").wait_for()
    picture(page, "chat-loading")
    answer.get_by_text("Awake.").wait_for()
    receipt = answer.locator(".receipt")
    receipt.locator("summary").click()
    expect(receipt).to_contain_text("for loads")
    expect(page.locator(".picker .state")).to_have_count(0)


def test_chat_uses_the_key_and_its_code_reads_it_from_a_variable(
    page: "Page", tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chat-keys")
    config = write_config(folder, fake_runner("a"), auth={"required": True})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        code, out, err = finished(run_weft("keys", "create", "--role", "user", "-o", "json", home=mesh.home))
        assert code == 0, err
        key = json.loads(out)["key"]
        before = until_idle(mesh, "a").requests_finished
        page.goto(f"{mesh.url}/ui/chat?model=pool")
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        answer = asked(page, "Hello")
        expect(answer.locator(".receipt")).to_contain_text("completed")
        answer.get_by_role("button", name="Show as code").click()
        page.get_by_text("The key is read from").wait_for()
        text = page.get_by_role("dialog").locator("pre").inner_text()
        assert key not in text
        done = subprocess.run(
            ["bash", "-c", text], env={**os.environ, "WEFT_API_KEY": key}, capture_output=True, text=True, check=True
        )
        assert "[DONE]" in done.stdout
        assert until_idle(mesh, "a").requests_finished == before + 2


def test_real_model_streams_and_stop_frees_its_slot(page: "Page", tmp_path: Path) -> None:
    runner = demo_runner_document()
    runner["models"][0] |= {"slots": 1, "default_max_tokens": 48}
    config = write_config(tmp_path, {**runner, "agents": [TIRELESS]})
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        opened(page, mesh, "chat?model=agent/counter", "Chat")
        answer = asked(page, "Count from one to one thousand, every number in words.")
        expect(answer.locator(".markdown")).to_contain_text(re.compile(r"\S"), timeout=15_000)
        page.keyboard.press("Escape")
        expect(answer.locator(".receipt")).to_contain_text("cancelled")
        opened(page, mesh, f"chat?model={DEMO_MODEL}", "Chat")
        expect(page.get_by_role("combobox", name="Model")).to_have_value(DEMO_MODEL)
        # The only slot is free again, or this answer would wait.
        answer = asked(page, "Say hello.")
        expect(answer.locator(".receipt")).to_contain_text("completed", timeout=60_000)
        picture(page, "chat-real")


@pytest.mark.parametrize("count", [1, 12])
def test_first_screen_of_a_new_browser_names_its_model_and_its_prompts_are_answered(
    page: "Page", tmp_path: Path, count: int
) -> None:
    """The first screen was drawn before the model was chosen, and never again: its prompts could not be clicked."""
    runner = fake_runner("a")
    runner["models"] = [{**runner["models"][0], "name": f"m-{at:02}", "pool": f"pool-{at:02}"} for at in range(count)]
    with running_mesh(tmp_path / "home", "--config", str(write_config(tmp_path, runner))) as mesh:
        opened(page, mesh, "", "Overview")
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Chat").click()
        page.get_by_role("heading", name=re.compile(r"pool-\d+ ready")).wait_for()
        page.goto(f"{mesh.url}/ui/chat")
        page.get_by_role("heading", name=re.compile(r"pool-\d+ ready")).wait_for()
        page.get_by_role("group", name="Base URL").get_by_text(f"{mesh.url}/v1").wait_for()
        for tool in ("Claude Code", "Codex CLI"):
            expect(page.get_by_role("button", name=tool)).to_be_enabled()
        page.get_by_role("button", name="Write a haiku about rain.").click()
        page.get_by_role("article").get_by_text("tok0").wait_for()

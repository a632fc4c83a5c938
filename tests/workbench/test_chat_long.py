"""Long answers in the chat: drawn block by block, followed while the end is in sight; and what the browser keeps."""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chat_steps import asked, behave
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import expect, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

TOKENS = 20_000
WORDS = "the mesh waits for *memory* and `slots` before **it** answers [all](https://example.org) of them"
BLOCKS = (
    "## About {n}\n\n",
    "{words}\n\n",
    "- {words}\n- {words}\n  1. {words}\n\n",
    "| a | b |\n|---|--:|\n| {words} | {n} |\n\n",
    "> {words}\n> {words}\n\n",
    "```python\nx = {n}\n\n{words}\n```\n\n",
    "{words}\n{words}\n===\n",
    "{words}\r\n\r\n---\r\n",
    "[ref{n}]: https://example.org/{n}\n\nsee [ref{n}] and [ref{n}] and [later]\n\n",
    "    indented {words}\n\n",
    "1. {words}\n\n   {words}\n\n",
    "#\n***\n{words}\n-\n",
)
ENDS = ("", "[later]: https://example.org/later\n", "```js\nopen", "**open [x](", "- a\n-")
DRAW = """async ({texts, seed}) => {
  const folder = document.querySelector("link[rel=icon]").href.replace("icon.svg", "");
  const {h, render, Fragment} = await import("preact");
  const {Blocks} = await import(folder + "app/parts/markdown.js");
  let state = seed;
  const next = (most) => (state = (state * 48271) % 2147483647) % most;
  const drawn = (elements, box) => (render(h(Fragment, null, elements), box), box.innerHTML);
  const different = [];
  for (const text of texts) {
    const whole = drawn(new Blocks().of(text, true), document.createElement("div"));
    const blocks = new Blocks();
    const box = document.createElement("div");
    for (let end = 0; end < text.length; end += 1 + next(12)) drawn(blocks.of(text.slice(0, end), false), box);
    const last = drawn(blocks.of(text, false), box);
    if (last !== whole && !text.includes("later]:")) different.push([text, whole, last]);
    if (drawn(blocks.of(text, true), box) !== whole) different.push([text, whole, box.innerHTML]);
  }
  return different.slice(0, 1);
}"""
WATCH = """() => {
  const box = document.querySelector(".markdown");
  let known = box.children.length;
  window.drawn = {early: 0, times: 0};
  new MutationObserver((records) => {
    window.drawn.times += 1;
    for (const { target, removedNodes } of records) {
      if (target === box) { window.drawn.early += removedNodes.length > 3 ? 1 : 0; continue; }
      let block = target;
      while (block && block.parentNode !== box) block = block.parentNode;
      // A block that is no longer there was one of the last.
      if (block && [...box.children].indexOf(block) < known - 3) window.drawn.early += 1;
    }
    known = box.children.length;
  }).observe(box, {subtree: true, childList: true, characterData: true});
}"""


AT_END = """
async box => {
  const until = performance.now() + 5000;
  const isThere = () => box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  while (!isThere() && performance.now() < until) await new Promise(requestAnimationFrame);
  return isThere();
}
"""
"""Whether a box is scrolled to its end, or gets there by itself: what comes last is scrolled to in a later frame."""


def long_text(tokens: int) -> str:
    """Markdown of about so many words."""
    chance = random.Random(1)
    blocks: list[str] = []
    count = 0
    while count < tokens:
        words = " ".join(chance.choices(WORDS.split(), k=20))
        blocks.append(chance.choice(BLOCKS[:6]).format(n=len(blocks), words=words))
        count += len(blocks[-1].split())
    return "".join(blocks)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A model with a long context."""
    folder = tmp_path_factory.mktemp("chat-long")
    runner = fake_runner("a")
    runner["models"][0]["context_tokens"] = 200_000
    with running_mesh(folder / "home", "--config", str(write_config(folder, runner))) as mesh:
        yield mesh


def test_long_answer_redraws_only_its_last_blocks(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text=long_text(TOKENS), tokens_per_second=2500.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Tell me everything")
    answer.locator(".markdown > *").nth(10).wait_for()
    page.evaluate(WATCH)
    expect(answer.locator(".receipt")).to_contain_text("completed", timeout=60_000)
    drawn = page.evaluate("window.drawn")
    assert drawn["times"] >= 3
    assert drawn["early"] == 0, drawn
    assert page.locator(".turns").evaluate(AT_END)


def test_incremental_rendering_equals_full_rendering(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat", "Chat")
    chance = random.Random(7)
    texts = []
    for number in range(120):
        words = " ".join(chance.choices(WORDS.split(), k=6))
        chosen = "".join(chance.choice(BLOCKS).format(n=number, words=words) for _ in range(6))
        texts.append(chosen + chance.choice(ENDS))
    assert page.evaluate(DRAW, {"texts": texts, "seed": 11}) == []


def test_endless_line_and_endless_block_are_rendered(page: "Page", mesh: MeshProcess) -> None:
    behave(
        mesh,
        "a",
        text="".join(f"{n}x" for n in range(60_000)) + "\n\n```\n" + "".join(f"y = {n}\n" for n in range(10_000)),
        tokens_per_second=0.0,
    )
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Without end")
    expect(answer.locator(".receipt")).to_contain_text("completed", timeout=60_000)
    assert answer.locator("code").inner_text().endswith("y = 9999")


def test_scroll_position_stays_when_scrolled_up_and_can_jump_to_the_end(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text=long_text(4000), tokens_per_second=500.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "At length")
    answer.locator(".markdown > *").nth(20).wait_for()
    box = page.locator(".turns")
    box.evaluate("box => box.scrollTo({top: 0})")
    page.get_by_role("button", name="To the end").wait_for()
    many = answer.locator(".markdown > *").count() + 20
    answer.locator(".markdown > *").nth(many).wait_for(state="attached")
    assert box.evaluate("box => box.scrollTop") == 0
    picture(page, "chat-scrolled")
    page.get_by_role("button", name="To the end").click()
    expect(page.get_by_role("button", name="To the end")).to_have_count(0)
    page.keyboard.press("Escape")
    answer.get_by_text("Stopped.").wait_for()


def test_keys_send_insert_line_breaks_and_stop(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text=None, echo=True, tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    field = page.get_by_role("textbox", name="Message")
    expect(field).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(field).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    expect(field).to_have_value("")
    expect(page.locator(".said")).to_have_text("one\ntwo")
    expect(page.locator(".receipt")).to_contain_text("completed")


def test_oldest_conversations_are_removed_and_the_page_lists_them(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text="Short.", echo=False, tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    expect(asked(page, "The oldest of all").locator(".receipt")).to_contain_text("completed")
    page.evaluate("""async () => {
      const folder = document.querySelector("link[rel=icon]").href.replace("icon.svg", "app/pages/");
      const {keep} = await import(folder + "chat_store.js");
      const {newConversation} = await import(folder + "chat_conversation.js");
      for (let number = 0; number < 200; number += 1) {
        const conversation = newConversation(["pool"]);
        conversation.title = "number " + number;
        conversation.updatedAt = Date.now() + 1000 + number;
        conversation.turns = [{id: "t", text: "x", attachments: [], answers: []}];
        await keep(conversation);
      }
    }""")
    page.get_by_text("This browser stores at most 200 conversations and 50 MB. Removed: The oldest of all.").wait_for()
    listed = page.get_by_role("complementary", name="Conversations").get_by_role("link")
    expect(listed).to_have_count(200)
    page.get_by_role("searchbox", name="Search conversations").fill("number 19")
    expect(listed).to_have_count(11)
    picture(page, "chat-list")
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete all").click()
    expect(listed).to_have_count(0)


def test_answer_continues_while_another_page_is_shown(page: "Page", mesh: MeshProcess) -> None:
    behave(mesh, "a", text=None, answer_tokens=60, echo=False, tokens_per_second=30.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    asked(page, "Go on").get_by_text("tok0 tok1").wait_for()
    navigation = page.get_by_role("navigation", name="Pages")
    navigation.get_by_role("link", name="Overview").click()
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    navigation.get_by_role("link", name="Chat").click()
    answer = page.get_by_role("article").last
    expect(answer).to_have_attribute("aria-busy", "true")
    answer.get_by_text("tok58 tok59").wait_for()
    expect(answer.locator(".receipt")).to_contain_text("completed")

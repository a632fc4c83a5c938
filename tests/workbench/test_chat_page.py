"""The chat of the workbench in a real browser: answers as they come, stopped, asked again, and what models write."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, finished, opened, picture
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

HOSTILE = """<script>document.title = "owned"</script><img src=x onerror="document.title='owned'">
<svg onload="document.title='owned'"><a href="javascript:alert(1)">raw</a>

[script](javascript:alert%281%29) [data](data:text/html;base64,PHNjcmlwdD4=) [own](/ui/keys) [case](JaVaScRiPt:alert(1))
![picture](https://attacker.example/pixel.png) ![code](javascript:alert(1)) <javascript:alert(1)>
[good](https://example.org/a?b=1&c=2) https://example.org/bare

| <b>x</b> | |
|---|---|
| ` <i> ` | [x](vbscript:x) |

**open [open](https:// ```
\u202egnp.exe\u202c `\u202ecode\u2066`
"""


@pytest.fixture(scope="module")
def chat_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Two models of one slot each, whose fakes tests change."""
    folder = tmp_path_factory.mktemp("chat")
    config = write_config(folder, fake_runner("a", slots=1), fake_runner("b", slots=1, pool="other"))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def usual_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """The behaviour of the fakes before and after each test."""
    yield
    if "chat_mesh" in request.fixturenames:
        finished(request.getfixturevalue("chat_mesh").reset("a", "b"))


def behave(mesh: MeshProcess, runner: str, **switches: Any) -> None:
    """Changes the fake behind a runner."""

    async def change() -> None:
        async with await mesh.backend(runner) as backend:
            await backend.set_behaviour(**switches)

    finished(change())


def until_idle(mesh: MeshProcess, runner: str) -> Any:
    """Waits until no slot of the fake is busy; its state."""

    async def wait() -> Any:
        async with await mesh.backend(runner) as backend:
            return await backend.wait_for_state(lambda state: state.busy_slots == 0 and state.active_requests == 0)

    return finished(wait())


def asked(page: "Page", text: str) -> "Locator":
    """Sends a message; the answer to it."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    page.locator(".said", has_text=text).wait_for()
    return page.get_by_role("article").last


def test_an_answer_comes_in_pieces_and_has_its_receipt(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", tokens_per_second=20.0, answer_tokens=20, reasoning_text="First I think. ")
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Hello")
    answer.get_by_text("tok0 tok1").wait_for()
    expect(answer).to_have_attribute("aria-busy", "true")
    answer.get_by_text("tok18 tok19").wait_for()
    expect(answer).to_have_attribute("aria-busy", "false")
    answer.get_by_text("Thinking").click()
    answer.get_by_text("First I think.").wait_for()
    receipt = answer.locator(".receipt")
    expect(receipt.locator("summary")).to_contain_text("completed")
    receipt.locator("summary").click()
    expect(receipt).to_contain_text("m-a on a")
    expect(receipt).to_contain_text("Left the premisesno")
    assert re.search(r"/ui/requests/req-[0-9a-f]{24}$", receipt.get_by_role("link").get_attribute("href") or "")
    picture(page, "chat")


def test_a_stopped_answer_keeps_what_came_and_frees_its_slot(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", tokens_per_second=20.0, answer_tokens=0)
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Count without end")
    answer.get_by_text("tok0 tok1 tok2").wait_for()
    page.keyboard.press("Escape")
    answer.get_by_text("Stopped.").wait_for()
    expect(answer).to_contain_text("tok0 tok1 tok2")
    expect(answer.locator(".receipt")).to_contain_text("cancelled")
    assert until_idle(chat_mesh, "a").requests_cancelled >= 1
    behave(chat_mesh, "a", text="Again.", tokens_per_second=0.0)
    answer.get_by_role("button", name="Retry").click()
    page.get_by_role("article").last.get_by_text("Again.").wait_for()


def test_what_it_waits_for_is_shown_while_it_waits(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", tokens_per_second=20.0, answer_tokens=0)
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    first = asked(page, "One")
    first.get_by_text("tok0 tok1").wait_for()
    other = page.context.new_page()
    opened(other, chat_mesh, "chat?model=pool", "Chat")
    second = asked(other, "Two")
    second.get_by_text("Waiting, position 1").wait_for()
    picture(other, "chat-waiting")
    page.get_by_role("button", name="Stop", exact=True).last.click()
    second.get_by_text("tok0 tok1").wait_for()
    other.keyboard.press("Escape")
    expect(second.locator(".receipt")).to_contain_text("cancelled")


def test_an_engine_that_dies_leaves_what_came_and_the_typed_error(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "b", crash_after_tokens=5, fail_times=1, tokens_per_second=50.0)
    opened(page, chat_mesh, "chat?model=other", "Chat")
    answer = asked(page, "Die on the way")
    answer.get_by_role("alert").get_by_text("server_died").wait_for()
    expect(answer).to_contain_text("tok0 tok1 tok2 tok3 tok4")
    expect(answer.locator(".receipt")).to_contain_text("failed")
    answer.get_by_role("button", name="Retry").click()
    page.get_by_role("article").last.get_by_text("tok14 tok15").wait_for()


def test_an_unknown_model_is_refused_in_the_words_of_the_server(page: "Page", chat_mesh: MeshProcess) -> None:
    opened(page, chat_mesh, "chat?model=m-x", "Chat")
    answer = asked(page, "Hello?")
    answer.get_by_role("alert").get_by_text("there is no model, pool, agent or route m-x").wait_for()


def test_nothing_that_a_model_writes_becomes_code_or_leads_elsewhere_unseen(
    page: "Page", chat_mesh: MeshProcess
) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    behave(chat_mesh, "a", text=HOSTILE, reasoning_text=HOSTILE)
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    answer = asked(page, HOSTILE.splitlines()[0])
    expect(answer.locator(".receipt")).to_contain_text("completed")
    answer.locator(".thinking summary").click()
    assert page.title() == "Chat · weft"
    links = answer.locator("a:not([href^='/ui/requests/'])")
    found = links.evaluate_all("links => links.map((a) => [a.getAttribute('href'), a.rel, a.target])")
    addresses = {"https://example.org/a?b=1&c=2", "https://example.org/bare", "https://attacker.example/pixel.png"}
    assert {href for href, _, _ in found} == addresses
    assert {(rel, target) for _, rel, target in found} == {("noopener noreferrer", "_blank")}
    assert answer.locator("script, img, svg, iframe, object, style, b, i").count() == 0
    expect(answer).to_contain_text('<script>document.title = "owned"</script>')
    expect(answer).to_contain_text("⟦U+202E⟧gnp.exe")
    assert all(url.startswith(chat_mesh.url) for url in requests), requests


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_chat_has_no_accessibility_faults(
    browser: "Browser", chat_mesh: MeshProcess, theme: str, width: int
) -> None:
    behave(chat_mesh, "a", text=HOSTILE + "\n\n# One\n\n```python\nx = 1\n```", reasoning_text="Think.")

    def chatted(page: "Page") -> None:
        expect(asked(page, "Hello").locator(".receipt")).to_contain_text("completed")

    url = f"{chat_mesh.url}/ui/chat?model=pool"
    assert not accessibility_faults(browser, url, theme=theme, width=width, after=chatted)


def test_on_a_phone_nothing_is_wider_than_the_page(page: "Page", chat_mesh: MeshProcess) -> None:
    wide = "x" * 3000 + "\n\n| a | b | c | d | e |\n|-|-|-|-|-|\n" + "| " + " | ".join(["y" * 40] * 5) + " |\n\n"
    behave(chat_mesh, "a", text=wide + "```\n" + "z" * 500 + "\n```\n", tokens_per_second=0.0)
    page.set_viewport_size({"width": 390, "height": 800})
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    expect(asked(page, "Wide").locator(".receipt")).to_contain_text("completed")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".turns").evaluate("box => box.scrollWidth <= box.clientWidth")
    picture(page, "chat-390")

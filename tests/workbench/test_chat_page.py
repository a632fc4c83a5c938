"""The chat of the workbench in a real browser: answers as they come, stopped, asked again, and what models write."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from chat_steps import asked, behave, until_idle
from google.protobuf import json_format
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, expect, finished, opened, picture

from weft.api.router.v1.inference_service_pb2 import ChatRequest
from weft_testing.media_files import png, wav

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
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


def test_first_screen_has_a_ready_model_example_prompts_and_how_to_connect(
    page: "Page", chat_mesh: MeshProcess
) -> None:
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    page.get_by_role("heading", name="pool ready").wait_for()
    page.get_by_role("group", name="Base URL").get_by_text(f"{chat_mesh.url}/v1").wait_for()
    page.get_by_role("button", name="Claude Code").click()
    page.get_by_text("weft launch claude --model pool").wait_for()
    picture(page, "chat-welcome")
    page.get_by_role("button", name="Write a haiku about rain.").click()
    page.get_by_role("article").get_by_text("tok0").wait_for()


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_first_screen_has_no_accessibility_violations(
    browser: "Browser", chat_mesh: MeshProcess, theme: str, width: int
) -> None:
    def ready(page: "Page") -> None:
        page.get_by_role("button", name="Claude Code").click()
        page.get_by_text("weft launch claude").wait_for()
        picture(page, f"chat-welcome-{theme}-{width}")

    url = f"{chat_mesh.url}/ui/chat?model=pool"
    assert not accessibility_faults(browser, url, theme=theme, width=width, after=ready)


def test_answer_streams_and_shows_its_receipt(page: "Page", chat_mesh: MeshProcess) -> None:
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
    expect(receipt).to_contain_text("Sent to a remote providerno")
    assert re.search(r"/ui/requests/task-[0-9a-f]{24}$", receipt.get_by_role("link").get_attribute("href") or "")
    picture(page, "chat")


def test_stopped_answer_keeps_its_text_and_frees_its_slot(page: "Page", chat_mesh: MeshProcess) -> None:
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


def test_queue_position_is_shown_while_waiting(page: "Page", chat_mesh: MeshProcess) -> None:
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


def test_engine_out_of_memory_keeps_the_partial_answer_and_shows_the_error(
    page: "Page", chat_mesh: MeshProcess
) -> None:
    behave(chat_mesh, "b", out_of_memory_after_tokens=5, fail_times=1, tokens_per_second=50.0)
    opened(page, chat_mesh, "chat?model=other", "Chat")
    answer = asked(page, "Die on the way")
    answer.get_by_role("alert").get_by_text("out_of_memory").wait_for()
    expect(answer).to_contain_text("tok0 tok1 tok2 tok3 tok4")
    expect(answer.locator(".receipt")).to_contain_text("failed")
    answer.get_by_role("button", name="Retry").click()
    page.get_by_role("article").last.get_by_text("tok14 tok15").wait_for()


def test_unknown_model_shows_the_server_error(page: "Page", chat_mesh: MeshProcess) -> None:
    opened(page, chat_mesh, "chat?model=m-x", "Chat")
    answer = asked(page, "Hello?")
    answer.get_by_role("alert").get_by_text("there is no model, pool, agent, route or workflow m-x").wait_for()


def test_model_output_never_runs_as_code_or_hides_a_link_target(page: "Page", chat_mesh: MeshProcess) -> None:
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


def test_model_names_are_rendered_as_text_everywhere(page: "Page", chat_mesh: MeshProcess) -> None:
    name = "<img src=x onerror=document.title='owned'>"
    page.goto(f"{chat_mesh.url}/ui/chat?{urlencode({'model': name})}")
    expect(page.get_by_role("combobox", name="Model")).to_have_value(name)
    answer = asked(page, "Hello?")
    answer.get_by_role("heading", name=name).wait_for()
    answer.get_by_role("alert").wait_for()
    assert page.locator(".chat img").count() == 0
    assert page.title() == "Chat · weft"


def test_receipt_falls_back_to_the_stream_if_the_request_record_is_unavailable(
    page: "Page", chat_mesh: MeshProcess
) -> None:
    page.route("**/v1/requests/*", lambda route: route.fulfill(status=403, json={"error": {"message": "no"}}))
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    receipt = asked(page, "Hello").locator(".receipt")
    expect(receipt).to_contain_text("16 out")
    expect(receipt).to_contain_text("not sent to a remote provider")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_chat_has_no_accessibility_violations(
    browser: "Browser", chat_mesh: MeshProcess, theme: str, width: int
) -> None:
    behave(chat_mesh, "a", text=HOSTILE + "\n\n# One\n\n```python\nx = 1\n```", reasoning_text="Think.")

    def chatted(page: "Page") -> None:
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("button", name="Options").click()
        expect(asked(page, "Hello").locator(".receipt")).to_contain_text("completed")

    url = f"{chat_mesh.url}/ui/chat?model=pool"
    assert not accessibility_faults(browser, url, theme=theme, width=width, after=chatted)


def test_chat_fits_a_phone_screen(page: "Page", chat_mesh: MeshProcess) -> None:
    wide = "x" * 3000 + "\n\n| a | b | c | d | e |\n|-|-|-|-|-|\n" + "| " + " | ".join(["y" * 40] * 5) + " |\n\n"
    behave(chat_mesh, "a", text=wide + "```\n" + "z" * 500 + "\n```\n", tokens_per_second=0.0)
    page.set_viewport_size({"width": 390, "height": 800})
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    expect(asked(page, "Wide").locator(".receipt")).to_contain_text("completed")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".turns").evaluate("box => box.scrollWidth <= box.clientWidth")
    picture(page, "chat-390")


def test_message_can_be_edited_and_resent(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", echo=True)
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    asked(page, "first question").get_by_text("first question").wait_for()
    asked(page, "second question").get_by_text("second question").wait_for()
    turn = page.get_by_role("region", name="Message 1")
    turn.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_role("textbox", name="Edited message").fill("better question")
    page.keyboard.press("Enter")
    page.get_by_role("article").get_by_text("better question").wait_for()
    assert page.get_by_role("article").count() == 1
    body = until_idle(chat_mesh, "a").last_request_body
    assert [message["content"] for message in body["messages"]] == ["better question"]


def test_message_includes_history_options_and_system_prompt(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", text="An answer.", reasoning_text="Thoughts.")
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    page.get_by_role("button", name="Options").click()
    page.get_by_role("textbox", name="System prompt").fill("Be terse.")
    page.get_by_role("spinbutton", name="Temperature").fill("0.5")
    page.get_by_role("spinbutton", name="Max tokens").fill("50")
    page.get_by_role("combobox", name="Thinking").select_option("off")
    asked(page, "One").get_by_text("An answer.").wait_for()
    asked(page, "Two").get_by_text("An answer.").wait_for()
    picture(page, "chat-options")
    body = until_idle(chat_mesh, "a").last_request_body
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("system", "Be terse."),
        ("user", "One"),
        ("assistant", "An answer."),
        ("user", "Two"),
    ]
    assert (body["temperature"], body["max_tokens"]) == (0.5, 50)


def test_two_models_answer_side_by_side(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", text="The answer of a.")
    behave(chat_mesh, "b", text="The answer of b.")
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("combobox", name="Second model")).to_have_value("other")
    asked(page, "Who are you?")
    answers = page.get_by_role("article")
    expect(answers).to_have_count(2)
    expect(answers.nth(0)).to_contain_text("The answer of a.")
    expect(answers.nth(1)).to_contain_text("The answer of b.")
    expect(answers.nth(1).locator(".receipt")).to_contain_text("completed")
    asked(page, "Each of you: again")
    expect(answers).to_have_count(4)
    expect(answers.nth(3).locator(".receipt")).to_contain_text("completed")
    body = until_idle(chat_mesh, "b").last_request_body
    assert [message["content"] for message in body["messages"]][1] == "The answer of b."
    picture(page, "chat-compare")


def test_conversation_survives_a_reload_and_can_be_renamed_exported_deleted_and_imported(
    page: "Page", chat_mesh: MeshProcess, tmp_path: Path
) -> None:
    behave(chat_mesh, "a", text="Kept *well*.")
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    expect(asked(page, "Keep this").locator(".receipt")).to_contain_text("completed")
    page.reload()
    page.get_by_role("article").get_by_text("Kept well.").wait_for()
    expect(page.locator(".receipt")).to_contain_text("completed")
    page.get_by_text("More").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("textbox", name="Title").fill("A <b>name</b>")
    page.keyboard.press("Enter")
    listed = page.get_by_role("complementary", name="Conversations")
    listed.get_by_role("link", name="A <b>name</b>").wait_for()
    page.get_by_text("More").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    assert json.loads(path.read_text())["conversations"][0]["turns"][0]["text"] == "Keep this"
    page.get_by_text("More").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(listed.get_by_role("link")).to_have_count(0)
    expect(page.get_by_role("article")).to_have_count(0)
    page.locator("input[type=file][accept*=json]").set_input_files(path)
    listed.get_by_role("link", name="A <b>name</b>").click()
    page.get_by_role("article").get_by_text("Kept well.").wait_for()


def test_pending_receipt_is_fetched_after_a_reload(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", text="Kept well.")
    page.route("**/v1/requests/*", lambda route: route.abort())
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    expect(asked(page, "Keep this").locator("p.receipt")).to_contain_text("tokens in")
    page.unroute("**/v1/requests/*")
    page.reload()
    expect(page.get_by_role("article").locator(".receipt")).to_contain_text("completed")


def test_file_without_conversations_is_rejected_and_error_names_it(
    page: "Page", chat_mesh: MeshProcess, tmp_path: Path
) -> None:
    opened(page, chat_mesh, "chat", "Chat")
    chooser = page.locator("input[type=file][accept*=json]")
    wrong = [("no.json", "{", "not JSON"), ("other.json", '{"kind": "x"}', "contains no conversations")]
    for name, text, words in wrong:
        (tmp_path / name).write_text(text)
        chooser.set_input_files(tmp_path / name)
        page.get_by_text(words).wait_for()
    odd = {
        "kind": "weft-conversations",
        "conversations": [None, {"turns": [{"answers": [{"parts": [{"kind": "x"}, 5]}]}]}],
    }
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    chooser.set_input_files(tmp_path / "odd.json")
    page.get_by_text("2 conversations imported.").wait_for()


def test_images_and_recordings_are_sent_with_a_message(page: "Page", chat_mesh: MeshProcess) -> None:
    behave(chat_mesh, "a", text="I see.")
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    given: list[Any] = [
        {"name": "cat.png", "mimeType": "image/png", "buffer": png(1600, 20)},
        {"name": "word.wav", "mimeType": "audio/wav", "buffer": wav(seconds=0.2)},
    ]
    page.locator("input[type=file][accept*='image']").set_input_files(given)
    files = page.get_by_role("list", name="Files")
    files.get_by_text("1600 x 20").wait_for()
    files.get_by_role("button", name="Make smaller").click()
    files.get_by_text("1024 x 13").wait_for()
    answer = asked(page, "What is this?")
    answer.get_by_text("I see.").wait_for()
    page.get_by_role("img", name="cat.png").wait_for()
    parts = until_idle(chat_mesh, "a").last_request_body["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "input_audio"]
    page.locator("input[type=file][accept*='image']").set_input_files(
        {"name": "a.bin", "mimeType": "application/octet-stream", "buffer": b"\x00"}
    )
    page.get_by_text("a.bin is not a text file, a PDF, an image or a recording.").wait_for()
    picture(page, "chat-files")


def test_rejected_file_shows_the_server_error(page: "Page", chat_mesh: MeshProcess) -> None:
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    page.locator("input[type=file][accept*='image']").set_input_files(
        {"name": "drawing.svg", "mimeType": "image/svg+xml", "buffer": b"<svg xmlns='http://www.w3.org/2000/svg'/>"}
    )
    answer = asked(page, "A drawing")
    answer.get_by_role("alert").get_by_text("image").wait_for()


def code_of(answer: "Locator", language: str) -> str:
    """Code in a language, as the page shows it."""
    page = answer.page
    answer.get_by_role("button", name="Show as code").click()
    page.get_by_role("button", name=language, exact=True).click()
    text: str = page.get_by_role("dialog").locator("pre").inner_text()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    return text


def ran(command: list[str], mesh: MeshProcess, folder: Path) -> str:
    """What a program prints that is started in a folder with the key and the addresses in its environment."""
    environment = {**os.environ, "WEFT_HOME": str(mesh.home), "WEFT_ROUTER": mesh.grpc, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shown_code_runs_as_curl_python_and_grpc(page: "Page", chat_mesh: MeshProcess, tmp_path: Path) -> None:
    question = 'It\'s $HOME, `id`, \\n "quoted" and 100 % ünïcode?'
    behave(chat_mesh, "a", echo=True)
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    page.get_by_role("button", name="Options").click()
    page.get_by_role("spinbutton", name="Temperature").fill("0.5")
    answer = asked(page, question)
    expect(answer.locator(".receipt")).to_contain_text("completed")
    sent = until_idle(chat_mesh, "a").last_request_body
    for language, command in (
        ("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"]), ("gRPC, Python", [sys.executable, "-c"])
    ):  # fmt: skip
        output = ran([*command, code_of(answer, language)], chat_mesh, tmp_path)
        said = "".join(
            choice["delta"].get("content") or ""
            for line in output.splitlines()
            if line.startswith("data: {")
            for choice in json.loads(line.removeprefix("data: "))["choices"]
        )
        assert (said or output.rstrip("\n")) == question, language
        again = until_idle(chat_mesh, "a").last_request_body
        assert (again["messages"], again["temperature"]) == (sent["messages"], 0.5)
    text = code_of(answer, "grpcurl")
    request = json_format.Parse(text.split("<<'END'\n")[1].removesuffix("\nEND"), ChatRequest())
    assert request.payload.messages[0].content[0].text == question
    answer.get_by_role("button", name="Show as code").click()
    page.get_by_role("dialog").locator("pre").wait_for()
    picture(page, "chat-code")


def test_shown_code_reads_attachments_from_the_folder(page: "Page", chat_mesh: MeshProcess, tmp_path: Path) -> None:
    name = "it's a $(cat).png"
    (tmp_path / name).write_bytes(png(3, 2))
    opened(page, chat_mesh, "chat?model=pool", "Chat")
    page.locator("input[type=file][accept*='image']").set_input_files(tmp_path / name)
    answer = asked(page, "What is `this`, for $5?")
    expect(answer.locator(".receipt")).to_contain_text("completed")
    sent = until_idle(chat_mesh, "a").last_request_body["messages"]
    for language, command in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
        ran([*command, code_of(answer, language)], chat_mesh, tmp_path)
        assert until_idle(chat_mesh, "a").last_request_body["messages"] == sent, language
    shell = code_of(answer, "grpcurl")
    text = ran(["bash", "-c", "cat" + shell[shell.index(" <<END") :]], chat_mesh, tmp_path)
    image = json_format.Parse(text, ChatRequest()).payload.messages[0].content[1].image
    assert (image.data, image.media_type) == (png(3, 2), "image/png")


def test_message_written_before_the_page_is_complete_stays(page: "Page", mesh: MeshProcess) -> None:
    """The page then began another conversation, and what had been written in the first was lost."""
    page.add_init_script(
        """new MutationObserver((_, observer) => {
          const field = document.querySelector("textarea");
          if (!field) return;
          observer.disconnect();
          field.value = "a draft";
          field.dispatchEvent(new Event("input", { bubbles: true }));
        }).observe(document, { childList: true, subtree: true });"""
    )
    opened(page, mesh, "chat", "Chat")
    expect(page.get_by_role("combobox", name="Model")).not_to_have_value("")
    assert page.get_by_role("textbox", name="Message").input_value() == "a draft"

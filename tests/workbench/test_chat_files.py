"""Files in the chat: text, code, CSV, JSON and PDF by button, drop and paste, and what does not fit the context."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from chat_steps import asked, behave, until_idle
from kit.pdf_files import pdf
from mesh_process import MeshProcess
from pages import accessibility_faults, expect, finished, opened, picture

from weft_testing.media_files import png

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

CODE = "print('''\n```\n''')"
HOSTILE_NAME = """<img src=x onerror="document.title='owned'">.json"""
HOSTILE_TEXT = "<script>document.title='owned'</script>"
MESSAGE = f"""File "sum.py":
````
{CODE}
````

File "table.csv":
```
a;b
```

File "<img src=x onerror=\\"document.title='owned'\\">.json":
```
{{}}
```

What is this?"""


@pytest.fixture(autouse=True)
def usual_model(mesh: MeshProcess) -> Iterator[None]:
    behave(mesh, "a", text="I see.", tokens_per_second=0.0)
    yield
    finished(mesh.reset("a"))


def given(page: "Page", name: str, content: bytes, kind: str = "text/plain") -> None:
    """Chooses a file by the button."""
    file: Any = {"name": name, "mimeType": kind, "buffer": content}
    page.locator("input[type=file][aria-label='Files to attach']").set_input_files(file)


def transferred(page: "Page", event: str, name: str, text: str) -> None:
    """Drops or pastes a file."""
    page.evaluate(
        """([event, name, text]) => {
          const data = new DataTransfer();
          data.items.add(new File([text], name));
          const field = document.querySelector(".composer textarea");
          const how = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
          field.dispatchEvent(event === "drop" ? new DragEvent(event, how) : new ClipboardEvent(event, how));
        }""",
        [event, name, text],
    )


def test_text_files_are_sent_with_their_names_and_found_again_elsewhere(
    browser: "Browser", page: "Page", mesh: MeshProcess
) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    files = page.get_by_role("list", name="Files").get_by_role("listitem")
    given(page, "sum.py", CODE.encode(), "text/x-python")
    expect(files).to_have_count(1)
    transferred(page, "drop", "table.csv", "a;b")
    expect(files).to_have_count(2)
    transferred(page, "paste", HOSTILE_NAME, "{}")
    expect(files).to_have_count(3)
    expect(files.last).to_contain_text(HOSTILE_NAME)
    expect(asked(page, "What is this?").locator(".receipt")).to_contain_text("completed")
    assert until_idle(mesh, "a").last_request_body["messages"][0]["content"] == MESSAGE
    other = browser.new_context().new_page()
    other.goto(page.url)
    for tab in (page, other):
        sent = tab.locator(".text-file")
        expect(sent).to_have_count(3)
        sent.first.locator("summary").click()
        assert sent.first.locator("pre").inner_text() == CODE
        expect(sent.last.locator("summary")).to_contain_text(HOSTILE_NAME)
        expect(tab.locator(".said")).to_have_text("What is this?")
        assert tab.title() == "Chat · weft"
    picture(page, "chat-text-files")
    other.context.close()


def test_tokens_are_counted_and_what_does_not_fit_is_reported_before_sending(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    given(page, "small.txt", b"one two three")
    fits = page.locator(".fits")
    expect(fits).to_contain_text("of 2,048 tokens")
    expect(fits).to_contain_text("small.txt: 3")
    given(page, "large.txt", b" ".join([b"word"] * 3000))
    expect(fits).to_contain_text("The message does not fit pool")
    expect(fits).to_contain_text("the context 2,048. small.txt: 3, large.txt: 3,000")
    picture(page, "chat-does-not-fit")
    given(page, "cat.png", png(3, 2), "image/png")
    page.get_by_role("button", name="Remove large.txt").click()
    expect(fits).to_contain_text("tokens without images and recordings")
    page.get_by_role("button", name="Remove small.txt").click()
    page.get_by_role("button", name="Remove cat.png").click()
    expect(fits).to_be_empty()
    page.get_by_role("textbox", name="Message").fill("word " * 3000)
    expect(fits).to_contain_text("The message does not fit pool")


def test_tokens_are_counted_again_for_another_model_and_system_prompt(page: "Page", mesh: MeshProcess) -> None:
    """The count was that of the model chosen before."""
    opened(page, mesh, "chat?model=pool", "Chat")
    given(page, "small.txt", b"one two three")
    fits = page.locator(".fits")
    expect(fits).to_contain_text("pool: ")
    page.get_by_role("combobox", name="Model").click()
    page.get_by_role("option", name="other").click()
    expect(fits).to_contain_text("other: ")
    before = fits.text_content() or ""
    page.get_by_role("button", name="Options").click()
    page.get_by_role("textbox", name="System prompt").fill("word " * 40)
    expect(fits).to_contain_text("small.txt: 3")
    expect(fits).not_to_have_text(before)


def test_model_that_counts_no_tokens_is_not_asked_for_them(page: "Page", mesh: MeshProcess) -> None:
    """Each attached file was a failed request of the tenant."""

    def without_tokenize(route: "Route") -> None:
        answer = route.fetch()
        found = answer.json()
        for each in found["data"]:
            each["meta"]["operations"].remove("tokenize")
        route.fulfill(response=answer, json=found)

    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(urlsplit(request.url).path))
    page.route("**/v1/models", without_tokenize)
    opened(page, mesh, "chat?model=pool", "Chat")
    given(page, "small.txt", b"one two three")
    asked(page, "What?").get_by_text("I see.").wait_for()
    assert "/v1/tokenize" not in asked_for


def test_file_that_is_no_text_is_refused(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    given(page, "a.bin", b"\x00\x01", "application/octet-stream")
    page.get_by_text("a.bin is not a text file, a PDF, an image or a recording.").wait_for()


def test_pdf_is_sent_as_its_text_which_runs_no_code(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    given(page, HOSTILE_NAME.replace(".json", ".pdf"), pdf("Total: 42 EUR", HOSTILE_TEXT), "application/pdf")
    expect(page.locator(".fits")).to_contain_text("of 2,048 tokens")
    asked(page, "What is this?").get_by_text("I see.").wait_for()
    sent = until_idle(mesh, "a").last_request_body["messages"][0]["content"]
    assert f"```\nTotal: 42 EUR\n\n{HOSTILE_TEXT}\n```" in sent
    file = page.locator(".text-file")
    file.locator("summary").click()
    expect(file.locator("pre")).to_contain_text(HOSTILE_TEXT)
    assert page.title() == "Chat · weft"
    picture(page, "chat-pdf")


def test_large_pdf_is_reported_not_to_fit_before_it_is_sent(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    given(page, "long.pdf", pdf(*["word " * 100] * 30), "application/pdf")
    expect(page.locator(".fits")).to_contain_text("The message does not fit pool")


def test_pdf_without_usable_text_is_refused_with_the_next_step(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat?model=pool", "Chat")
    given(page, "scan.pdf", pdf(""), "application/pdf")
    page.get_by_text("scan.pdf: the PDF has no text, only images: recognize its text (OCR) first").wait_for()
    given(page, "bad.pdf", b"%PDF-1.7", "application/pdf")
    page.get_by_text("bad.pdf: the PDF is damaged: open it in a viewer").wait_for()
    expect(page.get_by_role("list", name="Files")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_files_have_no_accessibility_violations(browser: "Browser", mesh: MeshProcess, theme: str, width: int) -> None:
    def attached(page: "Page") -> None:
        given(page, "sum.py", CODE.encode())
        asked(page, "What?").get_by_text("I see.").wait_for()
        page.locator(".text-file summary").click()
        given(page, "large.txt", b" ".join([b"word"] * 3000))
        page.get_by_text("does not fit").wait_for()

    assert not accessibility_faults(browser, f"{mesh.url}/ui/chat?model=pool", theme=theme, width=width, after=attached)

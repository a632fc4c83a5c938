"""What answers are drawn with: formulas, colored code, tasks, collapsible text; nothing of it runs or is fetched."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import pytest
from chat_steps import asked, behave
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, expect, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

TEXT = r"""Inline $a^2+b^2=c^2$, \(\frac{1}{2}\), it costs $5 or $6, \$7.

$$
\int_0^1 x\,dx
$$

\[ \sum_{i=1}^n i \]

- [x] done
- [ ] to **do**

<details>
<summary>More <b>about</b> it</summary>

Inner *text*

</details>

```python
def f(x: int) -> str:  # a comment that is far longer than any phone is wide, so that it has to be wrapped or scrolled
    return f"{x}"
```

```nolanguage
plain <b>text</b>
```

After[^1], not [^a-z].

[^1]: The *note*.
"""
HOSTILE = r"""$\href{javascript:document.title='owned'}{x}$ $\includegraphics{https://attacker.example/x.png}$
$\htmlData{a=b}{x}$ $\def\a{\a\a}\a$ $\rule{99999em}{99999em}$ \[<img src=x onerror=document.title='owned'>\]

<details open onclick=document.title='owned'>
<summary><img src=x onerror=document.title='owned'></summary>
<script>document.title='owned'</script>
</details>

<details><summary>one</summary>
<details><summary>two</summary>
never closed
"""

DIAGRAM = """```mermaid
graph TD
  A[Start] --> B{{Is it <b>ready</b>?}}
  B -->|yes| C(Stop)
```
"""
HOSTILE_DIAGRAM = """```mermaid
%%{init: {"securityLevel": "loose", "themeCSS": "@import url(https://attacker.example/x.css); * {fill: url(https://attacker.example/f)}"}}%%
graph TD
  A["<img src=https://attacker.example/x.png onerror=parent.document.title='owned'>"] --> B
  A["<script>parent.document.title='owned'</script>"]
  B["<a href='javascript:parent.document.title=1'>x</a>"] --> C["<iframe src=https://attacker.example>"]
  click A call alert("owned")
  click B href "javascript:parent.document.title='owned'"
```
"""
DRAW = """async texts => {
  const folder = document.querySelector("link[rel=icon]").href.replace("icon.svg", "");
  const {h, render, Fragment} = await import("preact");
  const {Blocks} = await import(folder + "app/parts/markdown.js");
  const drawn = ([text, isComplete]) => {
    const box = document.createElement("div");
    render(h(Fragment, null, new Blocks().of(text, isComplete)), box);
    return box.innerHTML.replaceAll("\\n", "");
  };
  return texts.map(drawn);
}"""
LINES = """cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return range.getClientRects().length;
}"""
FOLDED = "<details><summary>{}</summary>{}</details>"
ONE_LINE = "<details><summary>Click</summary>The answer is 42.</details>"
DETAILS = {
    f"{ONE_LINE}\n\nAfter": f"<p>{escape(ONE_LINE, quote=False)}</p><p>After</p>",
    "<details><summary>a</summary>\nlast words</details>\n\nAfter.": (
        FOLDED.format("a", "<p>last words</p>") + "<p>After.</p>"
    ),
    "<details>\n<summary>List<int> of <b>x</b></summary>\nt\n</details>\nAfter": (
        FOLDED.format("List&lt;int&gt; of x", "<p>t</p>") + "<p>After</p>"
    ),
    "<details>\n<summary>a</summary></details>\nAfter": FOLDED.format("a", "") + "<p>After</p>",
    "<details>\n</details>\nAfter": FOLDED.format("Details", "") + "<p>After</p>",
    "<details>\nx\n<details>\ny</details></details>\nAfter": (
        FOLDED.format("Details", "<p>x</p>" + FOLDED.format("Details", "<p>y</p>")) + "<p>After</p>"
    ),
    "- <details>\n  x\n- b\n- c": "<ul><li>&lt;details&gt;<br>x</li><li>b</li><li>c</li></ul>",
    "- <details>\n  x\n  </details>\n- b": f"<ul><li>{FOLDED.format('Details', '<p>x</p>')}</li><li>b</li></ul>",
    "- <details>\n  x\n- b\n\n</details>": "<ul><li>&lt;details&gt;<br>x</li><li>b</li></ul><p>&lt;/details&gt;</p>",
    "<details>\nnever closed\n\nAfter": "<p>&lt;details&gt;<br>never closed</p><p>After</p>",
    "<details><summary>a\nb</summary>\nc\n</details>": (
        "<p>&lt;details&gt;&lt;summary&gt;a<br>b&lt;/summary&gt;<br>c<br>&lt;/details&gt;</p>"
    ),
    "a <details>\nb\n</details>": "<p>a &lt;details&gt;<br>b<br>&lt;/details&gt;</p>",
    "<details>\n- a\n- b</details>\nAfter": FOLDED.format("Details", "<ul><li>a</li><li>b</li></ul>") + "<p>After</p>",
    "<details>\n" * 3 + "x\n" + "</details>\n" * 2: (
        "<p>&lt;details&gt;</p>" + FOLDED.format("Details", FOLDED.format("Details", "<p>x</p>"))
    ),
}
"""What complete texts with <details> become: whatever is no such box stays, as text."""
FORMULAS = {
    "It costs $5; use `$total` then.": "<p>It costs $5; use <code>$total</code> then.</p>",
    "set $HOME/$USER now": "<p>set $HOME/$USER now</p>",
    "$5 or $6, US$5/CA$6": "<p>$5 or $6, US$5/CA$6</p>",
    "$x$, ($2x$).": '<p><span class="formula">$x$</span>, (<span class="formula">$2x$</span>).</p>',
    "- $$\n  x\n- b\n  $$": "<ul><li>$$<br>x</li><li>b<br>$$</li></ul>",
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("rendering")
    with running_mesh(folder / "home", "--config", str(write_config(folder, fake_runner("a")))) as mesh:
        yield mesh


def answered(page: "Page", mesh: MeshProcess, text: str) -> "Locator":
    """A complete answer of this text."""
    behave(mesh, "a", text=text, tokens_per_second=0.0)
    opened(page, mesh, "chat?model=pool", "Chat")
    answer = asked(page, "Draw")
    expect(answer.locator(".receipt")).to_contain_text("completed")
    return answer


def test_answer_has_formulas_colored_code_tasks_and_collapsible_text(page: "Page", mesh: MeshProcess) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
    opened(page, mesh, "chat", "Chat")
    assert not {"katex.mjs", "highlight.mjs"} & set(loaded)
    answer = answered(page, mesh, TEXT)
    expect(answer.locator("math")).to_have_count(4)
    expect(answer.locator("math[display=block]")).to_have_count(2)
    assert answer.locator("annotation").all_text_contents() == [
        "a^2+b^2=c^2", r"\frac{1}{2}", r"\int_0^1 x\,dx", r"\sum_{i=1}^n i",
    ]  # fmt: skip
    expect(answer).to_contain_text("it costs $5 or $6, $7.")
    assert answer.get_by_role("checkbox").evaluate_all("all => all.map((box) => box.checked)") == [True, False]
    expect(answer.get_by_role("listitem").last).to_have_text("to do")
    folded = answer.locator("details", has_text="More about it")
    assert not folded.get_by_text("Inner text").is_visible()
    folded.locator("summary").click()
    folded.get_by_text("Inner text").wait_for()
    expect(answer.locator(".hl-keyword").first).to_have_text("def")
    expect(answer.locator(".hl-comment")).to_contain_text("a comment that is far longer")
    expect(answer.locator("pre").last).to_have_text("plain <b>text</b>")
    assert answer.locator("sup").all_text_contents() == ["1", "1"]
    expect(answer).to_contain_text("After1, not [^a-z].")
    expect(answer.locator(".footnote")).to_have_text("1 The note.")
    picture(page, "chat-rendering")


def test_formulas_and_table_heads_have_no_scrollbar_and_break_no_word(page: "Page", mesh: MeshProcess) -> None:
    table = "| method | mean of all of the values | other |\n|---|---|---|\n| a | " + "word " * 60 + "| b |"
    answer = answered(page, mesh, f"$$\n\\int_0^1 \\frac{{x^2}}{{\\sum_i y_i}}\\,dx\n$$\n\n{table}")
    answer.locator("math").first.wait_for()
    formula = answer.locator(".formula.block")
    assert formula.evaluate("box => getComputedStyle(box).overflowY") == "hidden"
    assert formula.evaluate("box => box.scrollHeight <= box.clientHeight")
    head = answer.get_by_role("columnheader", name="method")
    assert head.evaluate(LINES) == 1


@pytest.mark.parametrize("cases", [DETAILS, FORMULAS], ids=["details", "formulas"])
def test_no_text_is_lost_in_boxes_and_formulas(page: "Page", mesh: MeshProcess, cases: dict[str, str]) -> None:
    opened(page, mesh, "chat", "Chat")
    drawn = page.evaluate(DRAW, [[text, True] for text in cases])
    assert dict(zip(cases, drawn, strict=True)) == cases


def test_box_of_a_growing_text_is_open_ended(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "chat", "Chat")
    drawn = page.evaluate(DRAW, [["<details><summary>a</summary>\n\nb", False], ["- <details>\n- b", False]])
    assert drawn == [FOLDED.format("a", "<p>b</p>"), "<ul><li>&lt;details&gt;</li><li>b</li></ul>"]


def test_wrong_formula_is_shown_as_it_was_written(page: "Page", mesh: MeshProcess) -> None:
    answer = answered(page, mesh, "Right $x$, wrong $\\nosuch{y}$ and\n\n$$\n\\nosuch\n$$")
    expect(answer.locator("math")).to_have_count(1)
    assert answer.locator(".formula:not(:has(math))").all_text_contents() == ["$\\nosuch{y}$", "$$\n\\nosuch\n$$"]


def test_code_can_be_wrapped_and_copy_covers_nothing(page: "Page", mesh: MeshProcess) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    code = answered(page, mesh, TEXT).locator(".code").first
    box = code.locator("pre")
    assert box.evaluate("pre => getComputedStyle(pre.firstElementChild).fontSize") == "14px"
    assert box.evaluate("pre => pre.scrollWidth > pre.clientWidth")
    code.get_by_role("button", name="Wrap").click()
    assert box.evaluate("pre => pre.scrollWidth <= pre.clientWidth")
    copy, lines = code.get_by_role("button", name="Copy").bounding_box(), box.bounding_box()
    assert copy is not None
    assert lines is not None
    assert copy["y"] + copy["height"] <= lines["y"]
    picture(page, "chat-code-wrapped")


def test_formulas_and_collapsible_text_run_no_code_and_fetch_nothing(page: "Page", mesh: MeshProcess) -> None:
    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    answer = answered(page, mesh, HOSTILE)
    answer.get_by_text("never closed").wait_for(state="attached")
    answer.locator("math").first.wait_for(state="attached")
    assert page.title() == "Chat · weft"
    assert answer.locator("script, img, svg, iframe, object, style, a:not([href^='/ui/'])").count() == 0
    assert answer.evaluate("all => all.querySelectorAll('[onclick], [onerror], [style]').length") == 0
    assert all(url.startswith(mesh.url) for url in asked_for), asked_for


def test_diagram_is_drawn_in_its_frame_and_its_code_is_one_click_away(page: "Page", mesh: MeshProcess) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
    answered(page, mesh, TEXT)
    assert "mermaid.js" not in loaded
    answer = answered(page, mesh, DIAGRAM)
    frame = answer.frame_locator("iframe[title=Diagram]")
    expect(frame.locator("svg")).to_be_visible()
    expect(frame.locator("svg")).to_contain_text("Stop")
    expect(answer.locator("pre")).to_have_count(0)
    assert answer.locator("iframe").evaluate("frame => frame.clientHeight") > 100
    assert frame.locator(".node rect").first.evaluate("box => getComputedStyle(box).fill") != "rgb(0, 0, 0)"
    picture(page, "chat-diagram")
    answer.get_by_role("button", name="Show diagram code").press("Enter")
    expect(answer.locator("pre")).to_contain_text("A[Start] -->")
    assert not answer.locator("iframe").is_visible()
    answer.get_by_role("button", name="Show diagram code").press("Enter")
    expect(frame.locator("svg")).to_be_visible()


def test_broken_and_unfinished_diagrams_are_shown_as_code(page: "Page", mesh: MeshProcess) -> None:
    answer = answered(page, mesh, "```mermaid\ngraph TD\n  A --> [\n```\n\nAnd\n\n```mermaid\ngraph TD\n  A --> B")
    answer.get_by_text("This diagram cannot be drawn.").wait_for()
    expect(answer.locator("pre")).to_have_count(2)
    expect(answer.locator("iframe")).to_have_count(0)


def test_diagram_whose_frame_says_nothing_is_said_to_be_undrawn(page: "Page", mesh: MeshProcess) -> None:
    page.route("**/diagram_frame.js", lambda route: route.abort())
    answer = answered(page, mesh, DIAGRAM)
    answer.get_by_text("This diagram cannot be drawn.").wait_for()
    expect(answer.locator("pre")).to_contain_text("A[Start] -->")


def test_hostile_diagram_runs_no_code_and_fetches_nothing(browser: "Browser", mesh: MeshProcess) -> None:
    # Not `page`: the console tells what the policy of the frame blocks.
    page = browser.new_context().new_page()
    elsewhere: list[Request] = []
    page.on("request", lambda request: None if request.url.startswith(mesh.url) else elsewhere.append(request))
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    answer = answered(page, mesh, HOSTILE_DIAGRAM)
    frame = answer.frame_locator("iframe[title=Diagram]")
    frame.locator("svg").wait_for()
    assert answer.locator("iframe").evaluate("frame => frame.contentDocument") is None
    assert frame.locator("body").evaluate("() => self.origin") == "null"
    assert frame.locator("script:not([src]), iframe, object, a[href^='javascript'], [onerror]").count() == 0
    for node in frame.locator(".node").all():
        node.click()
    assert page.title() == "Chat · weft"
    assert [request.failure for request in elsewhere] == ["csp"] * len(elsewhere)
    page.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_rendered_answer_has_no_accessibility_violations(browser: "Browser", mesh: MeshProcess, theme: str) -> None:
    behave(mesh, "a", text=TEXT + DIAGRAM, tokens_per_second=0.0)

    def chatted(page: "Page") -> None:
        answer = asked(page, "Draw")
        answer.get_by_role("button", name="Show diagram code").wait_for()
        answer.locator("math").first.wait_for()
        answer.locator(".hl-keyword").first.wait_for()

    assert not accessibility_faults(browser, f"{mesh.url}/ui/chat?model=pool", theme=theme, after=chatted)

"""Every fenced block of the docs is what weft reads, runs or answers: configurations, documents, commands, requests."""

from pathlib import Path

import pytest
from doc_blocks import ROOT, Block, blocks, faults, pages

MAX_UNCHECKED = 4


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_of_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    found = {block.line: faults(block, tmp_path) for block in blocks(page.read_text("utf-8")) if not block.unchecked}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


def test_few_blocks_are_unchecked() -> None:
    found = [block for page in pages() for block in blocks(page.read_text("utf-8")) if block.unchecked]
    assert len(found) <= MAX_UNCHECKED
    assert all(len(block.unchecked.split()) >= 4 for block in found)


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("yaml", "runners: {studio: {models: []}}", "must be a list"),
        ("yaml", "gateway: {cors: {origins: []}}", "is not a setting"),
        ("yaml", "kind: agent\nname: a\nmodle: m", "modle"),
        ("yaml", "runners: [", "flow"),
        ("json", '{"a": }', "Expecting value"),
        ("toml", "a = = 1", "Invalid value"),
        ("console", "$ weft laod qwen", "there is no command laod"),
        ("console", "$ cat a | weft chat qwen --speed 3", "--speed"),
        ("console", "$ id=$(weft keys mint)", "mint"),
        ("console", "$ docker compose exec r weft keys create --age 3d", "--age"),
        ("console", "$ weft --verison", "--verison"),
        ("console", "$ weft load qwen \\\n    --ctxt 8", "--ctxt"),
        ("console", "$ weft get modell qwen -o yaml", "there is no kind modell"),
        ("console", "$ curl -s localhost:8080/v1/model", "there is no GET /v1/model"),
        ("console", "$ curl -X PUT localhost:8080/v1/models", "there is no PUT /v1/models"),
        (
            "console",
            "$ curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' -d '{\"model\": 3}'",
            "valid string",
        ),
        ("sh", "weft up --prot 80", "--prot"),
        ("python", "def f(:", "invalid syntax"),
        ("rust", "fn f() {}", "nothing checks rust"),
    ],
)
def test_invalid_block_is_detected(language: str, text: str, words: str, tmp_path: Path) -> None:
    """The control."""
    (block,) = blocks(f"a\n\n```{language}\n{text}\n```\n")
    (wrong,) = faults(block, tmp_path)
    assert words in wrong


def test_unchecked_block_has_a_preceding_reason() -> None:
    page = "a\n\n<!-- unchecked: a file of LLM -->\n```yaml\na: 1\n```\n\n  ```json\n  {}\n  ```\n"
    assert list(blocks(page)) == [
        Block(line=5, language="yaml", text="a: 1\n", unchecked="a file of LLM"),
        Block(line=9, language="json", text="{}\n", unchecked=""),
    ]

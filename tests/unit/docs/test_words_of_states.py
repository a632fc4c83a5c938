"""One word for the state of a model that is not loaded: hibernating. Hosts sleep, and `sleep` is a setting."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OTHER_WORDS = re.compile(r"\b(?:asleep|sleeping|sleeps|slept)\b", re.IGNORECASE)
_HOST = r"(?:hosts?|laptops?|machines?)"
OF_HOSTS = re.compile(rf"\bsleeping (?:{_HOST}|network)\b|\b{_HOST} (?:that |may be )?(?:sleeps|asleep)\b")
IN_CODE = re.compile(r"`[^`]*`")
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
TEXTS = ("weft_app/cli", "weft_app/compose", "weft/documents", "gateway", "router_svc/policy/endpoints", "registry_svc")
"""Folders whose texts users read."""


def _wrong(text: str) -> list[str]:
    """The other words for the state in a text for users; those of hosts and of code are left out."""
    return OTHER_WORDS.findall(OF_HOSTS.sub("", IN_CODE.sub("", text)))


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """The texts of a module that are no docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("page", PAGES)
def test_page_uses_the_word_hibernating(page: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").split())
    assert _wrong(text) == []


def test_printed_text_uses_the_word_hibernating() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for folder in TEXTS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if OTHER_WORDS.search(source := file.read_text("utf-8"))
        for line, text in _texts(source)
        if " " in text and _wrong(text)
    ]
    assert found == []


def test_contract_comments_use_the_word_hibernating() -> None:
    comments = {
        file.name: " ".join(re.findall(r"//(.*)", file.read_text("utf-8")))
        for file in (ROOT / "protos").rglob("*.proto")
    }
    assert {name: _wrong(text) for name, text in comments.items() if _wrong(text)} == {}


def test_check_detects_another_word() -> None:
    assert _wrong("the model is asleep, and `start_asleep` says so") == ["asleep"]
    assert _wrong("the sleeping host of a hibernating model") == []
    assert list(_texts('"""asleep"""\nX = "asleep on box"')) == [(2, "asleep on box")]

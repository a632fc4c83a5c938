"""Checks that texts which people read use plain technical English: none of the phrases that read like a translation.

Texts: pages, comments of contracts, the workbench, and in Python the strings and the first paragraphs of docstrings.
A line that needs a phrase has the comment `words: REASON` on it, or on the line before it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_NOUN = r"(?=\s*(?:[^\w\s]|$)|\s+(?:and|or|with|which|that|for|in|to|on|by|is|are|up)\b)"
"""After "of its own": no noun. "The sink of its own items" is fine."""
STILTED = re.compile(
    rf"\b(?:of (?:its|their|his|your|our|one's) own{_NO_NOUN}|at once|by (?:itself|themselves)|anew|whoever|nobody"
    r"|for ever|off the premises|leaves? the premises|com(?:es?|ing) to nothing|gives? way|lets? go|goes on"
    r"|that is none)\b".replace(" ", r"\s+"),
    re.IGNORECASE,
)
PAGES = (
    *("*.md", "protos/**/*.proto"),
    *("gateway/workbench/page/*.html", "gateway/workbench/page/app/**.js", "weft_extensions/*/page/*.js"),
)
PROGRAMS = (
    "gateway",
    "registry_svc",
    "router_svc",
    "runner_svc",
    "weft",
    "weft_app",
    "weft_extensions",
    "deploy",
    "docs",
)
GENERATED = ("weft/api/", "tests/")
_CODE = re.compile(r"^( *)```.*?^\1``` *$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Prints each stilted phrase with its file and line. Returns 1 if there is one."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path, text in _texts()
        for line, phrase in stilted(text, is_python=path.suffix == ".py")
    ]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


def stilted(text: str, *, is_python: bool) -> Iterator[tuple[int, str]]:
    """Yields the line and the words of each stilted phrase in a file."""
    lines = text.splitlines()
    for first, part in _parts(text) if is_python else [(1, _without_code(text))]:
        for found in STILTED.finditer(re.sub(r"\n\s*(?://|\*)?", lambda gap: "\n" + " " * (len(gap[0]) - 1), part)):
            line = first + part.count("\n", 0, found.start())
            if not any("words: " in near for near in lines[max(line - 2, 0) : line]):
                yield line, " ".join(found[0].split())


def _texts() -> Iterator[tuple[Path, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PAGES, *(f"{folder}/**.py" for folder in PROGRAMS)],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if not name.startswith(GENERATED) and (ROOT / name).is_file():
            yield ROOT / name, (ROOT / name).read_text("utf-8")


def _parts(source: str) -> Iterator[tuple[int, str]]:
    """Yields the strings of a module that have a space, and the first paragraph of each docstring."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            text = node.value.partition("\n\n")[0] if id(node) in docstrings else node.value
            yield node.lineno, re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), text)


def _without_code(page: str) -> str:
    """Returns a page with its code blanked out, line by line."""
    return _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), page)


if __name__ == "__main__":
    sys.exit(main())

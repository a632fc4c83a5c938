"""Links between Markdown files of the repository, and the headings that they name."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
INDEX = ROOT / "docs" / "README.md"
_LINK = re.compile(r"\[[^\[\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *#* *$", re.MULTILINE)
_FENCE = re.compile(r"^( *)```.*?^\1``` *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_OUTSIDE = ("http://", "https://", "mailto:")


def pages() -> list[Path]:
    """Every Markdown file that people read: docs, the front pages, and design notes beside the code."""
    tops = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "weft_app" / "DESIGN.md"]
    designs = [*ROOT.glob("*_svc/**/*.md"), *ROOT.glob("gateway/**/*.md")]
    others = [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/decisions/*.md"),
        *ROOT.glob("deploy/**/*.md"),
        *ROOT.glob("requirements/*.md"),
    ]
    return sorted({*tops, *designs, *others})


def links(page: Path) -> Iterator[str]:
    """Yields the targets of a page's links into this repository; code has none."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text("utf-8")))
    for found in _LINK.finditer(text):
        if not found["target"].startswith(_OUTSIDE):
            yield found["target"]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as code hosts make them."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    found: list[str] = []
    for heading in _HEADING.finditer(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"]).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(anchor if anchor not in found else f"{anchor}-{found.count(anchor)}")
    return frozenset(found)


def is_broken(page: Path, target: str) -> bool:
    """Whether a link leads to no file, or to no heading of its file."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path) if path else page
    if not file.exists():
        return True
    return bool(anchor) and file.suffix == ".md" and anchor not in anchors(file)

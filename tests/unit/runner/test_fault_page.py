"""tests/faults.md and docs/threats.md name tests: they exist, and no fault and no promise is without one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "tests" / "faults.md"
THREATS = ROOT / "docs" / "threats.md"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
ROW = re.compile(r"^\| ([FMT]\d+(?:, [FMT]\d+)*) \|.*\|(.*)\|$", re.MULTILINE)
FAULTS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 15, 16, 18, 19, 20, 21, 23, 26, 27, 30, 32, 33, 34, 35),
    *(42, 43, 45, 47, 48, 49, 52, 54, 60, 61, 63, 64, 66, 67, 68, 69, 70, 71, 72, 73, 74),
)
OF_MEMORY_AND_OPERATIONS = tuple(range(1, 11))
OF_TASKS = tuple(range(1, 9))


def _missing(text: str) -> list[str]:
    """Returns the tests that `text` names and that do not exist."""
    files = {file.name: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    return [
        f"{file}::{name}"
        for file, name in NAMED.findall(text)
        if not re.search(rf"^(async )?def {name}\(", files.get(file, ""), re.MULTILINE)
    ]


@pytest.mark.parametrize("page", [PAGE, THREATS])
def test_every_test_named_by_the_page_exists(page: Path) -> None:
    assert _missing(page.read_text()) == []


def test_every_promise_names_its_test() -> None:
    section = THREATS.read_text().partition("## Promises")[2].partition("\n## ")[0]
    promises = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(promises) > 10
    assert [line for line in promises if not NAMED.search(line)] == []


def test_every_fault_has_a_row_and_every_row_a_test() -> None:
    rows = ROW.findall(PAGE.read_text())
    for kind, faults in (("F", FAULTS), ("M", OF_MEMORY_AND_OPERATIONS), ("T", OF_TASKS)):
        assert sorted(int(number) for ids, _ in rows for number in re.findall(rf"{kind}(\d+)", ids)) == list(faults)
    assert [ids for ids, tests in rows if not NAMED.search(tests)] == []

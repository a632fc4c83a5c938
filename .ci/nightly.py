"""Runs `make test-nightly` and adds its result to tests/nightly.md, for a schedule such as cron or a timer.

python .ci/nightly.py
"""

import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "nightly.md"
REPORT = ROOT / ".nightly.xml"
KEPT_ROWS = 10
HEAD = [
    "# Results of `make test-nightly`",
    "",
    "Simulator statistics, storms, torture, and every property with 500 examples. `python .ci/nightly.py` runs them",
    "and adds a row; the last rows are kept.",
    "",
    "| date | commit | passed | failed | skipped | minutes | failures |",
    "|---|---|---|---|---|---|---|",
]


def row(report: Path, minutes: float) -> str:
    """Returns the row of a run."""
    (suite,) = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 - written by pytest
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    cells = (
        time.strftime("%Y-%m-%d", time.gmtime()),
        commit.stdout.strip(),
        passed,
        counts["failures"] + counts["errors"],
        counts["skipped"],
        f"{minutes:.0f}",
        "<br>".join(failed) or "-",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Returns the exit code of the tests."""
    began = time.monotonic()
    code = subprocess.run(["make", "test-nightly", f"ARGS=--junitxml={REPORT}"], cwd=ROOT, check=False).returncode
    minutes = (time.monotonic() - began) / 60
    rows = RESULTS.read_text().splitlines()[len(HEAD) :] if RESULTS.exists() else []
    RESULTS.write_text("\n".join([*HEAD, row(REPORT, minutes), *rows[: KEPT_ROWS - 1]]) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Warns about measured figures of the README that are old, or that name no commit of this history. It never fails.

python .ci/figures.py
"""

import re
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_AGE_DAYS = 14
_MEASURED = re.compile(r"commit (?P<commit>[0-9a-f]{8}), (?P<day>\d{1,2} [A-Z][a-z]+ \d{4})")


def warnings(text: str, today: date) -> list[str]:
    """Returns a sentence for each commit and day that a text names for its figures and that is older than the limit."""
    named = {(found["commit"], found["day"]) for found in _MEASURED.finditer(text)}
    if not named:
        return ["README.md names no commit and day for its figures"]
    return [
        f"README.md shows figures of commit {commit}, {day}: {age} days old; measure again (python -m bench)"
        for commit, day in sorted(named)
        if (age := (today - datetime.strptime(day, "%d %B %Y").date()).days) > MAX_AGE_DAYS  # noqa: DTZ007 - a day
    ]


def _is_known(commit: str) -> bool:
    asked = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(asked, cwd=ROOT, check=False, capture_output=True).returncode == 0


def main() -> None:
    """Prints a line per warning."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = warnings(text, date.today())  # noqa: DTZ011 - days
    found += [
        f"README.md names commit {each['commit']}, which is not in this history"
        for each in _MEASURED.finditer(text)
        if not _is_known(each["commit"])
    ]
    sys.stdout.writelines(f"warning: {line}\n" for line in dict.fromkeys(found))


if __name__ == "__main__":
    main()

"""Compares the lines and files of each folder with the budgets in size.toml. It warns, and never fails.

python .ci/size.py
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".proto")
UNCOUNTED = "weft/api/"
"""Generated."""


def tracked_files() -> dict[str, int]:
    """Returns the lines of each hand-written source file that git tracks, by its path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [path for path in listed.split("\0") if path.endswith(SUFFIXES) and not path.startswith(UNCOUNTED)]
    return {path: (ROOT / path).read_bytes().count(b"\n") for path in paths if (ROOT / path).exists()}


def main() -> None:
    """Prints a row per folder with a budget."""
    files = tracked_files()
    budgets = tomllib.loads((ROOT / "size.toml").read_text())
    rows = [("FOLDER", "LINES", "BUDGET", "FILES", "BUDGET", "")]
    over = 0
    for folder, most_lines in budgets["lines"].items():
        found = [lines for path, lines in files.items() if path.startswith(f"{folder}/")]
        most_files = budgets["files"].get(folder)
        is_over = sum(found) > most_lines or (most_files is not None and len(found) > most_files)
        over += is_over
        times = f"{sum(found) / most_lines:.1f}x" if is_over else ""
        rows.append((folder, f"{sum(found):,}", f"{most_lines:,}", f"{len(found):,}", f"{most_files or '-'}", times))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for folder, *numbers in rows:
        cells = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        sys.stdout.write(f"{folder.ljust(widths[0])}  {'  '.join(cells)}".rstrip() + "\n")
    if over:
        sys.stdout.write(f"warning: {over} folders are over their budget in size.toml\n")


if __name__ == "__main__":
    main()

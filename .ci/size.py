"""Compares the lines of each package with its figure in size.toml, and fails if one has grown beyond it: a ratchet.

python .ci/size.py            compare
python .ci/size.py --record   write today's figures, on purpose only: the commit says what new lines are for
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "size.toml"
SUFFIXES = (".py", ".proto")
UNCOUNTED = "weft/api/"
"""Generated."""


def tracked_files() -> dict[str, int]:
    """Returns the lines of each hand-written source file that git tracks, by its path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [path for path in listed.split("\0") if path.endswith(SUFFIXES) and not path.startswith(UNCOUNTED)]
    return {path: (ROOT / path).read_bytes().count(b"\n") for path in paths if (ROOT / path).exists()}


def lines_of(folder: str, files: Mapping[str, int]) -> int:
    """Returns the lines of all files below a folder."""
    return sum(lines for path, lines in files.items() if path.startswith(f"{folder}/"))


def grown(figures: Mapping[str, int], files: Mapping[str, int]) -> Iterator[str]:
    """Yields a sentence for each folder with more lines than its figure."""
    for folder, most in figures.items():
        if (lines := lines_of(folder, files)) > most:
            yield f"{folder} has {lines:,} lines, {lines - most:,} more than in size.toml"


def main() -> int:
    """Prints a row per package. Returns 1 if one has grown."""
    files = tracked_files()
    text = FIGURES.read_text("utf-8")
    figures: dict[str, int] = tomllib.loads(text)["lines"]
    if "--record" in sys.argv[1:]:
        for folder in figures:
            row = f'"{folder}" = {lines_of(folder, files):_}'
            text = re.sub(rf'^"{re.escape(folder)}" = [\d_]+$', row, text, flags=re.MULTILINE)
        FIGURES.write_text(text, "utf-8")
        return 0
    for folder, most in figures.items():
        lines = lines_of(folder, files)
        sys.stdout.write(f"{folder:<16}{lines:>10,}  of {most:>10,}  {lines - most:>+8,}\n")
    found = list(grown(figures, files))
    sys.stdout.writelines(f"error: {each}\n" for each in found)
    if found:
        sys.stdout.write("Remove lines, or record the growth (python .ci/size.py --record) and say what it is for.\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

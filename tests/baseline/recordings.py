"""Recorded outputs: a file has sections, each an output by its name; two recordings are compared section by section."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"
VARIABLE = "WEFT_BASELINE"
"""`record` rewrites the files instead of comparing with them."""
BENCH = RECORDED / "bench.json"
"""What `python -m bench` wrote for the scenarios memory, unary and stream; see README.md."""
MARK = "=== "
MAX_DIFF_LINES = 60

Outputs = Mapping[str, str]


def is_recording() -> bool:
    """Whether this run rewrites the recordings."""
    return os.environ.get(VARIABLE) == "record"


def read(path: Path) -> dict[str, str]:
    """Returns the outputs of a file; none if there is no such file."""
    outputs: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(MARK):
            lines = outputs.setdefault(line.removeprefix(MARK), [])
        else:
            lines.append(line)
    return {name: "\n".join(lines).rstrip("\n") for name, lines in outputs.items()}


def write(path: Path, outputs: Outputs) -> None:
    """Writes outputs so that `read` returns them."""
    assert not any(line.startswith(MARK) for text in outputs.values() for line in text.splitlines())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{MARK}{name}\n{text}\n\n" for name, text in outputs.items()))


def differences(recorded: Outputs, found: Outputs) -> list[str]:
    """Returns a unified diff for each output that changed, is new or is missing; it begins with the output's name."""
    return [
        _difference(name, recorded.get(name), found.get(name))
        for name in dict.fromkeys((*recorded, *found))
        if recorded.get(name) != found.get(name)
    ]


def _difference(name: str, recorded: str | None, found: str | None) -> str:
    kind = "new" if recorded is None else "missing" if found is None else "changed"
    lines = list(
        difflib.unified_diff(
            (recorded or "").splitlines(), (found or "").splitlines(), "recorded", "found", lineterm="", n=2
        )
    )
    more = len(lines) - MAX_DIFF_LINES
    shown = [*lines[:MAX_DIFF_LINES], *([f"... {more} more lines"] if more > 0 else [])]
    return "\n".join((f"{kind}: {name}", *shown))


def check(path: Path, found: Outputs) -> None:
    """Compares outputs with a file, or rewrites it when recording. Raises AssertionError with every difference."""
    found = {name: text.rstrip("\n") for name, text in found.items()}
    assert found, f"nothing was recorded for {path.name}"
    changes = differences(read(path), found)
    if is_recording():
        write(path, found)
        names = "".join(f"\n  {change.splitlines()[0]}" for change in changes)
        print(f"\n{path.relative_to(FOLDER)}: {len(found)} outputs, {len(changes)} differ{names}")  # noqa: T201
        return
    assert not changes, f"{path.relative_to(FOLDER)}: {len(changes)} differ\n\n" + "\n\n".join(changes)

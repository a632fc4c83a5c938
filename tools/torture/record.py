"""The table of all recorded torture runs, one row each, in tests/faults-run.md."""

import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.torture.history import Kind
from tools.torture.plan import NO_KILLS
from tools.torture.run import Outcome

HEAD = """# Recorded runs with faults

Each row is written by the run itself. `PYTHONPATH=tests python -m tools.torture` with the arguments of a row and
its seed, in a checkout of its commit, plans the same kills and faults again. Kills are SIGKILLs. Failed runs stay here.

| date | commit | seed | database | kills | other faults | tasks | streams, failed | violations | minutes | arguments |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def record(path: Path, outcome: Outcome, arguments: Sequence[str], minutes: float) -> None:
    """Appends the row of a run to the table. Raises OSError."""
    rows = path.read_text("utf-8").removeprefix(HEAD) if path.exists() else ""
    path.write_text(f"{HEAD}{rows}{row(outcome, arguments, _commit(), minutes)}\n", "utf-8")


def row(outcome: Outcome, arguments: Sequence[str], commit: str, minutes: float) -> str:
    """Returns the row of a run."""
    plan, events = outcome.plan, outcome.events
    kills = Counter({target: count for target, count in outcome.kills.items() if target not in NO_KILLS})
    lasting = {target: count for target, count in outcome.kills.items() if target in NO_KILLS}
    faults: dict[Any, int] = {**lasting, **outcome.database_faults, **outcome.cuts}
    failed = events[Kind.STREAM_FAILED] + events[Kind.STREAM_BROKEN]
    wrong = [*outcome.shortfalls, *sorted({violation.rule for violation in outcome.violations})]
    cells = (
        time.strftime("%Y-%m-%d", time.gmtime()),
        commit,
        plan.seed,
        "PostgreSQL" if plan.database_url else "SQLite",
        f"{kills.total()}: {_listed(kills)}",
        _listed(faults) or "-",
        outcome.tasks,
        f"{events[Kind.STREAM_ENDED]}, {failed}" if plan.gateways else "-",
        "<br>".join([str(len(outcome.violations)), *wrong, *map(str, outcome.growths)]),
        f"{minutes:.0f}",
        f"`{' '.join(arguments)}`",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _listed(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))


def _commit() -> str:
    """Returns the commit of this checkout, with "+" if tracked files are changed."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)  # noqa: S603, S607
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")

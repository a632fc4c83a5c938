"""The program: `python -m weft.testing.torture --kills 1000 --tasks 10000 --seed 7`. The exit code tells."""

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft.testing.torture.mesh import Folder
from weft.testing.torture.plan import STALE_ROUTERS, USUAL_WEIGHTS, Plan
from weft.testing.torture.run import torture

MAX_SEED = 2**32
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """0: every promise was kept; 1: one was broken, or too little was tried; 130: Ctrl-C."""
    given = _parser().parse_args(arguments)
    seed = secrets.randbelow(MAX_SEED) if given.seed is None else given.seed
    plan = Plan(
        seed=seed,
        kills=given.kills,
        tasks=given.tasks,
        submitters=given.submitters,
        kill_interval_seconds=given.kill_interval,
        max_minutes=given.minutes,
        database_url=given.database_url,
        is_fenced=not given.unfenced,
        weights=STALE_ROUTERS if given.unfenced else USUAL_WEIGHTS,
    )
    # Sockets are under it, and the path of a socket is short.
    folder = Folder(given.folder or Path(tempfile.mkdtemp(prefix="weft-torture-", dir="/tmp")))
    say = sys.stdout.write
    say(f"seed {plan.seed}, under {folder.root}\n")
    sys.stdout.flush()
    try:
        outcome = asyncio.run(torture(plan, folder, _tell))
    except KeyboardInterrupt:
        _tell(f"stopped; what there is lies under {folder.root}")
        return INTERRUPTED
    say("\n".join(outcome.lines()) + "\n")
    return 0 if outcome.is_good else 1


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft.testing.torture", allow_abbrev=False, description=__doc__)
    parser.add_argument("--kills", type=int, default=40, help="SIGKILLs that hit somebody, at least")
    parser.add_argument("--tasks", type=int, default=400, help="acknowledged tasks, at least")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--submitters", type=int, default=2)
    parser.add_argument("--kill-interval", type=float, default=0.7, help="seconds between two kills, on average")
    parser.add_argument("--minutes", type=float, default=60.0, help="it fails when it is not done by then")
    parser.add_argument("--database-url", default="", help="of an empty database; default: an SQLite file")
    parser.add_argument("--folder", type=Path, help="for histories and logs; default: a new one under /tmp")
    parser.add_argument(
        "--unfenced", action="store_true", help="routers with a faulty store: it must FAIL, with doubles"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Calls of Python and C functions per chat, in host and runner: unlike CPU time, no load of the machine changes it.

`python -m bench.calls [--contender FILE] [--top 40]` prints them. All packages count, so that work which moves into a
library is seen. Of several rounds the least counts, since a background task that runs in a round adds to it.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench import call_hook
from bench.contender import BACKEND_ROLE, WEFT, Contender, load_contender
from bench.cpu import roles_of_tree
from bench.launch import run_load, running, running_stub
from bench.load import Job
from bench.scenarios import UNARY_TOKENS, chat

WARM_UP = 50
ROUNDS = 4
CHATS = 100
"""In each round."""
SETTLE_SECONDS = 20.0
"""For about so long a mesh does twice as much by itself after its start."""
IDLE_SECONDS = 2.0
"""What a process calls without a request, scaled to the duration of a round."""
CONNECTIONS = 1
"""One after another, so that the number does not depend on how many requests a busy process finds at once."""
LOAD_SECONDS = 120.0
WRITE_SECONDS = 30.0
ROOT = Path(__file__).resolve().parent.parent
Counts = dict[int, Counter[tuple[str, str, bool]]]
"""Calls by process, and there by file, function, and whether it is a Python function."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one process per chat; fractions come from what runs in the background."""

    by_function: Counter[tuple[str, str, bool]]
    """By file, function, and whether it is a Python function; a C function has the file that calls it."""

    def total(self, *, python: bool) -> float:
        """Calls of Python functions, or of C functions."""
        return sum(number for (_, _, is_python), number in self.by_function.items() if is_python == python)

    def of(self, name: str) -> float:
        """Calls of a function by its name, such as `epoll.poll` for the turns of an event loop."""
        return sum(number for (_, each, _), number in self.by_function.items() if each == name)

    def packages(self) -> Counter[str]:
        """Calls by the package of their files."""
        found: Counter[str] = Counter()
        for (file, _, _), number in self.by_function.items():
            found[package_of(file)] += number
        return found


def package_of(file: str) -> str:
    """Returns the name of the package, or of the module of the standard library, that a file belongs to."""
    parts = Path(file).parts
    for folder in ("site-packages", f"python{'.'.join(map(str, (3, 11)))}"):
        if folder in parts:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return next((part for part in parts if part.startswith("weft") or part.endswith("_svc") or part == "gateway"), file)


def count_calls(contender: Contender, folder: Path, connections: int = CONNECTIONS) -> dict[str, Calls]:
    """Returns the calls per chat by role: of the host, and of the runner. Raises LaunchError."""
    site, written = folder / "site", folder / "counts"
    site.mkdir(parents=True)
    written.mkdir()
    shutil.copy(call_hook.__file__, site / "sitecustomize.py")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    hooked = {"PYTHONPATH": path, call_hook.FOLDER_VARIABLE: str(written)}
    contender = replace(contender, environment={**contender.environment, **hooked})
    with running_stub(ROOT, folder / "stub") as stub, running(contender, ROOT, folder / "mesh", stub) as target:
        roles = {pid: role for pid, role in roles_of_tree(target.process, contender).items() if role != BACKEND_ROLE}
        main = {pid: role for pid, role in roles.items() if _is_hooked(pid)}
        body = chat(UNARY_TOKENS, stream=False)
        load = target.job(body, connections=connections, seconds=LOAD_SECONDS, max_requests=CHATS)
        run_load(target.job(body, connections=connections, max_requests=WARM_UP), ROOT)
        time.sleep(SETTLE_SECONDS)
        rounds = [_round(load, main, written) for _ in range(ROUNDS)]
        idle = min((_idle(main, written) for _ in range(ROUNDS)), key=_sum)
    busy, seconds, chats = min(rounds, key=lambda each: _sum(each[0]))
    share = seconds / IDLE_SECONDS
    return {role: Calls(_per_chat(busy[pid], idle[pid], share, chats)) for pid, role in main.items()}


def _round(load: Job, main: Mapping[int, str], written: Path) -> tuple[Counts, float, int]:
    """Returns the calls, the seconds that they took, and the number of chats."""
    began = time.monotonic()
    _signal(main)
    chats = run_load(load, ROOT).requests
    seconds = time.monotonic() - began
    return _counts(main, written), seconds, chats


def _idle(main: Mapping[int, str], written: Path) -> Counts:
    _signal(main)
    time.sleep(IDLE_SECONDS)
    return _counts(main, written)


def _sum(counts: Counts) -> int:
    return sum(each.total() for each in counts.values())


def _is_hooked(pid: int) -> bool:
    """Whether a process would survive the signal: guards and interpreters without `site` have no handler."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines() if ":" in line
    )
    return bool(int(status["SigCgt"], 16) >> (call_hook.TOGGLE - 1) & 1)


def _signal(pids: Iterable[int]) -> None:
    for pid in pids:
        psutil.Process(pid).send_signal(call_hook.TOGGLE)


def _counts(pids: Iterable[int], folder: Path) -> Counts:
    _signal(pids)
    found: Counts = {}
    deadline = time.monotonic() + WRITE_SECONDS
    for pid in pids:
        path = folder / f"{pid}.json"
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        counts = found[pid] = Counter()
        for file, name, is_python, number in json.loads(path.read_text()):
            # Several functions of a file may call the same one of C, and share a name.
            counts[file, name, is_python] += number
        path.unlink()
    return found


def _per_chat(
    busy: Counter[tuple[str, str, bool]], idle: Counter[tuple[str, str, bool]], share: float, chats: int
) -> Counter[tuple[str, str, bool]]:
    return Counter({key: (number - share * idle[key]) / chats for key, number in busy.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("--contender", type=Path, metavar="FILE", help="another tree of weft (see README)")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="also the N functions with the most calls")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help=f"default {CONNECTIONS}")
    options = parser.parse_args(arguments)
    contender = load_contender(options.contender) if options.contender else WEFT
    with tempfile.TemporaryDirectory(prefix="weft-calls-") as folder:
        found = count_calls(contender, Path(folder), options.connections)
    for role, calls in found.items():
        print(
            f"{role}: {calls.total(python=True):,.0f} of Python, {calls.total(python=False):,.0f} of C, "
            f"{calls.of('epoll.poll'):.1f} turns of the event loop"
        )
        print("  " + ", ".join(f"{name} {number:,.0f}" for name, number in calls.packages().most_common(14)))
        for (file, name, is_python), number in calls.by_function.most_common(options.top):
            shown = "/".join(Path(file).parts[-2:])
            print(f"  {number:7.1f} {'' if is_python else 'C '}{name} ({shown})")
    print(f"together: {total(found):,.0f}")


def total(found: dict[str, Calls]) -> float:
    """Returns all calls per chat."""
    return sum(calls.total(python=True) + calls.total(python=False) for calls in found.values())


if __name__ == "__main__":
    main()

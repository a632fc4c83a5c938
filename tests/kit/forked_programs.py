"""Runs small Python programs in forks of one fresh interpreter, and returns what they print and import.

Tests of lazy imports need an interpreter without the tests' own imports. Starting one takes a second, but forking it
takes no time; `shared` imports what several programs need.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_SERVER = """
import json, os, sys, traceback

order, folder = json.load(open(sys.argv[1])), sys.argv[2]

def run(program):
    sys.argv[1:] = program["arguments"]
    os.environ.update(program["environment"])
    try:
        exec(program["code"], {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

def run_and_report(number, program):
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
    code = run(program)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(f"{folder}/{number}.json", "w") as report:
        json.dump({"code": code, "modules": list(sys.modules)}, report)
    os._exit(0)

exec(order["shared"], {})
for number, program in enumerate(order["programs"]):
    if os.fork() == 0:
        run_and_report(number, program)
    os.wait()
"""


@dataclass(frozen=True)
class Program:
    """A program to run in a fork."""

    code: str
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The result of a program, and its imported modules."""

    code: int | str
    modules: frozenset[str]
    stdout: str
    stderr: str


def run_forked(programs: Sequence[Program], folder: Path, *, shared: str = "") -> list[Ended]:
    """Runs programs one after the other. Each starts in the state after `shared`."""
    order = folder / "order.json"
    order.write_text(json.dumps({"shared": shared, "programs": [asdict(program) for program in programs]}))
    subprocess.run([sys.executable, "-c", _SERVER, order, folder], check=True)
    return [_ended(folder, number) for number in range(len(programs))]


def _ended(folder: Path, number: int) -> Ended:
    report = json.loads((folder / f"{number}.json").read_text())
    stdout, stderr = ((folder / f"{number}.{name}").read_text() for name in ("stdout", "stderr"))
    return Ended(code=report["code"], modules=frozenset(report["modules"]), stdout=stdout, stderr=stderr)

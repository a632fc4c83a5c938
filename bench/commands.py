"""What a command costs: CPU time, time to its first output and whole time, beside those of Python and of grpc alone.

A mesh of no models runs on a temporary home. All commands are run in turns, so that a busy machine disturbs all alike;
the ratios to `import grpc`, of the same turns, are what to compare between machines and days.

python -m bench.commands [TURNS]
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.start import PROGRAM

TURNS = 15
BASE = "python, import grpc"
SCRIPT = (str(Path(sys.executable).with_name("weft")),)
"""The program as shells complete it: by the name of its file."""
_TAB = {"_WEFT_COMPLETE": "complete_bash"}
COMMANDS: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "python, nothing": ((sys.executable, "-c", "pass"), {}),
    BASE: ((sys.executable, "-c", "import grpc"), {}),
    "weft ps": ((*PROGRAM, "ps"), {}),
    "weft get models": ((*PROGRAM, "get", "models"), {}),
    "weft get requests": ((*PROGRAM, "get", "requests"), {}),
    "weft status": ((*PROGRAM, "status"), {}),
    "weft --help": ((*PROGRAM, "--help"), {}),
    "weft ps --help": ((*PROGRAM, "ps", "--help"), {}),
    "Tab on a command": (SCRIPT, _TAB | {"COMP_WORDS": "weft p", "COMP_CWORD": "1"}),
    "Tab on a name": (SCRIPT, _TAB | {"COMP_WORDS": "weft chat ", "COMP_CWORD": "2"}),
}
"""Each command: its line and its variables."""


def main(turns: int) -> None:
    """Prints a table of medians, and of the lowest values, which other work disturbs least."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COMMANDS}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, _mesh(Path(folder)):
        environment = {**os.environ, "WEFT_HOME": folder}
        for turn in range(turns + 1):
            for name, (line, variables) in COMMANDS.items():
                seconds = _seconds(line, environment | dict(variables))
                if turn:  # the first one may compile modules
                    found[name].append(seconds)
    print(f"{turns} turns, load average before: {load:.1f}\n")
    titles = ("command", "CPU ms, median", "CPU ms, lowest", "first output ms, median", "whole ms, median")
    print(f"| {' | '.join((*titles, 'whole ms, lowest', 'CPU, times that of import grpc'))} |")
    print("|---|---|---|---|---|---|---|")
    for name, each in found.items():
        cpu, first, whole = ([run[place] for run in each] for place in range(3))
        ratio = median(mine / theirs[0] for mine, theirs in zip(cpu, found[BASE], strict=True))
        times = [median(cpu), min(cpu), median(first), median(whole), min(whole)]
        values = " | ".join([*(f"{seconds * 1e3:.0f}" for seconds in times), f"{ratio:.2f}"])
        print(f"| {name} | {values} |")


@contextmanager
def _mesh(home: Path) -> Iterator[None]:
    arguments = ("--home", str(home))
    subprocess.run(
        [*PROGRAM, "up", "-d", "--no-demo", "--port", "0", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        subprocess.run([*PROGRAM, "stop", *arguments], check=True, stdout=subprocess.DEVNULL)


def _seconds(line: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float, float]:
    """Returns CPU time, time to the first output (to the end, where there is none) and whole time."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as command:
        assert command.stdout is not None, "it is a pipe"
        output = command.stdout.read(1)
        first = time.monotonic() - began
        output += command.stdout.read()
    whole, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if command.returncode:
        raise RuntimeError(f"{' '.join(line)} failed: {output.decode(errors='replace')}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, first, whole


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS)

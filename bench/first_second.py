"""How long a terminal waits: starts of a mesh, and commands on an idle one, beside a Python that does nothing.

python -m bench.first_second [RUNS]
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.contender import WEFT
from bench.launch import LaunchError
from bench.machine import describe_machine
from bench.measures import Measure
from bench.report import Figures, goal_table

PYTHON = Path(sys.executable)
STEPS = {"starting": 0.2, "listening at": 1.5, "weft is up": 5.0}
"""Words in the output of `weft up` with the demo model, and goals in seconds."""
UNKNOWN, USUAL = f"req-{'0' * 24}", {"first output": 0.15, "end": 0.25}
IDLE = ("ps", "status", "get models", "logs smollm2-135m -n 5", f"explain {UNKNOWN}", f"cancel {UNKNOWN}")
COMMANDS: dict[str, dict[str, float]] = {
    "python -c pass": {},
    "weft --help": {"end": 0.3},
    "weft chat <Tab>": {"end": 0.2},
    **{f"weft {words}": USUAL for words in IDLE},
    **{f"weft {words}": {"end": 1.5} for words in ("doctor --port 0", "models discover")},
}
"""With goals in seconds."""


def measure_command(command: str, home: Path, figures: Figures) -> None:
    """Runs a command once. Raises LaunchError for a failure other than an unknown id: it is not fast."""
    line, is_completed, _ = command.partition("<Tab>")
    program, *words = line.split()
    completion = {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) + 1)}
    environment = os.environ | {"WEFT_HOME": str(home)} | (completion if is_completed else {})
    started, began = [str(PYTHON.with_name(program)), *([] if is_completed else words)], time.monotonic()
    process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert process.stdout is not None
    output, first = os.read(process.stdout.fileno(), 1), time.monotonic() - began
    output += process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    whole, process.returncode = time.monotonic() - began, os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode != (3 if UNKNOWN in command else 0):
        raise LaunchError(f"{command} ended with {process.returncode}: {output.decode()[-500:]}")
    measured = ({"first output": first} if output else {}) | {"end": whole, "CPU": used.ru_utime + used.ru_stime}
    for what, seconds in measured.items():
        title = f"`{command.replace(UNKNOWN, 'UNKNOWN')}`: {what}"
        figures.add(Measure(title, "s", COMMANDS[command].get(what), 2), WEFT.name, seconds)


@contextmanager
def running_mesh(home: Path, figures: Figures) -> Iterator[None]:
    """Starts a mesh with the demo model and waits until it is ready, for the time of the body."""
    began, weft = time.monotonic(), str(PYTHON.with_name("weft"))
    command = [weft, "up", "--home", str(home), "--port", "0", "--discover=no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for step, goal in STEPS.items():
                if not any(step in line for line in process.stdout):
                    raise LaunchError(f"weft up did not print {step!r}")
                figures.add(Measure(f"`weft up`: {step!r}", "s", goal, 2), WEFT.name, time.monotonic() - began)
            yield
        finally:
            process.terminate()


def main(runs: int = 5) -> None:
    """Measures, and prints a table. The first run, which may compile modules, is not counted."""
    machine, figures = describe_machine(Path(__file__).parents[1]), Figures()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        for run in range(runs + 1):
            figures, home = figures if run > 1 else Figures(), Path(folder) / str(run)
            with running_mesh(home, figures):
                for command in COMMANDS:
                    measure_command(command, home, figures)
    print(f"{machine.commit}, {machine.date}; {machine.cpu}, {machine.cores} cores, {machine.python}; {runs} runs")
    print(f"load average {machine.load_average} before, {os.getloadavg()[0]:.2f} after\n")
    print(goal_table(figures.rows(figures.measures)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

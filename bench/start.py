"""What it costs to start weft: the help, a mesh without models' loads, and the memory of the host when idle.

CPU seconds count, beside wall seconds: on a busy machine only they say what changed.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil

from bench import measures
from bench.contender import WEFT
from bench.launch import LaunchError
from bench.report import Figures
from bench.scenarios import Options

PROGRAM = (sys.executable, "-m", "weft_app.cli.main")
LISTENING = "listening at"
START_LIMIT_SECONDS = 120.0
IDLE_SECONDS = 2.0
MEASURES = (measures.HELP_WALL, measures.HELP_CPU, measures.UP_WALL, measures.UP_CPU, measures.HOST_MEMORY)


def measure_start(options: Options, figures: Figures, folder: Path) -> None:
    """Fills the rows about starts; the first start of each kind, which may compile modules, is not counted."""
    folder.mkdir(parents=True, exist_ok=True)
    for repetition in range(options.repetitions + 1):
        values = (*_help(), *_up(folder / f"home-{repetition}"))
        if repetition:
            for measure, value in zip(MEASURES, values, strict=True):
                figures.add(measure, WEFT.name, value)


def _help() -> tuple[float, float]:
    """Wall and CPU seconds of `weft --help`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([*PROGRAM, "--help"], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _up(home: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds of the host until its services listen, and its resident MB when idle."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.monotonic()
    process = subprocess.Popen(
        [*PROGRAM, "up", "--home", str(home), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        host = psutil.Process(process.pid)
        assert process.stdout is not None
        for line in process.stdout:
            if LISTENING in line:
                times = host.cpu_times()
                wall = time.monotonic() - began
                break
            if time.monotonic() - began > START_LIMIT_SECONDS:
                raise LaunchError("weft up did not listen in time")
        else:
            raise LaunchError("weft up ended before it listened")
        time.sleep(IDLE_SECONDS)
        return wall, times.user + times.system, host.memory_info().rss / 1e6
    finally:
        process.terminate()
        process.wait(START_LIMIT_SECONDS)

"""A busy machine: a chat, `weft ps` and a load of the page while a llama.cpp engine of the same mesh generates.

The engine has its default threads, one fewer than the machine has cores. Goal: at most twice the values when idle.

    python -m bench.busy [ROUNDS]
"""

import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from bench.contender import WEFT, WEFT_STUB_CONFIG, Contender
from bench.launch import LaunchError, Target, answering, get, post, run_load, running_stub
from bench.machine import describe_machine
from bench.report import table
from bench.scenarios import UNARY_TOKENS, chat
from weft_app.compose.demo import demo_model_path

ENGINE = "smol"
MESH = replace(
    WEFT, config=f'{WEFT_STUB_CONFIG}  - {{name: engine, models: [{{name: {ENGINE}, path: "{{model}}"}}]}}\n'
)
ROOT = Path(__file__).resolve().parent.parent
SECONDS, GOAL = 2.0, 2.0
LOADED_FILE = re.compile(rb'(?:src|href)="\./([^"]+)"')


def added_latency(target: Target, stub: Target) -> float:
    """Returns what weft adds to a chat with the stub, in seconds: the difference of the medians, one connection."""
    raw, mesh = (
        run_load(side.job(chat(UNARY_TOKENS, stream=False), seconds=SECONDS), ROOT).latency_p50
        for side in (stub, target)
    )
    return (mesh - raw) / 1e3


def command_seconds(home: Path) -> float:
    """Returns how long `weft ps` takes."""
    began = time.monotonic()
    subprocess.run([Path(sys.executable).with_name("weft"), "ps", "--home", home], check=True, capture_output=True)
    return time.monotonic() - began


def page_seconds(target: Target) -> float:
    """Returns how long the page takes with the files that it names, one after another."""
    headers, began = dict(target.contender.headers), time.monotonic()
    found = LOADED_FILE.findall(get(target.port, "/ui/", headers))
    if not found:
        raise LaunchError("the page names no files")
    for path in found:
        get(target.port, f"/ui/{path.decode()}", headers)
    return time.monotonic() - began


@contextmanager
def generating(target: Target) -> Iterator[None]:
    """Keeps the engine generating meanwhile, one chat after another."""
    stop, failed = threading.Event(), list[Exception]()

    def generate() -> None:
        body = {"model": ENGINE, **chat(256, stream=False)}
        while not stop.is_set():
            try:
                post(target.port, "/v1/chat/completions", body, dict(target.contender.headers), 120.0)
            except Exception as error:  # noqa: BLE001 - told below
                failed.append(error)
                return

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise LaunchError(f"the engine did not generate: {failed[0]}")


def measure(contender: Contender, folder: Path, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the seconds of each measure, idle and busy in turns. Raises LaunchError."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    with ExitStack() as started:
        stub = started.enter_context(running_stub(ROOT, folder / "stub"))
        values = {"model": str(demo_model_path())}
        keyed, process, port = started.enter_context(answering(contender, ROOT, folder / "mesh", values))
        target = Target(contender=keyed, process=process, port=port, stub=stub.process)
        post(port, "/v1/chat/completions", {"model": ENGINE, **chat(8, stream=False)}, dict(keyed.headers), 120.0)
        measures: dict[str, Callable[[], float]] = {
            "chat, added latency": lambda: added_latency(target, stub),
            "weft ps": lambda: command_seconds(folder / "mesh" / "home"),
            "page with its files": lambda: page_seconds(target),
        }
        for _ in range(rounds):
            for side in (0, 1):
                with ExitStack() as meanwhile:
                    if side:
                        meanwhile.enter_context(generating(target))
                    for name, take in measures.items():
                        found.setdefault(name, ([], []))[side].append(take())
    return found


def main(rounds: int = 5) -> None:
    """Measures, and prints a table."""
    machine, load = describe_machine(ROOT), psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        found = measure(MESH, Path(folder), rounds)
    print(f"{machine.commit}, {machine.date}; {machine.cpu}, {machine.cores} cores; load {load:.1f}; {rounds} rounds\n")
    rows = []
    for name, (idle, busy) in found.items():
        ratio = statistics.median(busy) / statistics.median(idle)
        shown = [f"{1e3 * statistics.median(side):.1f} ms" for side in (idle, busy)]
        rows.append((name, *shown, f"{ratio:.2f}", "met" if ratio <= GOAL else "missed"))
    print(table(("measure", "idle", "busy", "ratio", f"goal: at most {GOAL:g}"), rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

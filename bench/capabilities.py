"""How long GET /v1/capabilities takes, beside GET /health of the same server: `python -m bench.capabilities`.

A registry and a runner with its HTTP surface, each a process; a fake backend, so that what is measured is the surface.
Once with nothing else to do, and once while other processes read streams through the same surface.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bench.contender import package_version
from bench.launch import Apart
from bench.machine import Machine, describe_machine

ROOT = Path(__file__).resolve().parent.parent
GOAL_MS = 5.0
"""p99 of the capability descriptor."""
PATHS = ("/v1/capabilities", "/health")
MODEL = "bench-model"
STREAMS = 4
TOKENS_PER_SECOND = 50
WARM_UP_REQUESTS = 200
READY_SECONDS = 60.0
POLL_SECONDS = 0.05
ONE_STREAM = """\
import http.client, json, sys
host, port, model = sys.argv[1:]
body = json.dumps({"model": model, "stream": True, "max_tokens": 1000, "messages": [{"role": "user", "content": "x"}]})
while True:
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    while response.read(256):
        pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One path under one load, in milliseconds: the median over the repetitions of each percentile, and the worst."""

    path: str
    load: str
    p50_ms: float
    p99_ms: float
    worst_p99_ms: float
    requests: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write bench/results/<date>-capabilities.md and .json."""
    parser = argparse.ArgumentParser(prog="python -m bench.capabilities", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of each path in one repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    machine = describe_machine(ROOT)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, running_surface(Path(folder)) as url:
        figures += measured(url, "nothing else", options.requests, options.repetitions)
        with reading_streams(url):
            figures += measured(url, f"{STREAMS} streams", options.requests, options.repetitions)
    write(options.output, machine, figures)


@contextmanager
def running_surface(folder: Path) -> Iterator[str]:
    """A registry and a runner with a surface; where that answers."""
    fake = [sys.executable, "-m", "weft_testing.fake_backend", "--tokens-per-second", str(TOKENS_PER_SECOND)]
    runner = {
        "name": "bench",
        "command": fake,
        "http_port": 0,
        "models": [{"name": MODEL, "path": __file__, "slots": 2 * STREAMS}],
    }
    with Apart(folder, json.dumps({"port": 0, "runners": [runner]})) as mesh:
        mesh.start(sys.executable, "registry")
        mesh.start(sys.executable, "runner")
        until_told(folder / "runner-2.log")
        found = re.search(r"serves at (http\S+)", (folder / "runner-2.log").read_text("utf-8"))
        assert found is not None, "the runner does not say where its surface is"
        until_loaded(found[1])
        yield found[1]


def until_told(log: Path) -> None:
    """Wait for the second line of the runner."""
    deadline = time.monotonic() + READY_SECONDS
    while log.read_text("utf-8").count("serves at") < 2 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def until_loaded(url: str) -> None:
    """Wait until the model takes requests."""
    deadline = time.monotonic() + READY_SECONDS
    while not ask(url, "/v1/capabilities").get("models", {}).get("loaded"):
        if time.monotonic() > deadline:
            raise SystemExit("the model does not load")
        time.sleep(POLL_SECONDS)


def ask(url: str, path: str) -> dict[str, dict[str, object]]:
    """The body of one answer, whatever its status."""
    with ExitStack() as stack:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        stack.callback(connection.close)
        connection.request("GET", path)
        body: dict[str, dict[str, object]] = json.loads(connection.getresponse().read())
        return body


@contextmanager
def reading_streams(url: str) -> Iterator[None]:
    """Processes that read one stream after another."""
    address = urlsplit(url)
    command = [sys.executable, "-c", ONE_STREAM, str(address.hostname), str(address.port), MODEL]
    readers = [subprocess.Popen(command) for _ in range(STREAMS)]
    try:
        time.sleep(1.0)
        yield
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def measured(url: str, load: str, requests: int, repetitions: int) -> list[Figure]:
    """Both paths in turns, on one connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    for _ in range(WARM_UP_REQUESTS):
        seconds_of(connection, PATHS[0])
    p50: dict[str, list[float]] = {path: [] for path in PATHS}
    p99: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(repetitions):
        taken: dict[str, list[float]] = {path: [] for path in PATHS}
        for _ in range(requests):
            for path in PATHS:
                taken[path].append(seconds_of(connection, path) * 1e3)
        for path, times in taken.items():
            times.sort()
            p50[path].append(times[len(times) // 2])
            p99[path].append(times[-(-len(times) * 99 // 100) - 1])
    connection.close()
    middle = repetitions // 2
    return [
        Figure(
            path=path,
            load=load,
            p50_ms=round(sorted(p50[path])[middle], 3),
            p99_ms=round(sorted(p99[path])[middle], 3),
            worst_p99_ms=round(max(p99[path]), 3),
            requests=requests * repetitions,
        )
        for path in PATHS
    ]


def seconds_of(connection: http.client.HTTPConnection, path: str) -> float:
    """How long one answer takes, until its last byte."""
    began = time.perf_counter()
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    assert response.status == 200, f"{path} answered {response.status}"
    return time.perf_counter() - began


def write(output: Path, machine: Machine, figures: Sequence[Figure]) -> None:
    """The table, to files and to the terminal."""
    lines = [
        f"# Capability descriptor, {machine.date}",
        "",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; {machine.kernel}, {machine.python}.",
        f"weft {package_version('weft')} at {machine.commit}; load average before the run {machine.load_average};",
        f"niceness of the bench and of what it measures {os.nice(0)}.",
        "",
        f"One connection, one request at a time, both paths in turns. Goal: p99 of /v1/capabilities {GOAL_MS:g} ms.",
        "",
        "| path | meanwhile | p50 ms | p99 ms | worst p99 ms | requests | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures:
        goal = "-" if row.path != PATHS[0] else "met" if row.p99_ms <= GOAL_MS else "missed"
        lines.append(
            f"| {row.path} | {row.load} | {row.p50_ms} | {row.p99_ms} | {row.worst_p99_ms} | {row.requests} | {goal} |"
        )
    text = "\n".join(lines) + "\n"
    name = f"{machine.date[:10]}-capabilities"
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.md").write_text(text, "utf-8")
    record = {"machine": msgspec.to_builtins(machine), "figures": [asdict(row) for row in figures]}
    (output / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

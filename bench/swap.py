"""What a swap of models costs beyond what it must, and what a lease costs beside a plain commit."""

import sqlite3
import statistics
import time
from pathlib import Path

import yaml

from bench import measures
from bench.contender import WEFT
from bench.launch import carried_out, own_mesh
from bench.report import Figures
from bench.scenarios import Options
from weft.client import Mesh, connect
from weft.client.leases import hold_memory
from weft.client.operations import connect_operations
from weft.documents.operation_actions import LoadSettings, load_action, unload_action
from weft_app.compose.demo import demo_model_path

FIRST, SECOND = "first", "second"
MODEL_MB = 600
LEASES = 50
COMMITS = 200
ANSWER_SECONDS = 120.0


def measure_swap(options: Options, figures: Figures, folder: Path) -> None:
    """Two copies of the demo model and room for one: ask for either in turn, and do the same by hand beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    with own_mesh(folder, FIRST, _config(folder)) as (_, home), connect(home=home) as mesh:
        for _ in range(options.repetitions):
            for asked, resident in ((SECOND, FIRST), (FIRST, SECOND)):
                swap = _first_token_seconds(mesh, asked)
                by_hand = _by_hand_seconds(mesh, home, out=asked, into=resident)
                figures.add(measures.SWAP, WEFT.name, swap)
                figures.add(measures.SWAP_BY_HAND, WEFT.name, by_hand)
                figures.add(measures.SWAP_EXTRA, WEFT.name, swap - by_hand)
                _first_token_seconds(mesh, asked)
        figures.add(measures.LEASE, WEFT.name, _lease_ms(home))
    figures.add(measures.COMMIT, "sqlite3", _commit_ms(folder / "plain.db"), "one row, synchronous=FULL, same disk")


def _config(folder: Path) -> Path:
    path = folder / "weft.yaml"
    model = {"path": str(demo_model_path()), "memory_mb": MODEL_MB, "context_tokens": 512, "slots": 1, "threads": 1}
    models = [{**model, "name": FIRST}, {**model, "name": SECOND, "start_asleep": True}]
    # Room for one of them and the margin of 512 MiB, and for the leases of _lease_ms.
    accelerators = {"declared": [{"name": "budget", "memory_mb": 512 + MODEL_MB + 200}]}
    path.write_text(yaml.safe_dump({"runners": [{"name": "box", "models": models}], "accelerators": accelerators}))
    return path


def _first_token_seconds(mesh: Mesh, model: str) -> float:
    """From the request until its first token."""
    begin = time.perf_counter()
    for event in mesh.chat(model, "Hi", max_tokens=2, timeout=ANSWER_SECONDS):
        if event.HasField("delta") and event.delta.text:
            return time.perf_counter() - begin
    raise RuntimeError(f"{model} said nothing")


def _by_hand_seconds(mesh: Mesh, home: Path, *, out: str, into: str) -> float:
    """Returns the seconds of the same swap by explicit operations: unload, load, request."""
    with connect_operations(home=home) as operations:
        begin = time.perf_counter()
        carried_out(operations, unload_action(out))
        carried_out(operations, load_action(into, LoadSettings(keep_alive=300)))
        swapped = time.perf_counter() - begin
    return swapped + _first_token_seconds(mesh, into)


def _lease_ms(home: Path) -> float:
    """Median time from asking for memory that is free until it is had: milliseconds."""
    times = []
    for _ in range(LEASES):
        begin = time.perf_counter()
        with hold_memory("1MiB", purpose="bench", home=home):
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def _commit_ms(path: Path) -> float:
    """Median time of a plain durable commit: milliseconds."""
    times = []
    with sqlite3.connect(path, isolation_level=None) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE leases (id TEXT PRIMARY KEY, data TEXT)")
        for number in range(COMMITS):
            begin = time.perf_counter()
            database.execute("INSERT INTO leases VALUES (?, ?)", (str(number), "x" * 200))
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)

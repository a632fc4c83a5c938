"""What many runner sessions cost a registry on each database: `python -m bench.registry_stores`.

The row "registry with 10,000 sessions" of the README, on SQLite and then on a PostgreSQL of the wheel pgserver, with
the settings of a durable server. It asserts nothing.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench.cpu import MB
from bench.launch import Apart
from bench.machine import describe_machine
from bench.registry import WATCHERS_OF_A_MESH, played, within
from bench.sessions import SessionJob
from weft_testing.postgres_server import SETTINGS, running_postgres

ROOT = Path(__file__).parents[1]
SQLITE, POSTGRES = "SQLite", "PostgreSQL"
DURABLE = {"fsync": "on", "full_page_writes": "on", "autovacuum": "on"}
"""What the server of tests turns off, and a mesh does not."""
COLUMNS = (
    "database",
    "all opened after, s",
    "reports/s",
    "CPU of the registry, % of a core",
    "its RSS, MB",
    "CPU of PostgreSQL, opening and all, s",
    "failures",
)


@contextmanager
def _database(store: str) -> Iterator[tuple[str, psutil.Process | None]]:
    """Yields the URL of an empty database and its server; empty: the registry's own file."""
    if store == SQLITE:
        yield "", None
        return
    with running_postgres({**SETTINGS, **DURABLE}) as server, server.fresh_database() as name:
        yield server.url(name), psutil.Process(server.pid)


def measure(store: str, sessions: int, seconds: float, folder: Path) -> str:
    """Measures one database, and returns its row. Raises LaunchError."""
    with _database(store) as (url, server):
        config = json.dumps({"port": 0, "registry": {"database_url": url} if url else {}})
        with Apart(folder / store, config) as mesh:
            process, address = mesh.start(sys.executable, "registry")
            job = SessionJob(address=address, sessions=sessions, seconds=seconds, watchers=WATCHERS_OF_A_MESH)
            before = _cpu_of(server)
            result, samples = played(job, process, ROOT)
            of_server = _cpu_of(server) - before
        samples = within(samples, result)
        first, last = samples[0], samples[-1]
        share = (last.cpu_seconds - first.cpu_seconds) / (last.at - first.at)
        rss = max(sample.rss for sample in samples) / MB
        cells = [
            store,
            f"{result.opening_seconds:.1f}",
            f"{result.heartbeats / result.wall_seconds:.0f}",
            f"{100 * share:.1f}",
            f"{rss:.0f}",
            f"{of_server:.1f}" if server else "-",
            "; ".join(f"{count} {what}" for what, count in result.failures.items()) or "0",
        ]
        return f"| {' | '.join(cells)} |"


def _cpu_of(server: psutil.Process | None) -> float:
    """Returns the CPU seconds of a server with its children, ended ones too."""
    if server is None:
        return 0.0
    times = [each.cpu_times() for each in (server, *server.children(recursive=True))]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def main() -> None:
    """Reads the command line, measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--store", choices=(SQLITE, POSTGRES), action="append", help="default: one after the other")
    given = parser.parse_args()
    machine = describe_machine(ROOT)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {machine.commit}, {machine.cpu}, {machine.cores} cores,")
    print(f"load {machine.load_average} before; Python {platform.python_version()};")
    print(f"{given.sessions} sessions, reports for {given.seconds:g} s")
    print()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for store in given.store or (SQLITE, POSTGRES):
            print(measure(store, given.sessions, given.seconds, Path(folder)), flush=True)


if __name__ == "__main__":
    main()

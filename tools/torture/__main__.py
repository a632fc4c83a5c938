"""The torture program: `python -m tools.torture --kills 1000 --tasks 10000 --seed 7`. Exit codes: `main`."""

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tools.torture.database import RunDatabase
from tools.torture.mesh import Folder, namespaces_missing, place_names
from tools.torture.network import (
    DATABASE_PORT,
    HUB,
    WITHIN,
    Network,
    NoNetworkError,
    enter_own_network,
    joined,
    network_missing,
)
from tools.torture.plan import (
    APART_WEIGHTS,
    CLOCK_WEIGHTS,
    CLUSTER_WEIGHTS,
    EVERYTHING_WEIGHTS,
    STALE_ROUTERS,
    USUAL_FREEZE_SECONDS,
    USUAL_RUNNERS,
    USUAL_WEIGHTS,
    Plan,
    Target,
)
from tools.torture.record import record
from tools.torture.run import torture
from weft_testing.postgres_server import SETTINGS, NoPostgresError, running_postgres

MAX_SEED = 2**32
USAGE = 2
INTERRUPTED = 130
SQLITE, POSTGRES = "sqlite", "postgres"


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 no violation; 1 a violation, or too few kills or tasks; 2 unusable arguments; 130 Ctrl-C.

    During the kills, the first Ctrl-C ends them: what has happened until then is checked and recorded.
    """
    given = _parser().parse_args(arguments)
    if wrong := _wrong_with(given):
        _report(wrong)
        return USAGE
    if given.apart and WITHIN not in os.environ:
        enter_own_network([sys.executable, "-m", "tools.torture", *arguments])
    seed = secrets.randbelow(MAX_SEED) if given.seed is None else given.seed
    # Under /tmp, because the path of a Unix socket must be short.
    folder = Folder(given.folder or Path(tempfile.mkdtemp(prefix="weft-torture-", dir="/tmp")))
    try:
        with ExitStack() as stack:
            plan = _plan(given, seed, given.database_url)
            network = stack.enter_context(joined(place_names(plan), folder.root / "tls")) if given.apart else None
            url, database = stack.enter_context(_database(given, folder))
            return _run(given, arguments, _plan(given, seed, url), folder, database, network)
    except (NoPostgresError, NoNetworkError) as error:
        _report(str(error))
        return USAGE


def _wrong_with(given: argparse.Namespace) -> str:
    """Returns why arguments cannot be combined, or not used here; empty: they are valid."""
    is_shared = given.store == POSTGRES or bool(given.database_url)
    faults = given.database_restarts + given.database_kills + given.database_cuts
    missing = namespaces_missing() if given.runners > USUAL_RUNNERS else ""
    no_network = network_missing() if given.apart else ""
    reasons = {
        "several routers or registries need a database that they share: add --store postgres": (
            max(given.routers, given.registries) > 1 and not is_shared
        ),
        "faults of the database need a PostgreSQL of this run: add --store postgres, without --database-url": (
            bool(faults) and (given.store == SQLITE or bool(given.database_url))
        ),
        "services apart need --store postgres, without faults of the database": (
            given.apart and (given.store == SQLITE or bool(given.database_url) or bool(faults))
        ),
        f"services cannot be apart: {no_network}": bool(no_network),
        f"there are {USUAL_RUNNERS} runners at least": given.runners < USUAL_RUNNERS,
        f"more than {USUAL_RUNNERS} runners need namespaces: {missing}": bool(missing),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


@contextmanager
def _database(given: argparse.Namespace, folder: Folder) -> Iterator[tuple[str, RunDatabase | None]]:
    """Yields the URL of a new database (empty: an SQLite file in the run's folder) and its server, if started here."""
    if given.store == SQLITE or given.database_url:
        yield given.database_url, None
        return
    settings = dict(SETTINGS)
    if given.apart:
        rules = folder.root / "pg_hba.conf"
        rules.write_text("local all all trust\nhost all all 10.78.0.0/16 trust\n")
        folder.root.chmod(0o755)
        settings |= {"listen_addresses": HUB, "port": str(DATABASE_PORT), "hba_file": str(rules)}
    with running_postgres(settings) as server, server.fresh_database() as name:
        database = RunDatabase(server, name)
        yield f"postgresql://postgres@{HUB}:{DATABASE_PORT}/{name}" if given.apart else database.url, database


def _plan(given: argparse.Namespace, seed: int, url: str) -> Plan:
    return Plan(
        seed=seed,
        kills=given.kills,
        tasks=given.tasks,
        submitters=given.submitters,
        kill_interval_seconds=given.kill_interval,
        max_minutes=given.minutes,
        max_freeze_seconds=given.max_freeze,
        database_url=url,
        is_fenced=not given.unfenced,
        routers=given.routers,
        registries=given.registries,
        runners=given.runners,
        gateways=given.gateways,
        streams=given.streams if given.gateways else 0,
        database_restarts=given.database_restarts,
        database_kills=given.database_kills,
        database_cuts=given.database_cuts,
        records_growth=given.soak,
        serves_demo=given.soak,
        weights=_weights(given, is_shared=bool(url)),
    )


def _run(
    given: argparse.Namespace,
    arguments: Sequence[str],
    plan: Plan,
    folder: Folder,
    database: RunDatabase | None,
    network: Network | None,
) -> int:
    say, began = sys.stdout.write, time.monotonic()
    say(f"seed {plan.seed}, tasks in {POSTGRES if plan.database_url else SQLITE}, under {folder.root}\n")
    sys.stdout.flush()
    try:
        outcome = asyncio.run(torture(plan, folder, _report, database, network))
    except KeyboardInterrupt:
        _report(f"stopped; what there is lies under {folder.root}")
        return INTERRUPTED
    say("\n".join(outcome.lines()) + "\n")
    if given.record is not None:
        record(given.record, outcome, arguments, (time.monotonic() - began) / 60)
    return 0 if outcome.is_good else 1


def _weights(given: argparse.Namespace, *, is_shared: bool) -> Mapping[Target, int]:
    if given.unfenced:
        return STALE_ROUTERS
    if given.apart:
        return APART_WEIGHTS
    if given.everything:
        return CLOCK_WEIGHTS if is_shared else EVERYTHING_WEIGHTS
    return CLUSTER_WEIGHTS if given.gateways else USUAL_WEIGHTS


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools.torture", allow_abbrev=False, description=__doc__)
    parser.add_argument("--kills", type=int, default=40, help="minimum number of SIGKILLs that hit a process")
    parser.add_argument("--tasks", type=int, default=400, help="minimum number of acknowledged tasks")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--submitters", type=int, default=2)
    parser.add_argument("--kill-interval", type=float, default=0.7, help="seconds between two kills, on average")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of the run")
    parser.add_argument(
        "--max-freeze", type=float, default=USUAL_FREEZE_SECONDS, help="maximum seconds for which a process is stopped"
    )
    parser.add_argument("--store", choices=(SQLITE, POSTGRES), default=SQLITE, help="the database of the routers")
    parser.add_argument("--database-url", default="", help="URL of an empty database; default: a new one of --store")
    parser.add_argument("--routers", type=int, default=1, help="more than one need --store postgres")
    parser.add_argument("--registries", type=int, default=1, help="two, of which one is a standby: --store postgres")
    parser.add_argument(
        "--gateways",
        type=int,
        default=0,
        help="over which streams run; then routers, gateways and the registry are killed, and no runner",
    )
    parser.add_argument(
        "--runners",
        type=int,
        default=USUAL_RUNNERS,
        help="more than two have a host each (`unshare --uts`)",
    )
    parser.add_argument("--streams", type=int, default=6, help="streams at once, over all gateways")
    parser.add_argument(
        "--database-restarts",
        type=int,
        default=0,
        help="how often PostgreSQL ends under everything and is started again, over the run",
    )
    parser.add_argument("--database-kills", type=int, default=0, help="the same by SIGKILL")
    parser.add_argument(
        "--database-cuts",
        type=int,
        default=0,
        help="how often the connections of one router or registry to PostgreSQL are cut for a while",
    )
    parser.add_argument(
        "--everything",
        action="store_true",
        help="with --gateways: kill runners, engines and submitters too; with PostgreSQL, clocks are set as well",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="each service in a network namespace, whose connections are cut; needs root and --store postgres",
    )
    parser.add_argument("--record", type=Path, help="Markdown file with a table, to which the run is added")
    parser.add_argument(
        "--soak",
        action="store_true",
        help="serve the demo model too, and record memory, descriptors, threads and disk, which must not grow",
    )
    parser.add_argument("--folder", type=Path, help="folder for histories and logs; default: a new one under /tmp")
    parser.add_argument(
        "--unfenced",
        action="store_true",
        help="negative control: routers without fencing; the run must FAIL with doubles",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Everything is killed for a while and nothing is lost; and were the fence away, the checker would say so."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tools.torture.checker import rules_broken
from tools.torture.database import RunDatabase
from tools.torture.history import Kind
from tools.torture.mesh import Folder
from tools.torture.network import network_missing
from tools.torture.plan import CLUSTER_WEIGHTS, EVERYTHING_WEIGHTS, STALE_ROUTERS, Plan
from tools.torture.run import Outcome, torture
from weft_testing.postgres_server import PYTHON_OF_THE_WHEEL, running_postgres

NIGHTLY = pytest.mark.nightly("kills processes for minutes")
SEED = 20261120
USUAL = Plan(seed=SEED, kills=25, tasks=250, max_minutes=3.0)
SHORT = Plan(seed=SEED, kills=8, tasks=80, max_minutes=1.5)
SMALL = Plan(seed=SEED, kills=10, tasks=100, max_minutes=2.0)
CLUSTER = Plan(
    seed=SEED,
    kills=12,
    tasks=100,
    routers=3,
    registries=2,
    gateways=2,
    streams=3,
    weights=CLUSTER_WEIGHTS,
    max_minutes=4.0,
)
CLUSTER_ON_A_FAILING_DATABASE = replace(CLUSTER, kills=6, tasks=120, database_restarts=3, database_cuts=4)
EVERYTHING = replace(CLUSTER, kills=20, tasks=120, weights=EVERYTHING_WEIGHTS, max_minutes=5.0)
STALE = Plan(
    seed=SEED,
    kills=1,
    tasks=20,
    weights=STALE_ROUTERS,
    lease_seconds=1.0,
    stop_before_end=3,
    # Longer than any answer: a revert deletes the written pieces, and a late end without them fails also unfenced.
    piece_interval_seconds=30.0,
    max_minutes=2.0,
)
"""A router that sleeps in the moment in which only the fence keeps it from ending what another one has by then."""


@pytest.fixture
def folder() -> Iterator[Folder]:
    with _new_folder() as made:
        yield made


@contextmanager
def _new_folder() -> Iterator[Folder]:
    """Directly under /tmp: the path of a socket is short."""
    with tempfile.TemporaryDirectory(prefix="weft-torture-", dir="/tmp") as root:
        yield Folder(Path(root))


def _told(outcome: Outcome) -> str:
    return "\n".join(outcome.lines())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan", [pytest.param(SHORT, marks=pytest.mark.slow("kills processes")), pytest.param(USUAL, marks=NIGHTLY)]
)
async def test_random_kills_lose_no_acknowledged_task_and_end_none_twice(folder: Folder, plan: Plan) -> None:
    outcome = await torture(plan, folder)
    assert outcome.is_good, _told(outcome)
    assert outcome.again, "no kill has ever hit a task at work"


@pytest.mark.slow("kills processes")
async def test_run_over_its_time_limit_reports_no_lost_task(folder: Folder) -> None:
    """Regression: what was submitted while the tasks were read counted as lost."""
    outcome = await torture(replace(SHORT, kills=1_000, tasks=100_000, max_minutes=0.1), folder)
    assert outcome.trouble == "kills and submitters are not done after 0.1 minutes"
    assert not outcome.violations, _told(outcome)


@NIGHTLY
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.version_info[:2] > PYTHON_OF_THE_WHEEL, reason="there is no wheel pgserver for this Python")
async def test_random_kills_on_postgresql_lose_no_acknowledged_task(folder: Folder) -> None:
    with running_postgres() as server, server.fresh_database() as name:
        outcome = await torture(replace(SMALL, database_url=server.url(name)), folder)
    assert outcome.is_good, _told(outcome)


@NIGHTLY
@pytest.mark.timeout(420)
@pytest.mark.skipif(sys.version_info[:2] > PYTHON_OF_THE_WHEEL, reason="there is no wheel pgserver for this Python")
async def test_cluster_breaks_only_streams_of_killed_gateways_and_loses_no_task(folder: Folder) -> None:
    with running_postgres() as server, server.fresh_database() as name:
        outcome = await torture(replace(CLUSTER, database_url=server.url(name)), folder)
    assert outcome.is_good, _told(outcome)
    assert outcome.events[Kind.STREAM_ENDED], _told(outcome)


@NIGHTLY
@pytest.mark.timeout(420)
@pytest.mark.skipif(sys.version_info[:2] > PYTHON_OF_THE_WHEEL, reason="there is no wheel pgserver for this Python")
async def test_database_restart_and_cutoff_cost_a_cluster_no_stream_and_no_task(folder: Folder) -> None:
    with running_postgres() as server, server.fresh_database() as name:
        database = RunDatabase(server, name)
        plan = replace(CLUSTER_ON_A_FAILING_DATABASE, database_url=database.url)
        outcome = await torture(plan, folder, database=database)
    assert outcome.is_good, _told(outcome)
    # Both is shown only if something was refused, and streams went on meanwhile.
    assert outcome.events[Kind.TURNED_AWAY], _told(outcome)
    assert outcome.events[Kind.STREAM_ENDED], _told(outcome)


@NIGHTLY
@pytest.mark.timeout(420)
async def test_killed_engines_and_runners_cost_only_the_streams_that_they_had_begun(folder: Folder) -> None:
    outcome = await torture(replace(EVERYTHING, routers=1, registries=1), folder)
    assert outcome.is_good, _told(outcome)
    assert outcome.events[Kind.STREAM_ENDED], _told(outcome)


@NIGHTLY
@pytest.mark.timeout(420)
@pytest.mark.skipif(sys.version_info[:2] > PYTHON_OF_THE_WHEEL, reason="there is no wheel pgserver for this Python")
def test_partitions_of_any_two_services_lose_no_task_and_end_none_twice(folder: Folder) -> None:
    """In a process of its own, because it enters another network namespace."""
    if missing := network_missing():
        pytest.skip(f"services cannot be apart here: {missing}")
    mesh = ("--routers", "2", "--registries", "2", "--gateways", "1", "--streams", "2", "--store", "postgres")
    size = ("--kills", "12", "--tasks", "80", "--seed", str(SEED), "--minutes", "5", "--folder", str(folder.root))
    command = [sys.executable, "-m", "tools.torture", "--apart", *mesh, *size]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


@NIGHTLY
@pytest.mark.timeout(180)
async def test_router_asleep_longer_than_its_leases_ends_no_task_of_another(folder: Folder) -> None:
    outcome = await torture(STALE, folder)
    assert outcome.is_good, _told(outcome)
    assert outcome.events[Kind.LEASE_LOST], _told(outcome)


@NIGHTLY
@pytest.mark.timeout(180)
async def test_checker_detects_duplicates_without_fencing(folder: Folder) -> None:
    outcome = await torture(replace(STALE, is_fenced=False), folder)
    assert not outcome.shortfalls, _told(outcome)
    # Not only cancels that came twice: an end was written by somebody whose claim was over.
    late = ("had been given up", "had lost its lease")
    assert any(word in violation.detail for violation in outcome.violations for word in late), _told(outcome)
    assert rules_broken(outcome.violations)["double"], _told(outcome)

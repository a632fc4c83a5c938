"""What placing costs with one, two and three routers: `python -m bench.router_scaling`.

A registry, routers that are pinned to one core each (in turns, where there are fewer cores), runner sessions on hosts
of their own without engines, and callers, each a process, that place requests and end them at once. So each pool is a
scheduling domain, and what is measured is placing over gRPC. It asserts nothing.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import uvloop

from bench.machine import describe_machine
from bench.router_failover import Process
from bench.sessions import Crowd, SessionJob
from weft.dispatch.domains import DomainOwners
from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.placement import Grant, PlacementRequest
from weft.dispatch.remote_router import RemotePlacement
from weft.dispatch.router_links import RouterLinks
from weft.dispatch.routers_placement import RoutersPlacement
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import open_channel
from weft.kernel.telemetry import configure_logging

ROOT = Path(__file__).parents[1]
CONCURRENCY = 32
WARM_UP_SECONDS = 12.0
"""Until all callers run: each is a Python that starts, connects, and learns of all sessions."""
IDLE_SECONDS = 5.0
POLL_SECONDS = 0.05
COLUMNS = (
    "routers",
    "domains of each",
    "placements/s",
    "share of each",
    "CPU per placement, us",
    "busy, of each",
    "busy without requests",
    "failed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One number of routers."""

    domains: Sequence[int]
    """Domains that each router owns."""
    placed: Sequence[int]
    cpu_seconds: Sequence[float]
    idle_shares: Sequence[float]
    """Part of a core that each router takes while there are no requests."""
    seconds: float
    failed: int

    @property
    def row(self) -> str:
        """A row of the table."""
        total = sum(self.placed)
        cells = [
            str(len(self.placed)),
            ", ".join(map(str, self.domains)),
            f"{total / self.seconds:.0f}",
            ", ".join(f"{100 * each / total:.0f} %" for each in self.placed),
            f"{1e6 * sum(self.cpu_seconds) / total:.0f}",
            ", ".join(f"{100 * each / self.seconds:.0f} %" for each in self.cpu_seconds),
            ", ".join(f"{100 * each:.1f} %" for each in self.idle_shares),
            str(self.failed),
        ]
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerJob:
    """What one caller does. Times are `time.time()`: all callers count over the same ones."""

    registry: str
    pools: Sequence[str]
    routers: int
    begin_at: float
    """It places from its start on, and counts from here."""
    end_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerCounts:
    """What one caller found."""

    placed: Counter[str]
    """Grants, by the name of the router."""
    failures: Counter[str]
    was_late: bool
    """Whether it could not place yet when counting began."""


class Load:
    """Places requests for every pool in turns, and ends each as soon as it is granted."""

    def __init__(self, fleet: FleetWatcher, links: RouterLinks, placement: RoutersPlacement) -> None:
        self._fleet = fleet
        self._links = links
        self._placement = placement
        self._owners = DomainOwners()
        self._number = 0
        self.placed: Counter[str] = Counter()
        """Grants, by the name of the router."""
        self.failures: Counter[str] = Counter()

    async def run(self, pools: Sequence[str], until: float) -> None:
        """Runs until a time of `time.time()`."""
        await asyncio.gather(*(self._work(pools, until) for _ in range(CONCURRENCY)))

    async def _work(self, pools: Sequence[str], until: float) -> None:
        while time.time() < until:
            self._number += 1
            pool = pools[self._number % len(pools)]
            try:
                await self._place(f"bench-{os.getpid()}-{self._number}", pool)
            except WeftError as error:
                self.failures[error.reason.name] += 1
            else:
                self.placed[self.owner_of(pool)] += 1

    def owner_of(self, pool: str) -> str:
        """Returns the name of the router that owns a pool."""
        owner = self._owners.owner(self._fleet.view, pool, self._links.unreachable)
        return "" if owner is None else owner.name

    async def _place(self, request_id: str, pool: str) -> None:
        request = PlacementRequest(request_id=request_id, tenant="bench", model=pool, operation=Operation.CHAT)
        async with self._placement.place(request) as place:
            while not isinstance(decision := await place.next_decision(), Grant):
                pass
            await place.report_first_content(decision.attempt)
            await place.report_finished(Reason.UNSPECIFIED)


async def measure(routers: int, pools: int, callers: int, seconds: float, folder: Path) -> Round:
    """Measures one number of routers. Raises TimeoutError where callers are not ready in time."""
    names = [f"router-{number}" for number in range(1, routers + 1)]
    wanted = [f"pool-{number}" for number in range(pools)]
    with _services(names, folder) as (registry, processes):
        crowd = Crowd(SessionJob(address=registry, sessions=pools, seconds=seconds + WARM_UP_SECONDS + IDLE_SECONDS))
        await crowd.open()
        beating = asyncio.create_task(crowd.beat())
        try:
            async with _dispatcher(registry, pools, routers) as load:
                owned = Counter(map(load.owner_of, wanted))
                idle = await _cpu_until(time.time() + IDLE_SECONDS, processes)
            begin = time.time() + WARM_UP_SECONDS
            job = CallerJob(registry=registry, pools=wanted, routers=routers, begin_at=begin, end_at=begin + seconds)
            counting = asyncio.create_task(_called(job, callers))
            await asyncio.sleep(begin - time.time())
            used = await _cpu_until(job.end_at, processes)
            counts = await counting
        finally:
            beating.cancel()
            await crowd.close()
    if any(each.was_late for each in counts):
        raise TimeoutError(f"a caller was not ready within {WARM_UP_SECONDS:g} s")
    placed = sum((each.placed for each in counts), Counter[str]())
    return Round(
        domains=[owned[name] for name in names],
        placed=[placed[name] for name in names],
        cpu_seconds=used,
        idle_shares=[each / IDLE_SECONDS for each in idle],
        seconds=seconds,
        failed=sum(each.failures.total() for each in counts),
    )


@contextmanager
def _services(names: Sequence[str], folder: Path) -> Iterator[tuple[str, Sequence[psutil.Process]]]:
    """A registry and these routers, each on a core: the registry's address, and the processes of the routers."""
    with ExitStack() as ends:
        registry = Process(folder / "registry", "registry", {})
        addresses = {"addresses": {"registry": f"unix:{folder}/registry/home/run/registry.sock"}}
        members = [Process(folder / name, "router", {"router": {"name": name}, **addresses}) for name in names]
        for each in (registry, *members):
            ends.callback(each.end)
            each.start()
        cores = sorted(os.sched_getaffinity(0))
        processes = [psutil.Process(each.pid) for each in members]
        for number, process in enumerate(processes):
            process.cpu_affinity([cores[number % len(cores)]])
        yield registry.address, processes


async def _cpu_until(end_at: float, processes: Sequence[psutil.Process]) -> list[float]:
    """Waits until this time of `time.time()`; returns the CPU seconds of each process over the wait."""
    before = [_cpu_of(each) for each in processes]
    await asyncio.sleep(end_at - time.time())
    return [_cpu_of(each) - past for each, past in zip(processes, before, strict=True)]


async def _called(job: CallerJob, callers: int) -> list[CallerCounts]:
    """Runs the callers, each in a process of its own."""
    with ProcessPoolExecutor(callers, mp_context=multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(pool, call, job) for _ in range(callers)))


def call(job: CallerJob) -> CallerCounts:
    """Places requests until the job ends. It is what the process of a caller does."""
    return uvloop.run(_call(job))


async def _call(job: CallerJob) -> CallerCounts:
    configure_logging("bench", level="warning", file=None)
    async with _dispatcher(job.registry, len(job.pools), job.routers) as load:
        await load.run(job.pools, job.begin_at)
        was_late = not load.placed
        load.placed.clear()
        load.failures.clear()
        await load.run(job.pools, job.end_at)
        return CallerCounts(placed=load.placed, failures=load.failures, was_late=was_late)


@asynccontextmanager
async def _dispatcher(registry: str, pools: int, routers: int) -> AsyncIterator[Load]:
    """A dispatcher that knows all routers, and the sessions of all runners."""
    async with open_channel(registry) as channel:
        clock = SystemClock()
        fleet, links = FleetWatcher(channel, clock), RouterLinks(clock)
        fleet.subscribe(links.update_view)
        await fleet.start()
        try:
            # Processes are asked: there is no event of theirs to wait for.
            while len(fleet.view.routers) < routers or len(fleet.view.models) < pools:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            yield Load(fleet, links, RoutersPlacement(fleet, links, RemotePlacement(channel)))
        finally:
            await fleet.stop()
            await links.close()


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Reads the command line, measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, default=3, help="the largest number of routers")
    parser.add_argument("--pools", type=int, default=60, help="each is a scheduling domain; at most 100")
    parser.add_argument("--callers", type=int, default=1, help="processes that place requests")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    configure_logging("bench", level="warning", file=None)
    machine = describe_machine(ROOT)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {machine.commit}, {machine.cpu}, {machine.cores} cores,")
    print(f"load {machine.load_average} before; Python {platform.python_version()}; {given.pools} domains,")
    print(
        f"{given.callers} callers with {CONCURRENCY} requests at once, {given.seconds:g} s for each number of routers"
    )
    print()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for routers in range(1, given.routers + 1):
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            print(uvloop.run(measure(routers, given.pools, given.callers, given.seconds, Path(folder))).row, flush=True)


if __name__ == "__main__":
    main()

"""How many requests a leader places: `python -m bench.leader_placements`.

A registry, a router that is pinned to a core, runner sessions without engines, and callers, each a process, that place
requests and end them at once: what is measured is placing over gRPC. It asserts nothing.
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
from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.leader_placement import LeaderPlacement
from weft.dispatch.placement import Grant
from weft.dispatch.remote_router import RemotePlacement
from weft.dispatch.router_links import RouterLinks
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.placement_request import PlacementRequest
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
COLUMNS = ("callers", "placements/s", "CPU per placement, us", "busy", "busy without requests", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One number of callers."""

    callers: int
    placed: int
    cpu_seconds: float
    idle_share: float
    """Part of a core that the router takes while there are no requests."""
    seconds: float
    failed: int

    @property
    def row(self) -> str:
        """A row of the table."""
        cells = [
            str(self.callers),
            f"{self.placed / self.seconds:.0f}",
            f"{1e6 * self.cpu_seconds / self.placed:.0f}",
            f"{100 * self.cpu_seconds / self.seconds:.0f} %",
            f"{100 * self.idle_share:.1f} %",
            str(self.failed),
        ]
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerJob:
    """What one caller does. Times are `time.time()`: all callers count over the same ones."""

    registry: str
    pools: Sequence[str]
    begin_at: float
    """It places from its start on, and counts from here."""
    end_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerCounts:
    """What one caller found."""

    placed: int
    failures: Counter[str]
    was_late: bool
    """Whether it could not place yet when counting began."""


class Load:
    """Places requests for every pool in turns, and ends each as soon as it is granted."""

    def __init__(self, placement: LeaderPlacement) -> None:
        self._placement = placement
        self._number = 0
        self.placed = 0
        """Grants."""
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
                self.placed += 1

    async def _place(self, request_id: str, pool: str) -> None:
        request = PlacementRequest(request_id=request_id, tenant="bench", model=pool, operation=Operation.CHAT)
        async with self._placement.place(request) as place:
            while not isinstance(decision := await place.next_decision(), Grant):
                pass
            await place.report_first_content(decision.attempt)
            await place.report_finished(Reason.UNSPECIFIED)


async def measure(pools: int, callers: int, seconds: float, folder: Path) -> Round:
    """Measures one number of callers. Raises TimeoutError where callers are not ready in time."""
    wanted = [f"pool-{number}" for number in range(pools)]
    with _services(folder) as (registry, router):
        crowd = Crowd(SessionJob(address=registry, sessions=pools, seconds=seconds + WARM_UP_SECONDS + IDLE_SECONDS))
        await crowd.open()
        beating = asyncio.create_task(crowd.beat())
        try:
            async with _dispatcher(registry, pools):
                idle = await _cpu_until(time.time() + IDLE_SECONDS, router)
            begin = time.time() + WARM_UP_SECONDS
            job = CallerJob(registry=registry, pools=wanted, begin_at=begin, end_at=begin + seconds)
            counting = asyncio.create_task(_called(job, callers))
            await asyncio.sleep(begin - time.time())
            used = await _cpu_until(job.end_at, router)
            counts = await counting
        finally:
            beating.cancel()
            await crowd.close()
    if any(each.was_late for each in counts):
        raise TimeoutError(f"a caller was not ready within {WARM_UP_SECONDS:g} s")
    return Round(
        callers=callers,
        placed=sum(each.placed for each in counts),
        cpu_seconds=used,
        idle_share=idle / IDLE_SECONDS,
        seconds=seconds,
        failed=sum(each.failures.total() for each in counts),
    )


@contextmanager
def _services(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A registry, and a router on a core of its own: the registry's address, and the router's process."""
    with ExitStack() as ends:
        registry = Process(folder / "registry", "registry", {})
        addresses = {"addresses": {"registry": f"unix:{folder}/registry/home/run/registry.sock"}}
        router = Process(folder / "router", "router", addresses)
        for each in (registry, router):
            ends.callback(each.end)
            each.start()
        first, *others = sorted(os.sched_getaffinity(0))
        process = psutil.Process(router.pid)
        process.cpu_affinity([first])
        if others:
            for pid in (registry.pid, os.getpid()):
                os.sched_setaffinity(pid, others)
        yield registry.address, process


async def _cpu_until(end_at: float, process: psutil.Process) -> float:
    """Waits until this time of `time.time()`; returns the CPU seconds of a process over the wait."""
    before = _cpu_of(process)
    await asyncio.sleep(end_at - time.time())
    return _cpu_of(process) - before


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
    async with _dispatcher(job.registry, len(job.pools)) as load:
        await load.run(job.pools, job.begin_at)
        was_late = not load.placed
        load.placed = 0
        load.failures.clear()
        await load.run(job.pools, job.end_at)
        return CallerCounts(placed=load.placed, failures=load.failures, was_late=was_late)


@asynccontextmanager
async def _dispatcher(registry: str, pools: int) -> AsyncIterator[Load]:
    """A dispatcher that knows the router, and the sessions of all runners."""
    async with open_channel(registry) as channel:
        clock = SystemClock()
        fleet, links = FleetWatcher(channel, clock), RouterLinks(clock)
        fleet.subscribe(links.update_view)
        await fleet.start()
        try:
            # Processes are asked: there is no event of theirs to wait for.
            while not fleet.view.routers or len(fleet.view.models) < pools:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            yield Load(LeaderPlacement(fleet, links, RemotePlacement(channel)))
        finally:
            await fleet.stop()
            await links.close()


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Reads the command line, measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=60, help="at most 100")
    parser.add_argument("--callers", type=int, default=2, help="the largest number of processes that place requests")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    configure_logging("bench", level="warning", file=None)
    machine = describe_machine(ROOT)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {machine.commit}, {machine.cpu}, {machine.cores} cores,")
    print(f"load {machine.load_average} before; Python {platform.python_version()}; {given.pools} pools,")
    print(f"callers with {CONCURRENCY} requests at once each, {given.seconds:g} s for each number of them")
    print()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for callers in range(1, given.callers + 1):
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            print(uvloop.run(measure(given.pools, callers, given.seconds, Path(folder))).row, flush=True)


if __name__ == "__main__":
    main()

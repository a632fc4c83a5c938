"""What placing costs with one, two and three routers: `python -m bench.router_scaling`.

A registry, routers that are pinned to one core each (in turns, where there are fewer cores), runner sessions on hosts
of their own without engines, and a dispatcher in this process that places requests and ends them at once. So each
pool is a scheduling domain, and what is measured is placing over gRPC. It asserts nothing.
"""

import argparse
import asyncio
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
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
WARM_UP_SECONDS = 3.0
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

    async def run(self, pools: Sequence[str], seconds: float) -> None:
        """Runs for a time."""
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._work(pools, until) for _ in range(CONCURRENCY)))

    async def _work(self, pools: Sequence[str], until: float) -> None:
        while time.perf_counter() < until:
            self._number += 1
            pool = pools[self._number % len(pools)]
            try:
                await self._place(f"bench-{self._number}", pool)
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


async def measure(routers: int, pools: int, seconds: float, folder: Path) -> Round:
    """Measures one number of routers."""
    with ExitStack() as ends:
        registry = Process(folder / "registry", "registry", {})
        addresses = {"addresses": {"registry": f"unix:{folder}/registry/home/run/registry.sock"}}
        names = [f"router-{number}" for number in range(1, routers + 1)]
        members = [Process(folder / name, "router", {"router": {"name": name}, **addresses}) for name in names]
        for each in (registry, *members):
            ends.callback(each.end)
            each.start()
        cores = sorted(os.sched_getaffinity(0))
        processes = [psutil.Process(each.pid) for each in members]
        for number, process in enumerate(processes):
            process.cpu_affinity([cores[number % len(cores)]])
        async with AsyncExitStack() as stack:
            load = await _dispatcher(stack, registry.address, pools, routers, seconds)
            wanted = [f"pool-{number}" for number in range(pools)]
            before, began = [_cpu_of(each) for each in processes], time.perf_counter()
            await asyncio.sleep(IDLE_SECONDS)
            idle = [
                (_cpu_of(each) - earlier) / (time.perf_counter() - began)
                for each, earlier in zip(processes, before, strict=True)
            ]
            await load.run(wanted, WARM_UP_SECONDS)
            load.placed.clear()
            load.failures.clear()
            before, began = [_cpu_of(each) for each in processes], time.perf_counter()
            await load.run(wanted, seconds)
            took = time.perf_counter() - began
            used = [_cpu_of(each) - earlier for each, earlier in zip(processes, before, strict=True)]
            owned = Counter(map(load.owner_of, wanted))
            return Round(
                domains=[owned[name] for name in names],
                placed=[load.placed[name] for name in names],
                cpu_seconds=used,
                idle_shares=idle,
                seconds=took,
                failed=load.failures.total(),
            )


async def _dispatcher(stack: AsyncExitStack, registry: str, pools: int, routers: int, seconds: float) -> Load:
    """Returns a dispatcher that knows all routers, and the sessions of all runners."""
    crowd = Crowd(SessionJob(address=registry, sessions=pools, seconds=seconds + WARM_UP_SECONDS + IDLE_SECONDS))
    await crowd.open()
    stack.push_async_callback(crowd.close)
    beating = asyncio.create_task(crowd.beat())
    stack.callback(beating.cancel)
    channel = await stack.enter_async_context(open_channel(registry))
    clock = SystemClock()
    fleet, links = FleetWatcher(channel, clock), RouterLinks(clock)
    fleet.subscribe(links.update_view)
    await fleet.start()
    stack.push_async_callback(fleet.stop)
    stack.push_async_callback(links.close)
    while len(fleet.view.routers) < routers or len(fleet.view.models) < pools:  # noqa: ASYNC110 - processes are asked
        await asyncio.sleep(POLL_SECONDS)
    return Load(fleet, links, RoutersPlacement(fleet, links, RemotePlacement(channel)))


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Reads the command line, measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, default=3, help="the largest number of routers")
    parser.add_argument("--pools", type=int, default=60, help="each is a scheduling domain; at most 100")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    configure_logging("bench", level="warning", file=None)
    machine = describe_machine(ROOT)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {machine.commit}, {machine.cpu}, {machine.cores} cores,")
    print(f"load {machine.load_average} before; Python {platform.python_version()}; {given.pools} domains,")
    print(f"{CONCURRENCY} requests at once, {given.seconds:g} s for each number of routers")
    print()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for routers in range(1, given.routers + 1):
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            print(uvloop.run(measure(routers, given.pools, given.seconds, Path(folder))).row, flush=True)


if __name__ == "__main__":
    main()

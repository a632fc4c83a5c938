"""CPU time that keeping records adds to one request: `python -m bench.kept_records`. Prints a table; asserts nothing.

What a router does with the record of a unary chat, from its arrival to its end, and, where records are kept, its share
in the writes to the database: batches as they come at 500 requests per second, with the threads that write them. The
same without a writer is measured beside it, in turns. What PostgreSQL itself computes is not included.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.machine import describe_machine
from router_svc.durable.limits import RecordLimits
from router_svc.durable.records import RecordService
from router_svc.durable.request_records import Writer
from router_svc.loop import RouterRecords
from router_svc.policy.decisions import Placed
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.choice import Choice, Considered
from router_svc.policy.queue.fair_share import FairShare
from router_svc.policy.request import Request
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.clock import SystemClock
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft_testing.postgres_server import running_postgres

ROOT = Path(__file__).resolve().parent.parent
PER_WRITE = 1_000
"""Requests of 2 s, which is `flush_interval_seconds`, at 500 per second."""
WRITES = 5
REPETITIONS = 9
SINGLE_WRITES = 50
TENANTS = 4
RARELY = 1e9
UNARY_MICROSECONDS = 2_910.0
"""CPU time of one unary chat through a mesh: bench/results/2026-11-22-records.md, this kind of machine."""
GOAL_PERCENT = 5.0
VIEW = FleetView(revision=1)
_CANDIDATE = Candidate(
    model="qwen3-8b",
    pool="qwen3-8b",
    runner="titan",
    incarnation="run-1",
    readiness=Readiness.READY,
    slots=64,
    operations=frozenset({Operation.CHAT}),
)
_OTHER = Considered(model="qwen3-8b", runner="atlas", score=0.25, gate="all 4 slots are busy")


def receipt_of(request_id: str) -> receipt_pb2.Receipt:
    """The receipt of a usual answer."""
    receipt = receipt_pb2.Receipt(
        request_id=request_id,
        outcome=receipt_pb2.OUTCOME_COMPLETED,
        model="qwen3-8b",
        model_digest=f"sha256:{'0' * 64}",
        host="titan",
        tokens_per_second=87.5,
    )
    receipt.attempts.add(runner="titan", runner_incarnation="run-1", model="qwen3-8b")
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 120, 16
    for field in (receipt.queue_wait, receipt.time_to_first_token, receipt.total_time, receipt.gpu_time):
        field.FromMicroseconds(183_512)
    return receipt


class Router:
    """The records of one router, with or without a writer."""

    def __init__(self, url: str | None) -> None:
        self.clock = SystemClock()
        self.records = RouterRecords.empty(self.clock)
        self.shares = FairShare(lambda _tenant: 1.0, max_lag=1e9, max_remembered=1_000)
        settings = RecordLimits(
            flush_interval_seconds=RARELY, state_interval_seconds=RARELY, sweep_interval_seconds=RARELY
        )
        self.service = None
        if url is not None:
            database, writer = RouterDatabase(url), Writer.of("bench")
            self.service = RecordService(database, writer, self.records, self.shares, settings, self.clock)
        self._next = 0

    async def start(self) -> None:
        """Opens the database."""
        if self.service is not None:
            await self.service.start()

    async def stop(self) -> None:
        """Closes it."""
        if self.service is not None:
            await self.service.stop(0.0)

    def request(self) -> None:
        """One request, as the scheduling loop records it."""
        self._next += 1
        key, request_id, records = self._next, f"req-{self._next:024x}", self.records
        request = PlacementRequest(
            request_id=request_id,
            tenant=f"tenant-{key % TENANTS}",
            model="qwen3-8b",
            operation=Operation.CHAT,
            client_id="bench",
            caller="key:0123456789",
        )
        now = self.clock.monotonic()
        records.requests.note_arrival(Request.of(key, request, now), self.clock.utc_now())
        records.clients.admit(key, request)
        self.shares.enter(request.tenant)
        choice = Choice(candidate=_CANDIDATE, policy="least_loaded", score=0.75, others=(_OTHER,), count=2)
        records.requests.note_decisions([Placed(key=key, candidate=_CANDIDATE, attempt=1, choice=choice)], now)
        charged = self.shares.charge(request.tenant, 136.0)
        receipt = receipt_of(request_id)
        records.requests.note_end(key, now, Reason.UNSPECIFIED, receipt)
        records.clients.note_end(key, receipt)
        records.figures.note_end(request, Reason.UNSPECIFIED, receipt, VIEW, now)
        self.shares.correct(request.tenant, charged, 136.0)
        self.shares.leave(request.tenant)

    async def of_one_write(self) -> float:
        """CPU time of the writes that follow one request alone, in microseconds."""
        assert self.service is not None, "it keeps its records"
        self.request()
        began = time.process_time()
        await self.service.flush()
        await self.service.flush_state()
        return (time.process_time() - began) * 1e6

    async def microseconds(self) -> float:
        """CPU time of all threads of this process for one request."""
        began = time.process_time()
        for _ in range(WRITES):
            for _ in range(PER_WRITE):
                self.request()
            if self.service is not None:
                await self.service.flush()
                await self.service.flush_state()
        return (time.process_time() - began) * 1e6 / (WRITES * PER_WRITE)


async def measured(urls: dict[str, str | None]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The CPU times of each kind, measured in turns, and those of the writes for one request alone."""
    routers = {name: Router(url) for name, url in urls.items()}
    found: dict[str, list[float]] = {name: [] for name in routers}
    for router in routers.values():
        await router.start()
        await router.microseconds()
    for turn in range(REPETITIONS):
        order = list(routers) if turn % 2 else list(reversed(routers))
        for name in order:
            found[name].append(await routers[name].microseconds())
    alone = {
        name: median([await router.of_one_write() for _ in range(SINGLE_WRITES)])
        for name, router in routers.items()
        if router.service is not None
    }
    for router in routers.values():
        await router.stop()
    return found, alone


def main() -> None:
    """Measure and print."""
    machine = describe_machine(ROOT)
    with tempfile.TemporaryDirectory() as folder, running_postgres() as server, server.fresh_database() as name:
        urls = {
            "not kept": None,
            "kept, SQLite": f"sqlite:///{folder}/router.db",
            "kept, PostgreSQL": server.url(name),
        }
        runs, alone = asyncio.run(measured(urls))
        size = sum(each.stat().st_size for each in Path(folder).iterdir())
    count = (REPETITIONS + 1) * WRITES * PER_WRITE
    lines = [
        "# CPU time of keeping records for one request",
        "",
        f"- commit: {machine.commit}",
        f"- machine: {machine.cpu}, {machine.cores} cores; {machine.kernel}; {machine.python}",
        f"- measured at {machine.date}; load average before the run: {machine.load_average:.2f}",
        f"- median of {REPETITIONS} runs of {WRITES * PER_WRITE:,} requests in {WRITES} writes, in turns",
        "- `more`: median of the differences to `not kept`",
        f"- `of a chat`: of {UNARY_MICROSECONDS:,.0f} us, a unary chat through a mesh; goal: {GOAL_PERCENT:g} %",
        "- `alone`: the writes that follow a single request, at most one every two seconds",
        f"- SQLite: {size / count:,.0f} bytes on disk per request, indexes and log included",
        "",
        "| records | CPU | more | of a chat | alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, found in runs.items():
        more = median(own - off for own, off in zip(found, runs["not kept"], strict=True))
        part = 100 * more / UNARY_MICROSECONDS
        single = f"{alone[kind] / 1e3:.1f} ms" if kind in alone else "-"
        lines.append(f"| {kind} | {median(found):.1f} us | {more:+.1f} us | {part:+.1f} % | {single} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

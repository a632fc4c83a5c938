"""Usage in a router's database: it adds up with the receipts, over kills of routers and whatever becomes of tasks."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from kit.request_endings import ending
from kit.scheduling import placement_request
from stored_tasks import CRASH, LANE, LEASE, NOW, a_task
from typing_extensions import override

from router_svc.durable.limits import UsageLimits
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, TaskLease, TaskOutcome
from router_svc.durable.usage import UsageService
from router_svc.policy.usage_rows import OTHER
from router_svc.store.database import RouterDatabase
from router_svc.usage import COLUMNS, UsageRecorder
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import task_pb2, usage_pb2
from weft.api.router.v1 import usage_service_pb2 as pb
from weft.dispatch.fleet import FleetView
from weft.durable.tasks import task_error
from weft.durable.usage import GROUPS
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import stamp_of
from weft.sql.store import T, Work
from weft_testing.fake_clock import FakeClock, let_all_run

pytest_plugins = ("database_fixtures",)

STEPS = 250
TENANTS = ("ann", "bob")
OUTCOMES = (
    receipt_pb2.OUTCOME_COMPLETED,
    receipt_pb2.OUTCOME_FAILED,
    receipt_pb2.OUTCOME_CANCELLED,
    receipt_pb2.OUTCOME_REJECTED,
)
_STATES = {
    receipt_pb2.OUTCOME_COMPLETED: task_pb2.TASK_STATE_COMPLETED,
    receipt_pb2.OUTCOME_FAILED: task_pb2.TASK_STATE_FAILED,
}
Sums = Counter[str]


class Router:
    """One process of a router: its task store, its recorder of live requests, and the usage that it writes."""

    def __init__(self, url: str, *, database: RouterDatabase | None = None, **settings: Any) -> None:
        self.clock = FakeClock(utc=datetime.fromtimestamp(NOW, UTC))
        self.database = database or RouterDatabase(url)
        self.store = SqlTaskStore(self.database)
        self.recorder = UsageRecorder(self.clock)
        self.usage = UsageService(self.database, self.recorder, UsageLimits(**settings), clock=self.clock)

    async def start(self) -> None:
        await self.usage.start()
        await self.store.start()

    async def stop(self) -> None:
        await self.store.stop()
        await self.usage.stop(0.0)

    async def kill(self) -> None:
        """Ends it without its last write: what the recorder has is lost."""
        self.recorder.take()
        await self.stop()

    def live_end(self, receipt: receipt_pb2.Receipt, tenant: str, *labels: str) -> None:
        request = placement_request("r", tenant=tenant, model="demo", caller="key:live", labels=frozenset(labels))
        self.recorder.note_end(ending(request, receipt=receipt, view=FleetView()))

    async def listed(self, *by: str, **bounds: Any) -> pb.ListUsageResponse:
        return await self.usage.store.usage(pb.ListUsageRequest(by=[GROUPS[word] for word in by], **bounds))


def a_receipt(chance: random.Random, outcome: "receipt_pb2.Outcome.ValueType") -> receipt_pb2.Receipt:
    """Of an attempt with or without known tokens and accelerator time, here or elsewhere."""
    receipt = receipt_pb2.Receipt(outcome=outcome, model="demo")
    if outcome != receipt_pb2.OUTCOME_REJECTED:
        receipt.attempts.add(runner="r1", model="demo")
        receipt.left_premises = chance.random() < 0.2
        if chance.random() < 0.7:
            receipt.usage.prompt_tokens, receipt.usage.completion_tokens = chance.randrange(99), chance.randrange(99)
            receipt.usage.cached_prompt_tokens = chance.randrange(9)
        if chance.random() < 0.5:
            receipt.gpu_time.FromNanoseconds(chance.randrange(10**9))
        if chance.random() < 0.3:
            receipt.usage.image_steps, receipt.usage.image_pixels = chance.randrange(99), chance.randrange(10**7)
            receipt.usage.audio_milliseconds = chance.randrange(10**6)
        if chance.random() < 0.3:
            receipt.device_usage.energy_millijoules = chance.randrange(10**6)
        if chance.random() < 0.3:
            receipt.price_nanodollars = chance.randrange(10**6)
    return receipt


def sums_of(receipts: Iterable[receipt_pb2.Receipt]) -> Sums:
    """The sums over receipts, written without the code that is tested."""
    sums: Sums = Counter()
    for receipt in receipts:
        sums["prompt_tokens"] += receipt.usage.prompt_tokens
        sums["cached_prompt_tokens"] += receipt.usage.cached_prompt_tokens
        sums["completion_tokens"] += receipt.usage.completion_tokens
        for name in ("image_steps", "image_pixels", "audio_milliseconds"):
            sums[name] += getattr(receipt.usage, name)
        sums["gpu"] += receipt.gpu_time.ToNanoseconds()
        sums["unknown_gpu_count"] += bool(receipt.attempts) and not receipt.HasField("gpu_time")
        sums["unknown_tokens_count"] += bool(receipt.attempts) and not receipt.HasField("usage")
        sums["energy_millijoules"] += receipt.device_usage.energy_millijoules
        sums["measured_energy_count"] += receipt.device_usage.HasField("energy_millijoules")
        sums["price_nanodollars"] += receipt.price_nanodollars
        sums["priced_count"] += receipt.HasField("price_nanodollars")
        if receipt.left_premises:
            sums["remote_count"] += 1
            sums["remote_prompt_tokens"] += receipt.usage.prompt_tokens
            sums["remote_completion_tokens"] += receipt.usage.completion_tokens
    return +sums


def counted(counts: usage_pb2.UsageCounts) -> Sums:
    """The same of what is counted, outcomes left out."""
    sums: Sums = Counter({name: getattr(counts, name) for name in _EXCEPT_OUTCOMES})
    sums["gpu"] = counts.gpu_time.ToNanoseconds()
    return +sums


_OUTCOME_COUNTS = ("completed_count", "failed_count", "cancelled_count", "rejected_count", "retried_count")
_EXCEPT_OUTCOMES = [
    field.name
    for field in usage_pb2.UsageCounts.DESCRIPTOR.fields
    if field.name not in {*_OUTCOME_COUNTS, "unknown_count", "gpu_time"}
]


async def kept_receipts(database: RouterDatabase) -> tuple[list[receipt_pb2.Receipt], int]:
    """The receipts of all attempts of ended tasks in the database, and how many ended without one."""
    ended = "SELECT id FROM tasks WHERE state > 2"
    rows = await database.rows(f"SELECT * FROM task_attempts WHERE task_id IN ({ended})")
    return [receipt_pb2.Receipt.FromString(row.receipt) for row in rows if row.receipt], sum(
        not row.receipt for row in rows
    )


async def mismatches(router: Router, live: Iterable[receipt_pb2.Receipt]) -> list[str]:
    """What of the usage does not follow from the receipts and the states of all tasks."""
    receipts, without = await kept_receipts(router.database)
    live = list(live)
    expected = sums_of([*receipts, *live])
    expected += Counter({"unknown_tokens_count": without, "unknown_gpu_count": without})
    total = (await router.listed()).total
    found = [
        f"{name}: {counted(total)[name]}, not {expected[name]}"
        for name in expected | counted(total)
        if counted(total)[name] != expected[name]
    ]
    states = Counter(row.state for row in await router.database.rows("SELECT state FROM tasks"))
    attempts = await router.database.value("SELECT count(*) FROM task_attempts")
    lived = Counter(receipt.outcome for receipt in live)
    ends = {
        "completed": (total.completed_count, states[3] + lived[receipt_pb2.OUTCOME_COMPLETED]),
        "failed": (
            total.failed_count + total.rejected_count,
            states[4] + lived[receipt_pb2.OUTCOME_FAILED] + lived[receipt_pb2.OUTCOME_REJECTED],
        ),
        "cancelled": (total.cancelled_count, states[5] + lived[receipt_pb2.OUTCOME_CANCELLED]),
    }
    found += [f"{name}: {one}, not {other}" for name, (one, other) in ends.items() if one != other]
    if total.retried_count > attempts:
        found.append(f"{total.retried_count} of {attempts} attempts were begun again")
    return found


class Chaos:
    """Random ends of tasks and live requests at two routers on one database, which are killed at any step."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.chance = random.Random(seed)
        self.routers = [Router(url, max_rows_per_hour=1_000) for _ in range(2)]
        self.claims: list[TaskLease] = []
        self.live: list[receipt_pb2.Receipt] = []
        """Receipts of live requests that a router has written down."""
        self.unwritten: list[list[receipt_pb2.Receipt]] = [[], []]
        self.now = NOW

    async def run(self, steps: int) -> None:
        for router in self.routers:
            await router.start()
        for number in range(steps):
            await self._step(number)
        for index in range(2):
            await self._write(index)

    async def _step(self, number: int) -> None:
        steps = [self._submit, self._submit, self._end, self._revert, self._cancel]
        steps += [self._live, self._live, self._expire, self._write_at, self._kill]
        await self.chance.choice(steps)(number, self.chance.randrange(2))

    async def _submit(self, number: int, index: int) -> None:
        name, store = f"task-{number}", self.routers[index].store
        lane = Lane("demo", self.chance.choice(TENANTS), Priority.DURABLE)
        await store.submit(a_task(name, lane=lane, caller="key:batch", max_attempts=2))
        await self._claim(name, index, kept=0.9)

    async def _claim(self, name: str, index: int, kept: float = 1.0) -> None:
        claim = await self.routers[index].store.claim(name, f"r{index}", self.now, self.now + LEASE)
        if claim is not None and self.chance.random() < kept:
            self.claims.append(claim)

    async def _end(self, _: int, index: int) -> None:
        if not self.claims:
            return
        outcome = self.chance.choice(OUTCOMES[:2])
        failure = None if outcome == OUTCOMES[0] else task_error(Reason.INTERNAL, "no")
        ending = TaskOutcome(state=_STATES[outcome], failure=failure, receipt=self._raw(outcome, 0.9))
        claim = self.claims.pop()
        # Its acknowledgement may be lost: then the end is written again.
        for _ in range(self.chance.choice((1, 2))):
            await self.routers[index].store.end(claim, ending, self.now)

    async def _revert(self, _: int, index: int) -> None:
        if not self.claims:
            return
        claim, raw = self.claims.pop(0), self._raw(receipt_pb2.OUTCOME_FAILED, 0.5)
        fields: dict[str, Any] = {"counts": True, "now": self.now, "ready_at": self.now}
        for _ in range(self.chance.choice((1, 2))):
            await self.routers[index].store.revert(claim, CRASH, receipt=raw, **fields)
        await self._claim(claim.task_id, index)

    def _raw(self, outcome: "receipt_pb2.Outcome.ValueType", known: float) -> bytes:
        return a_receipt(self.chance, outcome).SerializeToString() if self.chance.random() < known else b""

    async def _cancel(self, number: int, index: int) -> None:
        name = f"task-{self.chance.randrange(number + 1)}"
        for tenant in TENANTS:
            await self.routers[index].store.cancel(tenant, name, self.now)

    async def _live(self, _: int, index: int) -> None:
        receipt = a_receipt(self.chance, self.chance.choice(OUTCOMES))
        self.routers[index].live_end(receipt, self.chance.choice(TENANTS))
        self.unwritten[index].append(receipt)

    async def _expire(self, _: int, index: int) -> None:
        if self.chance.random() < 0.3:
            self.now += LEASE + 1
            await self.routers[index].store.revert_expired(self.now, 100)
        if self.chance.random() < 0.1:
            self.now += 7_200
            await self.routers[index].store.fail_expired(self.now, 100, {})

    async def _write_at(self, _: int, index: int) -> None:
        await self._write(index)

    async def _kill(self, _: int, index: int) -> None:
        if self.chance.random() < 0.3:
            await self.routers[index].kill()
            self.unwritten[index].clear()
            self.routers[index] = Router(self.url, max_rows_per_hour=1_000)
            await self.routers[index].start()

    async def _write(self, index: int) -> None:
        await self.routers[index].usage.servicer.flush()
        self.live += self.unwritten[index]
        self.unwritten[index].clear()


@pytest.mark.slow("hundreds of transactions")
@pytest.mark.parametrize("seed", range(2))
async def test_usage_totals_match_receipts_under_random_faults(database_url: str, seed: int) -> None:
    chaos = Chaos(database_url, seed)
    await chaos.run(STEPS)
    assert await mismatches(chaos.routers[0], chaos.live) == []
    total = (await chaos.routers[1].listed()).total
    assert min(getattr(total, name) for name in _OUTCOME_COUNTS) > 0, "the run has every kind of end"
    for by in (("tenant",), ("key", "model"), ("hour", "tenant", "asked"), ("day",)):
        rows = (await chaos.routers[1].listed(*by)).rows
        assert sum(row.counts.completed_count for row in rows) == total.completed_count
        assert sum(row.counts.prompt_tokens for row in rows) == total.prompt_tokens
    for router in chaos.routers:
        await router.stop()


@pytest.mark.slow("many kills of a store")
async def test_double_counted_or_missing_end_is_detected(sqlite_url: str) -> None:
    chaos = Chaos(sqlite_url, seed=3)
    await chaos.run(100)
    router = chaos.routers[0]
    assert await mismatches(router, chaos.live) == []
    columns = ", ".join(("hour", "tenant", "key", "model", "asked", *COLUMNS))
    doubled = f"INSERT INTO usage_entries ({columns}) SELECT {columns} FROM usage_hours LIMIT 1"
    await router.database.change(doubled)
    assert await mismatches(router, chaos.live) != []
    await router.database.change("UPDATE usage_hours SET prompt_tokens = prompt_tokens - 1 WHERE tenant = 'ann'")
    assert await mismatches(router, chaos.live) != []
    for each in chaos.routers:
        await each.stop()


async def test_task_that_ends_while_entries_are_read_is_counted(database_url: str) -> None:
    """The read was taken for one after the write that it did not see: usage lacked the task until the next write."""
    router, goes_on = Router(database_url), threading.Event()
    await router.start()
    await router.store.submit(a_task("task-1"))
    database_is_busy = asyncio.create_task(router.database.read(lambda _: goes_on.wait()))
    await let_all_run()
    end = asyncio.create_task(router.store.cancel(LANE.tenant, "task-1", NOW))
    look = asyncio.create_task(router.usage.servicer.flush())
    await let_all_run()
    goes_on.set()
    await asyncio.gather(database_is_busy, end, look)
    assert (await router.listed()).total.cancelled_count == 1
    await router.stop()


async def test_killed_router_loses_only_live_requests_since_its_last_write(sqlite_url: str) -> None:
    router = Router(sqlite_url, flush_interval_seconds=2.0)
    await router.start()
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="demo")
    router.live_end(receipt, "ann")
    await router.usage.servicer.flush()
    router.live_end(receipt, "ann")
    await router.kill()
    after = Router(sqlite_url)
    await after.start()
    assert (await after.listed()).total.completed_count == 1
    after.live_end(receipt, "ann")
    await after.stop()
    last = Router(sqlite_url)
    await last.start()
    assert (await last.listed()).total.completed_count == 2, "a router that stops writes what it has"
    await last.stop()


class LateDatabase(RouterDatabase):
    """Acknowledges commits only once `acknowledges` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.acknowledges, self.committed = asyncio.Event(), asyncio.Event()

    @override
    async def run(self, work: Work[T], *, vital: bool = False) -> T:
        result = await super().run(work, vital=vital)
        self.committed.set()
        await self.acknowledges.wait()
        return result


async def test_usage_counts_once_if_its_caller_leaves_between_commit_and_acknowledgement(sqlite_url: str) -> None:
    database = LateDatabase(sqlite_url)
    router = Router(sqlite_url, database=database)
    database.acknowledges.set()
    await router.start()
    router.live_end(receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="demo"), "ann")
    database.acknowledges.clear()
    database.committed.clear()
    listing = asyncio.create_task(router.listed())
    await database.committed.wait()
    listing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listing
    database.acknowledges.set()
    listed = await router.listed()
    await router.stop()
    assert listed.total.completed_count == 1


async def test_expired_hours_are_deleted(sqlite_url: str) -> None:
    router = Router(sqlite_url, keep_seconds=86_400.0, sweep_interval_seconds=3_600.0)
    await router.start()
    router.live_end(receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="demo"), "ann")
    assert (await router.listed()).total.completed_count == 1
    await router.clock.advance(86_400.0 + 2 * 3_600.0)
    await router.usage.servicer.sweep()
    assert (await router.listed()).total.completed_count == 0
    await router.stop()


async def test_rows_per_hour_are_bounded_across_writes_and_restarts(database_url: str) -> None:
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED)
    for start in range(2):
        router = Router(database_url, max_rows_per_hour=3)
        await router.start()
        for number in range(8):
            router.live_end(receipt, f"t{start}-{number}")
            await router.usage.servicer.flush()
        rows = (await router.listed("tenant", "key")).rows
        assert len(rows) == 7
        assert sum(row.counts.completed_count for row in rows) == 8 * (start + 1)
        assert rows[0].tenant == OTHER
        await router.stop()


async def test_usage_is_divided_by_program_agent_and_purpose(database_url: str) -> None:
    router = Router(database_url)
    await router.start()
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="demo")
    for labels in (("program=codex", "agent=main", "purpose=turn"), ("program=codex", "agent=sub", "purpose=turn"), ()):
        router.live_end(receipt, "ann", *labels)
    by_program = [(row.program, row.counts.completed_count) for row in (await router.listed("program")).rows]
    by_agent = [(row.program, row.agent, row.purpose) for row in (await router.listed("purpose", "agent")).rows]
    await router.stop()
    assert by_program == [("", 1), ("codex", 2)]
    assert by_agent == [("", "", ""), ("", "main", "turn"), ("", "sub", "turn")]


async def test_times_are_rounded_to_hours_and_tenants_are_separate(sqlite_url: str) -> None:
    router = Router(sqlite_url)
    await router.start()
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="demo")
    for tenant in ("ann", "ann", "bob"):
        router.live_end(receipt, tenant)
        await router.clock.advance(3_600.0)
    first = NOW // 3_600 * 3_600
    found = await router.listed("hour", since=stamp_of(first + 3_600 + 1), until=stamp_of(first + 2 * 3_600 + 1))
    assert [row.start_time.seconds for row in found.rows] == [first + 3_600, first + 2 * 3_600]
    own = await router.listed("tenant", tenant="ann")
    assert [(row.tenant, row.counts.completed_count) for row in own.rows] == [("ann", 2)]
    assert own.total.completed_count == 2
    cut = await router.listed("hour", limit=1)
    assert (len(cut.rows), cut.has_more, cut.total.completed_count) == (1, True, 3)
    assert not (await router.listed("model", model="other")).rows
    await router.stop()

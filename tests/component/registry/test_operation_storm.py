"""Random operations, failures, cancels and restarts of the registry: whatever comes, each ends once and in order."""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from operation_stage import LoadResponse, ScriptedCalls, Stage, flush, id_of, load, loaded, running_stage, said, unload

from registry_svc.operations import operations
from registry_svc.operations.audit_chain import AuditCheck
from registry_svc.operations.audit_log import MAX_ENTRIES_PER_WINDOW
from registry_svc.operations.live_operations import ENDED
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1.operation_pb2 import Operation
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.documents.codec import word_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

OPERATIONS = 40

MAX_PAUSE_SECONDS = 0.02

LONG_PAUSE_SECONDS = 0.5

PATIENCE_SECONDS = 0.2

"""An operation that goes on for longer is taken for one that is stuck; what it does takes half of it at most."""

MODELS = ("m1", "m2", "m3")


class MoodyCalls(ScriptedCalls):
    """Runners that take their time, fail, and notice when two work on one model at once."""

    def __init__(self, dice: random.Random, max_pause_seconds: float = MAX_PAUSE_SECONDS) -> None:
        super().__init__()
        self.max_pause_seconds = max_pause_seconds
        self.dice = dice
        self.busy: Counter[str] = Counter()
        self.stuck_share = 0.15
        self.clashes: list[str] = []
        self.done_for: defaultdict[str, list[str]] = defaultdict(list)
        """What runners were asked to do, by operation."""

    async def load(
        self, runner: str, model: str, options: load_pb2.LoadOptions, *, operation_id: str
    ) -> AsyncGenerator[LoadResponse]:
        self._enter(model, operation_id)
        self.done_for[operation_id].append(f"load {model}")
        try:
            for step in range(self.dice.randrange(3)):
                await self._pause()
                yield said("loading", step / 4)
            if self.dice.random() < self.stuck_share:
                await asyncio.Event().wait()  # it is stuck, until somebody cancels
            await self._pause()
            if self.dice.random() < 0.2:
                raise WeftError(self.dice.choice([Reason.WORKER_LOST, Reason.INSUFFICIENT_MEMORY]), "so it goes")
            yield loaded()
        finally:
            self.busy[model] -= 1

    async def unload(self, runner: str, model: str, *, operation_id: str) -> runner_service_pb2.UnloadResponse:
        self._enter(model, operation_id)
        self.done_for[operation_id].append(f"unload {model}")
        try:
            await self._pause()
            return runner_service_pb2.UnloadResponse(memory_freed_bytes=1)
        finally:
            self.busy[model] -= 1

    async def flush_cache(
        self, runner: str, request: runner_service_pb2.FlushCacheRequest, *, operation_id: str
    ) -> runner_service_pb2.FlushCacheResponse:
        await self._pause()
        return runner_service_pb2.FlushCacheResponse(entry_count=1)

    def _enter(self, model: str, operation_id: str) -> None:
        self.busy[model] += 1
        if self.busy[model] > 1:
            self.clashes.append(f"{operation_id} on {model}")

    async def _pause(self) -> None:
        # Real time, as the database's: shorter than that and no two operations ever meet.
        await asyncio.sleep(self.dice.random() * self.max_pause_seconds)


async def disturb(stage: Stage, dice: random.Random, known: list[str]) -> None:
    """One random act of somebody."""
    match dice.randrange(10):
        case 0:
            await stage.restart()
        case 1 | 2:
            running = await stage.operations.page(before_number=None, size=100, unfinished_only=True)
            if running:
                await stage.operations.cancel(dice.choice(running).name, "storm")
        case 3:
            known.append(await stage.create(flush(runner_service_pb2.FlushCacheRequest.SCOPE_ALL)))
        case 4 | 5:
            known.append(await stage.create(unload(dice.choice(MODELS))))
        case _:
            model, evict = dice.sample(MODELS, 2)
            known.append(await stage.create(load(model, evict=evict if dice.random() < 0.3 else "")))
    for _ in range(dice.randrange(30)):
        await asyncio.sleep(0)


async def ended_or_cancelled(stage: Stage, operation_id: str) -> Operation:
    """How it ends; one that is stuck is cancelled. Those accepted before it must have ended."""
    ending = asyncio.create_task(stage.end_as_time_passes(operation_id, step_seconds=1.0))
    await asyncio.wait({ending}, timeout=PATIENCE_SECONDS)
    if not ending.done():
        await stage.operations.cancel(operation_id, "storm")
    return await ending


@pytest.mark.slow("a storm")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly("a storm of processes")) for seed in (1, 2))]
)
async def test_each_operation_in_a_storm_ends_once_and_no_two_run_on_one_model(seed: int) -> None:
    dice = random.Random(seed)
    async with running_stage(max_running=4) as stage:
        calls = MoodyCalls(dice)
        stage.calls = calls
        await stage.restart()
        known: list[str] = []
        while len(known) < OPERATIONS:
            await disturb(stage, dice, known)
        calls.stuck_share = 1.0
        known.append(await stage.create(load(dice.choice(MODELS))))
        ends = [await ended_or_cancelled(stage, operation) for operation in known]
        entries = await stage.audit()
        check = AuditCheck(kept=stage.operations.audit.head)
        check.read(entries)
        assert check.verdict() is None
        assert calls.clashes == []
        assert not +calls.busy
        told: defaultdict[str, list[str]] = defaultdict(list)
        for entry in entries:
            told[entry.operation].append(entry.event.removeprefix("operation."))
        cancelled_loads = 0
        for end in ends:
            assert end.state in ENDED
            state = word_of(end, "state")
            assert told[end.name].count(state) == 1
            assert told[end.name][0] == "accepted"
            assert told[end.name][-1] == state
            assert len(told[end.name]) == len(set(told[end.name])) <= 4
            done = calls.done_for[id_of(end.name)]
            if end.state == Operation.STATE_CANCELLED and done and done[-1].startswith("load"):
                raise AssertionError(f"a cancelled load was not followed by an unload: {done}")
            cancelled_loads += end.state == Operation.STATE_CANCELLED and any(each.startswith("load") for each in done)
        assert Operation.STATE_SUCCEEDED in {end.state for end in ends}
        assert cancelled_loads > 0
        assert json.loads(entries[0].detail)["request_id"] == ends[0].request_id


@pytest.mark.slow("floods a service")
async def test_storm_detects_operations_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("registry_svc.operations.operations.subjects_of", lambda *_: frozenset())
    async with running_stage() as stage:
        calls = MoodyCalls(random.Random(0), LONG_PAUSE_SECONDS)
        calls.stuck_share = 0.0
        stage.calls = calls
        await stage.restart()
        operations = [await stage.create(load()) for _ in range(6)]
        for operation in operations:
            await stage.end(operation)
        assert calls.clashes != []


STORM = 2_000


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as stage:
        yield stage


async def test_cancel_storm_on_one_operation_waits_in_a_bounded_queue(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MAX_WAITING_WRITES", 8)
    running = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    storm = [stage.operations.cancel(running, "storm") for _ in range(STORM)]
    answers = await asyncio.gather(*storm, return_exceptions=True)
    refused = [answer.reason for answer in answers if isinstance(answer, WeftError)]
    assert set(refused) == {Reason.QUEUE_FULL}
    assert len(refused) >= STORM - 20
    assert (await stage.end(running)).state == Operation.STATE_CANCELLED
    assert (await stage.events()).count("cancel_requested") == 1


async def test_no_op_cancel_does_not_wait_behind_other_cancels(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.calls.answer("m1", loaded())
    over = await stage.create(load())
    await stage.end(over)
    stage.calls.held["m2"] = asyncio.Event()
    undone = await stage.create(load("m2"))
    await stage.until_heard("load m1 on r1", "load m2 on r1")
    await stage.operations.cancel(undone, "alice")
    monkeypatch.setattr(operations, "MAX_WAITING_WRITES", 0)
    assert (await stage.operations.cancel(over, "storm")).state == Operation.STATE_SUCCEEDED
    assert (await stage.operations.cancel(undone, "storm")).cancel_requested
    with pytest.raises(WeftError, match="wait to be accepted or cancelled"):
        await stage.create(load("m3"))
    stage.calls.held["m2"].set()
    assert (await stage.end(undone)).state == Operation.STATE_CANCELLED


async def test_cancelled_requests_are_logged_individually_up_to_a_limit(stage: Stage) -> None:
    for number in range(MAX_ENTRIES_PER_WINDOW + 5):
        await stage.operations.audit.cancelled(f"req-{number}", "acme", "key:k1")
    await stage.operations.audit.close_window(immediately=True)
    entries, _ = await stage.operations.audit_page(0, 100)
    single, counted = entries[:-1], entries[-1]
    assert {(entry.event, entry.actor, entry.operation) for entry in single} == {("request.cancelled", "key:k1", "")}
    assert len(single) == MAX_ENTRIES_PER_WINDOW
    assert json.loads(single[0].detail) == {"request_id": "req-0", "tenant": "acme"}
    assert counted.event == "request.cancellations_counted"
    detail = json.loads(counted.detail)
    assert (detail["count"], detail["tenants"]) == (5, {"acme": 5})


async def test_many_cancelled_requests_do_not_suppress_a_rejection_entry(stage: Stage) -> None:
    for number in range(MAX_ENTRIES_PER_WINDOW + 1):
        await stage.operations.audit.cancelled(f"req-{number}", "acme", "key:k1")
    await stage.operations.audit.refused(Refused("no token"), load(), "alice")
    entries, _ = await stage.operations.audit_page(0, 100)
    assert entries[-1].event == "operation.refused"

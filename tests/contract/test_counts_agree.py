"""Requests, usage, figures and metrics count the same, after any history of live requests and tasks."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from kept_router import CANDIDATE, ENDED, VIEW, KeptRouter
from kit.request_endings import ending
from stored_tasks import CRASH, LANE, LEASE, a_task

from router_svc.durable.limits import UsageLimits
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_recorder import TaskRecorder
from router_svc.durable.tasks.task_records import TaskLease, TaskOffered, TaskOutcome, TaskPaused, TasksEnded
from router_svc.durable.usage import UsageService
from router_svc.observer import RequestEnded
from router_svc.policy.decisions import Placed
from router_svc.policy.router_request import Request
from router_svc.router_metrics import RouterMetrics
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_pb2, task_pb2
from weft.api.router.v1 import usage_service_pb2 as pb
from weft.durable.requests import MAX_LISTED
from weft.durable.tasks import task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation

pytest_plugins = ("database_fixtures",)

STEPS = 150
FAILURES = (Reason.BACKEND_ERROR, Reason.WORKER_LOST, Reason.OUT_OF_MEMORY)
Sums = Mapping[str, int]


def a_receipt(chance: random.Random, reason: Reason, tries: int) -> receipt_pb2.Receipt:
    """Of a request that was tried this often; its answer may have begun."""
    outcome = receipt_pb2.OUTCOME_FAILED
    if reason in (Reason.UNSPECIFIED, Reason.CANCELLED):
        outcome = receipt_pb2.OUTCOME_CANCELLED if reason else receipt_pb2.OUTCOME_COMPLETED
    elif not tries:
        outcome = receipt_pb2.OUTCOME_REJECTED
    receipt = receipt_pb2.Receipt(outcome=outcome, model="demo", reason=reason.value)  # type: ignore[arg-type]
    for _ in range(tries):
        receipt.attempts.add(runner="titan", model="demo", reason=Reason.WORKER_LOST.value)
    if tries:
        receipt.attempts[-1].reason = reason.value  # type: ignore[assignment]  # same numbers
        if chance.random() < 0.8:
            receipt.usage.prompt_tokens, receipt.usage.completion_tokens = chance.randrange(50), chance.randrange(50)
            receipt.usage.cached_prompt_tokens = receipt.usage.prompt_tokens // 2
    receipt.total_time.FromMilliseconds(chance.randrange(1_000))
    return receipt


class History:
    """A router with a random history; `restart` ends its process in order and begins another one."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.chance, self.metrics = url, random.Random(seed), RouterMetrics()
        self.router = KeptRouter(url)
        self.claims: list[TaskLease] = []
        self.number = 0

    async def start(self) -> None:
        self.router = router = await KeptRouter(self.url, clock=self.router.clock).start()
        self.store, records = SqlTaskStore(router.database), router.records
        self.usage = UsageService(router.database, records.usage, UsageLimits(), clock=router.clock)
        self.recorder = TaskRecorder(records.requests, self.count_task, router.clock, self.now)
        self.store.report_ends = lambda ended: self.recorder(TasksEnded(ended))
        await self.usage.start()
        await self.store.start()
        for each in await self.store.tried(100):
            self.recorder.resume(each)

    async def stop(self) -> None:
        await self.store.stop()
        await self.usage.stop(0.0)
        await self.router.service.stop(0.0)

    def now(self) -> float:
        return self.router.clock.utc_now().timestamp()

    def count_task(self, spec: PlacementRequest, receipt: receipt_pb2.Receipt) -> None:
        """As `SchedulingLoop.task_ended`."""
        asked = PlacementRequest(
            request_id=spec.request_id, tenant=spec.tenant, model=spec.model, operation=spec.operation
        )
        ended = ending(asked, self.router.clock.monotonic(), reason_of(receipt.reason), receipt, view=VIEW)
        self.router.records.figures.note_end(ended)
        self.metrics.note_end(ended)

    def tell(self, request: Request, reason: Reason, receipt: receipt_pb2.Receipt | None, **more: Any) -> None:
        """As the loop tells its subscribers."""
        records, now = self.router.records, self.router.clock.monotonic()
        ended = RequestEnded(request=request, at=now, view=VIEW, reason=reason, receipt=receipt, **more)
        for subscriber in (
            records.requests.note_end,
            records.clients.note_end,
            records.usage.note_end,
            records.figures.note_end,
            self.metrics.note_end,
        ):
            subscriber(ended)

    def arrive(self, spec: PlacementRequest) -> Request:
        clock, log = self.router.clock, self.router.records.requests
        self.number += 1
        request = Request.of(self.number, spec, clock.monotonic())
        log.note_arrival(request, clock.utc_now())
        return request

    async def step(self) -> None:
        steps: list[Callable[[], Any]] = [self.live, self.live, self.submit, self.submit, self.end, self.revert]
        steps += [self.cancel, self.expire, self.lose]
        await self.chance.choice(steps)()
        await self.router.flush()
        await self.router.clock.advance(self.chance.random())

    async def live(self) -> None:
        request = self.arrive(KeptRouter.asked(f"req-{self.number}", "ann"))
        kind = self.chance.choice(("done", "failed", "cancelled", "refused", "limited", "left"))
        if kind == "limited":
            error = WeftError(Reason.RATE_LIMIT_EXCEEDED, "too many")
            return self.tell(request, error.reason, None, refusal=error)
        if kind == "left":
            return self.tell(request, Reason.CANCELLED, None)
        reason = {"done": Reason.UNSPECIFIED, "cancelled": Reason.CANCELLED}.get(kind, self.chance.choice(FAILURES))
        tries = 0 if kind == "refused" else self.chance.choice((1, 1, 3))
        return self.tell(request, reason, a_receipt(self.chance, reason, tries))

    async def submit(self) -> None:
        self.number += 1
        name = f"task-{self.number}"
        new = a_task(name, max_attempts=3, created_at=self.now())
        await self.store.submit(new)
        await self.claim(name)

    async def claim(self, name: str) -> None:
        if self.chance.random() < 0.7:
            for task in await self.store.pending(LANE, self.now(), 100, 1 << 30):
                if task.id == name:
                    self.recorder(TaskOffered(task))
            claim = await self.store.claim(name, "r1", self.now(), self.now() + LEASE)
            self.claims += [] if claim is None else [claim]

    def attempt(self, claim: TaskLease, reason: Reason) -> bytes:
        """A placement of a task with its end, which counts nowhere by itself; returns its receipt."""
        spec = PlacementRequest(
            request_id=claim.task_id, tenant=LANE.tenant, model="demo", operation=Operation.CHAT, task_id=claim.task_id
        )
        request = self.arrive(spec)
        placed = Placed(key=request.key, candidate=CANDIDATE, attempt=1)
        self.router.records.requests.note_decisions([placed], self.router.clock.monotonic())
        receipt = a_receipt(self.chance, reason, self.chance.choice((1, 1, 2)))
        self.tell(request, reason, receipt)
        return receipt.SerializeToString()

    async def end(self) -> None:
        if not self.claims:
            return
        claim = self.claims.pop(self.chance.randrange(len(self.claims)))
        reason = self.chance.choice((Reason.UNSPECIFIED, Reason.CANCELLED, *FAILURES))
        state, failure = task_pb2.TASK_STATE_COMPLETED, None
        if reason is Reason.CANCELLED:
            state = task_pb2.TASK_STATE_CANCELLED
        elif reason:
            state, failure = task_pb2.TASK_STATE_FAILED, task_error(reason, "why")
        outcome = TaskOutcome(state=state, failure=failure, receipt=self.attempt(claim, reason))
        await self.store.end(claim, outcome, self.now())

    async def revert(self) -> None:
        if not self.claims:
            return
        claim = self.claims.pop(0)
        raw = self.attempt(claim, self.chance.choice(FAILURES)) if self.chance.random() < 0.8 else b""
        now = self.now()
        if await self.store.revert(claim, CRASH, receipt=raw, counts=True, now=now, ready_at=now):
            self.recorder(TaskPaused(claim.task_id, task_pb2.TaskRetry(error=CRASH)))
            await self.claim(claim.task_id)

    async def cancel(self) -> None:
        await self.store.cancel(LANE.tenant, f"task-{self.chance.randrange(self.number + 1)}", self.now())

    async def expire(self) -> None:
        if self.chance.random() < 0.1:
            await self.router.clock.advance(4_000)
            await self.store.fail_expired(self.now(), 100, {})

    async def lose(self) -> None:
        if self.chance.random() < 0.2:
            await self.router.clock.advance(LEASE + 1)
            await self.store.revert_expired(self.now(), 100)

    async def records(self) -> list[request_pb2.RequestRecord]:
        return list((await self.router.requests.requests(MAX_LISTED, selection=ENDED)).requests)


def of_records(records: list[request_pb2.RequestRecord]) -> Sums:
    """What the records of ended requests add up to."""
    sums: Counter[str] = Counter()
    for record in records:
        receipt = record.receipt
        outcome = receipt_pb2.Outcome.Name(receipt.outcome).removeprefix("OUTCOME_").lower()
        if not record.HasField("receipt"):
            outcome = "failed" if record.reason == Reason.CANCELLED.value else "rejected"
        sums[outcome] += 1
        sums["retried"] += max(0, len(receipt.attempts) - 1)
        for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens"):
            sums[name] += getattr(receipt.usage, name)
    return +sums


_AS_NAMED = ("completed", "cancelled", "rejected", "retried")


async def of_usage(history: History) -> Sums:
    total = (await history.usage.store.usage(pb.ListUsageRequest())).total
    sums = Counter({name: getattr(total, f"{name}_count") for name in _AS_NAMED})
    # Figures and records count a request of unknown outcome as failed.
    sums["failed"] = total.failed_count + total.unknown_count
    for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens"):
        sums[name] = getattr(total, name)
    return +sums


def of_figures(history: History) -> Sums:
    # Of the day: the history may be longer than an hour.
    recorder = history.router.records.figures.day
    assert recorder is not None
    now = recorder.ring.present(history.router.clock.monotonic())
    steps = [*recorder.ring.steps(history.router.clock.monotonic()), now]
    names = ("completed", "failed", "rejected", "cancelled", "retried")
    names += ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")  # type: ignore[assignment]
    return +Counter({name: sum(getattr(step.counted.all, name) for step in steps) for name in names})


def of_metrics(metrics: RouterMetrics) -> Sums:
    sums: Counter[str] = Counter()
    for name, labels, value, *_ in (sample for metric in metrics.page.collect() for sample in metric.samples):
        if name == "weft_router_requests_total":
            outcome = labels["outcome"]
            sums["failed" if outcome == "unknown" else outcome] += int(value)
        elif name == "weft_router_retries_total":
            sums["retried"] += int(value)
        elif name == "gen_ai_client_token_usage_tokens_sum":
            kind = "prompt_tokens" if labels["gen_ai_token_type"] == "input" else "completion_tokens"
            sums[kind] += int(value)
    return +sums


@pytest.mark.parametrize("seed", range(4))
async def test_requests_usage_figures_and_metrics_agree_after_any_history(sqlite_url: str, seed: int) -> None:
    history = History(sqlite_url, seed)
    await history.start()
    for step in range(STEPS):
        await history.step()
        if step % 50 == 49:
            await history.stop()
            await history.start()
    found = of_records(await history.records())
    assert min(found[name] for name in ("completed", "failed", "rejected", "cancelled", "retried")) > 0, "every kind"
    assert await of_usage(history) == found
    assert of_figures(history) == found
    metrics = Counter(of_metrics(history.metrics))
    assert +Counter({**found, "cached_prompt_tokens": 0}) == metrics
    await history.stop()


async def test_bug_durable_request_was_listed_once_per_attempt(sqlite_url: str) -> None:
    """Five attempts were five requests, each "not retried", and the last one's arrival and duration."""
    history = History(sqlite_url, 1)
    await history.start()
    began = history.now()
    await history.store.submit(a_task("task-1", created_at=began))
    for attempt in range(5):
        (task,) = await history.store.pending(LANE, history.now(), 1, 1 << 20)
        history.recorder(TaskOffered(task))
        claim = await history.store.claim("task-1", "r1", history.now(), history.now() + LEASE)
        assert claim is not None
        raw = history.attempt(claim, Reason.WORKER_LOST)
        await history.router.clock.advance(1.0)
        if attempt < 4:
            ready_at = history.now() + 2.0
            await history.store.revert(claim, CRASH, receipt=raw, counts=True, now=history.now(), ready_at=ready_at)
            history.recorder(TaskPaused("task-1", task_pb2.TaskRetry(error=CRASH, failed_count=attempt + 1)))
            (record,) = (await history.router.requests.requests()).requests
            assert record.retry.error.message == CRASH.message
            await history.router.clock.advance(2.0)
        if attempt == 2:
            await history.stop()
            await history.start()
            (record,) = (await history.router.requests.requests()).requests
            assert len(record.attempts) >= 3, "the attempts of the process before"
    outcome = TaskOutcome(state=task_pb2.TASK_STATE_FAILED, failure=CRASH, receipt=raw)
    assert claim is not None
    await history.store.end(claim, outcome, history.now())
    (record,) = await history.records()
    assert record.arrive_time.ToNanoseconds() / 1e9 == pytest.approx(began, abs=0.001)
    assert (record.end_time.ToNanoseconds() - record.arrive_time.ToNanoseconds()) / 1e9 == pytest.approx(13.0, abs=0.01)
    starts = [attempt.start.ToNanoseconds() / 1e9 for attempt in record.receipt.attempts]
    assert len(starts) >= 5
    assert starts == sorted(starts)
    assert record.receipt.total_time.seconds == 13
    assert record.message == CRASH.message
    await history.stop()

"""The request log: what a router remembers of requests, bounded, in memory and cheap to write.

Arrivals and decisions are stored as they are; the end of a request serializes them. Messages are created when they are
read (`router_svc.request_servicer`). `router_svc.durable.request_records` writes the log to the router's database,
which has those from before a restart.
"""

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from router_svc.observer import RequestEnded, is_no_request
from router_svc.policy.change_buffer import ChangeBuffer, WatchLimits
from router_svc.policy.decisions import (
    Decision,
    FailedAttempt,
    Loads,
    LoadStart,
    Noted,
    Pauses,
    Placed,
    Rejects,
    StopsWaking,
    Waits,
    Wakes,
)
from router_svc.policy.router_request import Request
from router_svc.request_record import EndedRequest, RecordedTask, UnderWay, add_decisions, begun_record, was_left
from router_svc.unwritten_records import UnwrittenRecords
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.api.router.v1 import task_pb2
from weft.kernel.access.principal import actor_words
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import datetime_of, seconds_of, stamp_of

FIRST_RECOVERED_KEY = -1_000_000_000
"""Keys of tasks, and of requests from an earlier run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogLimits:
    """Bounds of the log."""

    max_ended: int = 10_000
    """Maximum ended requests; the one that ended first is dropped first ..."""
    keep_seconds: float = 3_600.0
    """... and all are dropped after this time."""
    max_under_way: int = 50_000
    """Maximum requests under way; further ones are placed normally but have no record."""
    max_decisions: int = 64
    """Per request; the newest are kept."""
    max_wakes: int = 1_024
    """Models with a remembered last load, for requests that get its status a moment later; the oldest is dropped
    first."""
    max_receipt_bytes: int = 16_384
    """A larger receipt is stored without signals, warnings and engine log lines, then without the messages of its
    attempts, then without its attempts; if it is still too large, only its outcome is stored."""


RETRY_AFTER_SECONDS = 1.0
_NO_FAILURES = (Reason.UNSPECIFIED.value, Reason.CANCELLED.value)


class RequestWatch:
    """A watch of requests of one tenant, or of all: it gets the existing requests, then each changed one.

    The log marks changed requests by key, and records are created when the watcher takes them. So several changes are
    merged, and requests cost nothing without a watcher.
    """

    def __init__(self, tenant: str, first: Iterable[int], limits: WatchLimits, clock: Clock) -> None:
        """`tenant`: empty means any tenant. `first`: keys of the existing requests."""
        self._tenant = tenant
        self._limits = limits
        self._clock = clock
        self._buffer = ChangeBuffer(limits, first)
        self._woken = asyncio.Event()
        self._error: WeftError | None = None

    def note(self, key: int, tenant: str, *, only_figures: bool) -> None:
        """Mark a changed request; `only_figures`: position or estimate. Too many unread changes end the watch."""
        if (self._tenant and tenant != self._tenant) or self._error is not None:
            return
        buffer = self._buffer
        before = buffer.due_at()
        if not (buffer.note_figures(key) if only_figures else buffer.note(key)):
            # Changes before a gap are useless, and the watcher may be stuck in a write for long.
            self._buffer = ChangeBuffer(self._limits)
            most = self._limits.max_waiting_changes
            message = f"more than {most} changed requests were waiting to be read; watch again"
            self.end(WeftError(Reason.WATCH_LAGGED, message, retry_after_seconds=RETRY_AFTER_SECONDS))
        elif before is None or (not only_figures and buffer.due_at() != before):
            self._woken.set()

    def end(self, error: WeftError) -> None:
        """Raise `error` in the watcher, discarding unread changes."""
        self._error = error
        self._woken.set()

    async def take(self) -> tuple[Sequence[int], bool]:
        """Return the keys of the next batch, and whether all existing requests have been taken.

        Raises WATCH_LAGGED or SHUTTING_DOWN.
        """
        while True:
            if self._error is not None:
                raise self._error
            now = self._clock.monotonic()
            was_synced, keys = self._buffer.is_synced, self._buffer.take(now)
            if keys or not was_synced:
                return keys, self._buffer.is_synced
            due = self._buffer.due_at()
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else due - now):
                    await self._woken.wait()


class RequestLog:
    """A bounded log of requests. Called only from the router's event loop. Ignores unknown keys and never raises."""

    def __init__(self, limits: RequestLogLimits | None = None) -> None:
        self.limits = limits or RequestLogLimits()
        self._under_way: dict[int, UnderWay] = {}
        self._tasks: dict[str, RecordedTask] = {}
        """Unfinished tasks by id; each is also under way."""
        self._placements: dict[int, RecordedTask] = {}
        """Tasks by the keys of their placements, which are not under way themselves."""
        self._wakes: OrderedDict[str, LoadStart] = OrderedDict()
        """The last load of each model, the newest last."""
        self._ended: OrderedDict[int, EndedRequest] = OrderedDict()
        """In order of their ends."""
        self._forget_at = -math.inf
        """Until then none of them is too old."""
        self._newest: dict[str, int] = {}
        """Keys by id; for requests with the same id the last arrived."""
        self._newest_of_tenant: dict[tuple[str, str], int] = {}
        """Keys by tenant and id, so that no tenant can hide another's request by using its id."""
        self._watches: list[RequestWatch] = []
        self.unwritten = UnwrittenRecords()
        self._recovered_keys = itertools.count(FIRST_RECOVERED_KEY, -1)
        self._next_number = 1
        self.oldest_number = 1
        """Requests that ended with this number or a later one are all in memory."""

    def number_from(self, number: int) -> None:
        """Number the ends from here on. Call it once, before the first arrival."""
        self._next_number = self.oldest_number = number

    def is_under_way(self, key: int) -> bool:
        """Whether a request has not ended."""
        return key in self._under_way

    def note_arrival(self, request: Request, wall: datetime) -> None:
        """Record an arrived request; `wall`: UTC."""
        spec = request.spec
        request.arrived_wall = wall - timedelta(seconds=spec.age_seconds) if spec.age_seconds else wall
        if (task := self._tasks.get(spec.task_id)) is not None:
            task.placement, task.spec, self._placements[request.key] = request, spec, task
            self._mark(task.key, spec.tenant)
        if spec.task_id:
            # A task that ended meanwhile needs no record of its last offer.
            return
        if len(self._under_way) < self.limits.max_under_way:
            key = request.key
            self._under_way[key] = request
            self.unwritten.note_arrival(request)
            self._newest[spec.request_id] = self._newest_of_tenant[spec.tenant, spec.request_id] = key
            if self._watches:
                self._mark(key, spec.tenant)

    def note_decisions(self, decisions: Iterable[Decision], now: float) -> None:
        """Record the decisions of a step.

        The start of a load is recorded with the next status of each request that waits for it.
        """
        loads: list[Loads] = []
        for decision in decisions:
            if isinstance(decision, Placed):
                self._note(decision, now)
            elif isinstance(decision, StopsWaking):
                continue  # waiting requests see it when the wake ends
            elif isinstance(decision, Wakes):
                self._note_wakes(decision, now)
            elif isinstance(decision, Loads):
                loads.append(decision)
            else:
                self._note(decision, now)
        # Last, so that the loads of this step are recorded first.
        for status in loads:
            self._note_loading(status, now)

    def note_failed(self, key: int, failed: FailedAttempt, now: float) -> None:
        """Record a failed attempt."""
        entry = self._placed(key)
        if entry is not None:
            entry.status = failed
            self._add(entry, failed, now)
            self._mark_placed(entry)

    # -- tasks

    def begin_task(self, spec: PlacementRequest, age_seconds: float, now: float, wall: datetime) -> RecordedTask | None:
        """Record a task that is offered, once; returns it. None: too many requests are under way."""
        known = self._tasks.get(spec.task_id)
        if known is not None or len(self._under_way) >= self.limits.max_under_way:
            return known
        key = next(self._recovered_keys)
        task = RecordedTask(
            key=key, spec=spec, arrived_at=now - age_seconds, arrived_wall=wall - timedelta(seconds=age_seconds)
        )
        self._under_way[key] = self._tasks[spec.task_id] = task
        self._newest[spec.request_id] = self._newest_of_tenant[spec.tenant, spec.request_id] = key
        self._mark(key, spec.tenant)
        return task

    def pause_task(self, task_id: str, retry: task_pb2.TaskRetry, pause_seconds: float, now: float) -> None:
        """Record that an attempt of a task failed and that another one follows."""
        task = self._tasks.get(task_id)
        if task is None:
            return
        task.retry = retry
        following = len(task.attempts) + 1
        noted = Pauses(following, pause_seconds, retry.failed_count, retry.max_attempts)
        task.past = [*task.past, (now, noted)][-self.limits.max_decisions :]
        self._mark(task.key, task.spec.tenant)

    def note_canceller(self, tenant: str, task_id: str, cancelled_by: str) -> asyncio.Future[None] | None:
        """Record who cancels a task; returns a future of its end. None: it is not under way here."""
        task = self._tasks.get(task_id)
        if task is None or task.spec.tenant != tenant:
            return None
        task.cancelled_by = cancelled_by
        task.ended = task.ended or asyncio.get_running_loop().create_future()
        return task.ended

    def end_task(self, task: RecordedTask, receipt: receipt_pb2.Receipt, message: str, now: float) -> None:
        """Record the end of a task. `receipt`: over all its attempts."""
        if task.placement is not None:
            self._placements.pop(task.placement.key, None)
            task.leave(None, self.limits.max_decisions)
        self._tasks.pop(task.spec.task_id, None)
        if task.ended is not None and not task.ended.done():
            task.ended.set_result(None)
        if len(task.attempts) == len(receipt.attempts):
            for shown, known in zip(receipt.attempts, task.attempts, strict=True):
                shown.engine_log.extend(known.engine_log)
        reason = reason_of(receipt.reason)
        by = task.cancelled_by or receipt.cancelled_by
        task.cancelled_by = by if reason is Reason.CANCELLED else ""
        words = f"cancelled by {actor_words(by)}" if task.cancelled_by else message
        if receipt.HasField("total_time"):
            # A process before may have ended it.
            now = min(now, task.arrived_at + seconds_of(receipt.total_time))
        self._end(task, reason, words, now, receipt)

    def _end_placement(self, task: RecordedTask, end: RequestEnded) -> None:
        """Record the end of a placement of a task; the task decides what follows."""
        request, receipt = end.request, end.receipt
        failed = None if receipt is None else _failed_in_answer(receipt)
        if failed is not None:
            self._add(request, failed, end.at)
        task.cancelled_by = request.cancelled_by or task.cancelled_by
        task.leave(receipt, self.limits.max_decisions)
        del self._placements[request.key]
        self._mark(task.key, task.spec.tenant)

    def note_end(self, end: RequestEnded) -> None:
        """Record the end of a request; the first end and the first receipt count.

        A request that its dispatcher leaves because this router stops is removed: its stored record has no end, so it
        is lost with this router unless another router continues it.
        """
        request, reason, receipt, now = end.request, end.reason, end.receipt, end.at
        key = request.key
        task, error = self._placements.get(key), end.refusal
        if error is not None:
            self._note(Rejects(key=key, reason=error.reason, message=error.log_message, metadata=error.metadata), now)
        if task is not None:
            self._end_placement(task, end)
        if task is not None or error is not None:
            return
        if end.is_closing and receipt is None and reason is Reason.CANCELLED and not request.cancelled_by:
            self._under_way.pop(key, None)
        entry = self._placed(key)
        if entry is not None and end.is_no_request:
            self._drop(entry)
            return
        if entry is not None:
            words = f"cancelled by {actor_words(entry.cancelled_by)}" if entry.cancelled_by else ""
            failed = None if receipt is None else _failed_in_answer(receipt)
            if failed is not None:
                self._add(entry, failed, now)
            self._end(entry, reason, words or _error_words(entry, reason), now, receipt)
            return
        ended = self._ended.get(key)
        if ended is not None and receipt is not None and not (record := ended.read()).HasField("receipt"):
            ended = self._ended[key] = self._ended_of(ended.key, ended.number, record, receipt, ended.forget_at)
            self._note_ended(ended)

    def lacks_end(self, request_id: str, tenant: str) -> bool:
        """Whether the end of the newest request with this id is unknown here; the end of one under way is to come."""
        key = self._newest_of_tenant.get((tenant, request_id))
        ended = None if key is None else self._ended.get(key)
        return key is None or (ended is not None and was_left(ended.read()))

    def recover(
        self,
        lost: PlacementRequest,
        receipt: receipt_pb2.Receipt,
        now: float,
        wall: datetime,
        stored: pb.RequestRecord | None = None,
    ) -> pb.RequestRecord | None:
        """Record the end of a lost request that became known later; returns its previous record. None: there was none.

        `stored`: its record in the database, if memory has none. Requires `lacks_end`.
        """
        key = self._newest_of_tenant.get((lost.tenant, lost.request_id))
        before = stored if key is None else self._ended.pop(key).read()
        record = pb.RequestRecord()
        record.CopyFrom(before or begun_record(lost, wall - timedelta(seconds=lost.age_seconds)))
        took = timedelta(seconds=receipt.total_time.ToNanoseconds() / 1e9)
        record.reason = Reason.UNSPECIFIED.value  # type: ignore[assignment]  # its receipt says more
        record.message = receipt.attempts[-1].message if receipt.attempts else ""
        record.cancelled_by = receipt.cancelled_by
        end = min(wall, datetime_of(record.arrive_time) + took) if took else wall
        key = next(self._recovered_keys) if key is None else key
        self._newest[lost.request_id] = self._newest_of_tenant[lost.tenant, lost.request_id] = key
        self.unwritten.note_placed_again(lost)
        self._add_ended(key, record, end, now, receipt)
        return before

    def find(self, request_id: str, now: float, tenant: str = "") -> UnderWay | EndedRequest | None:
        """Return the tenant's newest request with this id; of any tenant if empty."""
        self._forget_old(now)
        key = self._newest_of_tenant.get((tenant, request_id)) if tenant else self._newest.get(request_id)
        return None if key is None else self._under_way.get(key) or self._ended.get(key)

    def under_way(self, limit: int, tenant: str = "") -> tuple[list[UnderWay], int]:
        """Return the requests under way, oldest first, and their number; of one tenant, or of all if empty."""
        found = [entry for entry in self._under_way.values() if tenant in ("", entry.spec.tenant)]
        return heapq.nsmallest(limit, found, key=lambda entry: (entry.arrived_at, entry.key)), len(found)

    def ended(
        self, limit: int, now: float, tenant: str, is_wanted: Callable[[EndedRequest], bool]
    ) -> tuple[list[EndedRequest], int]:
        """Return the wanted finished requests, last first, and their number; of one tenant, or of all if empty."""
        self._forget_old(now)
        found = [each for each in reversed(self._ended.values()) if tenant in ("", each.tenant) and is_wanted(each)]
        return found[:limit], len(found)

    def newest(self, key: int) -> UnderWay | EndedRequest | None:
        """Return a request by its key; None: it is not in memory, or its tenant reused its id."""
        entry = self._under_way.get(key) or self._ended.get(key)
        if entry is None:
            return None
        known = entry if isinstance(entry, EndedRequest) else entry.spec
        return entry if self._newest_of_tenant.get((known.tenant, known.request_id)) == key else None

    @contextmanager
    def watching(self, tenant: str, ended_limit: int, limits: WatchLimits, clock: Clock) -> Generator[RequestWatch]:
        """Context of a watch of one tenant's requests, or of all: those under way, the last ended ones, and changes."""
        under_way, _ = self.under_way(len(self._under_way), tenant)
        self._forget_old(clock.monotonic())
        ended = (each.key for each in reversed(self._ended.values()) if tenant in ("", each.tenant))
        first = [*(entry.key for entry in under_way), *islice(ended, ended_limit)]
        watch = RequestWatch(tenant, first, limits, clock)
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    @property
    def watch_count(self) -> int:
        """Number of watches."""
        return len(self._watches)

    def close(self) -> None:
        """End all watches with SHUTTING_DOWN."""
        for watch in self._watches:
            watch.end(WeftError(Reason.SHUTTING_DOWN, "the router is shutting down; watch again"))

    def _mark(self, key: int, tenant: str, *, only_figures: bool = False) -> None:
        for watch in self._watches:
            watch.note(key, tenant, only_figures=only_figures)

    def _placed(self, key: int) -> Request | None:
        """Return the request under way with this key; for a task its placement."""
        task = self._placements.get(key)
        entry = self._under_way.get(key) if task is None else task.placement
        return entry if isinstance(entry, Request) else None

    def _drop(self, entry: Request) -> None:
        """Forget a request; see `is_no_request`."""
        del self._under_way[entry.key]
        self.unwritten.forget(entry.key)
        self._forget_id(entry.key, entry.spec.tenant, entry.spec.request_id)

    def _mark_placed(self, entry: Request, *, only_figures: bool = False) -> None:
        if self._watches:
            self._mark(self._placements.get(entry.key, entry).key, entry.spec.tenant, only_figures=only_figures)

    def _note(self, decision: Waits | Loads | Placed | Rejects, now: float) -> None:
        entry = self._placed(decision.key)
        if entry is None:
            return
        task = self._placements.get(entry.key)
        if isinstance(decision, Rejects):
            self._note_refusal(entry, task, decision, now)
            return
        is_repeated = not isinstance(decision, Placed) and _repeats(entry.status, decision)
        if not is_repeated:
            self._add(entry, decision, now)
        entry.status = decision
        if task is not None and isinstance(decision, Placed):
            task.retry = None
        if self._watches:
            self._mark_placed(entry, only_figures=is_repeated)

    def _note_refusal(self, entry: Request, task: RecordedTask | None, refusal: Rejects, now: float) -> None:
        if is_no_request(entry.spec, refusal.reason):
            self._drop(entry)
            return
        words = _error_words(entry, refusal.reason) or refusal.message
        self._add(entry, refusal, now)
        if task is None:
            self._end(entry, refusal.reason, words, now)
        else:
            # The task decides what follows.
            self._mark_placed(entry)

    def _note_wakes(self, wakes: Wakes, now: float) -> None:
        self._wakes[wakes.model] = LoadStart(wakes, now)
        self._wakes.move_to_end(wakes.model)
        if len(self._wakes) > self.limits.max_wakes:
            self._wakes.popitem(last=False)

    def _note_loading(self, status: Loads, now: float) -> None:
        entry = self._placed(status.key)
        if entry is None:
            return
        if not _repeats(entry.status, status):
            # A load's status contains its model.
            for name in status.stage.split():
                begun = self._wakes.get(name)
                if begun is None or begun.at < entry.arrived_at:
                    continue
                if all(known is not begun for _, known in entry.decisions):
                    self._add(entry, begun, begun.at)
        self._note(status, now)

    def _add(self, entry: Request, noted: Noted, now: float) -> None:
        entry.decisions.append((now, noted))
        if len(entry.decisions) > self.limits.max_decisions:
            del entry.decisions[0]

    def _end(
        self, entry: UnderWay, reason: Reason, message: str, now: float, receipt: receipt_pb2.Receipt | None = None
    ) -> None:
        record = begun_record(entry.spec, entry.arrived_wall)
        record.reason = reason.value  # type: ignore[assignment]  # same numbers
        record.message = message
        record.cancelled_by = entry.cancelled_by
        add_decisions(record, entry.decisions, entry.arrived_at, has_ended=True)
        self._under_way.pop(entry.key, None)
        # By the clock of its arrival, in whole microseconds, as databases store no finer times.
        end = entry.arrived_wall + timedelta(seconds=now - entry.arrived_at)
        self._add_ended(entry.key, record, end, now, receipt)
        self._forget_old(now)

    def _add_ended(
        self, key: int, record: pb.RequestRecord, end: datetime, now: float, receipt: receipt_pb2.Receipt | None
    ) -> None:
        """Add a request that ended at `end` (UTC), which is `now` on this router's clock."""
        record.state = pb.RequestRecord.STATE_ENDED
        record.end_time.CopyFrom(stamp_of(end))
        ended = self._ended_of(key, self._next_number, record, receipt, now + self.limits.keep_seconds)
        self._next_number += 1
        self._ended[key] = ended
        self._note_ended(ended)
        if len(self._ended) > self.limits.max_ended:
            self._forget_oldest()

    def _ended_of(
        self,
        key: int,
        number: int,
        record: pb.RequestRecord,
        receipt: receipt_pb2.Receipt | None,
        forget_at: float,
    ) -> EndedRequest:
        """Return an ended request, adding the receipt to its record."""
        if receipt is not None:
            record.receipt.CopyFrom(self._bounded(receipt))
            if not record.reason and receipt.reason:
                record.reason = reason_of(receipt.reason).value  # type: ignore[assignment]  # same numbers
        return EndedRequest(
            key=key,
            number=number,
            request_id=record.request_id,
            tenant=record.tenant,
            arrived_at=seconds_of(record.arrive_time),
            ended_at=seconds_of(record.end_time),
            reason=reason_of(record.reason),
            record=record.SerializeToString(),
            forget_at=forget_at,
            quotes_content=receipt is not None and _quotes_content(receipt),
        )

    def _note_ended(self, ended: EndedRequest) -> None:
        self.unwritten.note_end(ended)
        if self._watches:
            self._mark(ended.key, ended.tenant)

    def _forget_old(self, now: float) -> None:
        if now < self._forget_at:
            return
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if now <= oldest.forget_at:
                self._forget_at = oldest.forget_at
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        key, ended = self._ended.popitem(last=False)
        self.oldest_number = ended.number + 1
        self._forget_id(key, ended.tenant, ended.request_id)

    def _forget_id(self, key: int, tenant: str, request_id: str) -> None:
        if self._newest.get(request_id) == key:
            del self._newest[request_id]
        if self._newest_of_tenant.get((tenant, request_id)) == key:
            del self._newest_of_tenant[tenant, request_id]

    def _bounded(self, receipt: receipt_pb2.Receipt) -> receipt_pb2.Receipt:
        if receipt.ByteSize() <= self.limits.max_receipt_bytes:
            return receipt
        kept = receipt_pb2.Receipt()
        kept.CopyFrom(receipt)
        clear_quotes(kept)
        if kept.ByteSize() > self.limits.max_receipt_bytes:
            for attempt in kept.attempts[:-1]:
                attempt.ClearField("message")
        if kept.ByteSize() > self.limits.max_receipt_bytes:
            kept.ClearField("attempts")
        if kept.ByteSize() <= self.limits.max_receipt_bytes:
            return kept
        return receipt_pb2.Receipt(outcome=receipt.outcome, reason=receipt.reason, left_premises=receipt.left_premises)


def _failed_in_answer(receipt: receipt_pb2.Receipt) -> FailedAttempt | None:
    """Return the attempt that failed after its answer had begun; None: there is none."""
    last = receipt.attempts[-1] if receipt.attempts else None
    if last is None or last.reason in _NO_FAILURES or not receipt.HasField("time_to_first_token"):
        return None
    return FailedAttempt(len(receipt.attempts), reason_of(last.reason), last.message, has_content=True)


def _error_words(entry: Request, reason: Reason) -> str:
    """Return the error of the last failed attempt if the request ended with the same reason, as its caller got that."""
    if not reason:
        return ""
    failed = next((noted for _, noted in reversed(entry.decisions) if isinstance(noted, FailedAttempt)), None)
    return failed.message if failed is not None and failed.reason is reason else ""


def _quotes_content(receipt: receipt_pb2.Receipt) -> bool:
    if receipt.signals or receipt.warnings:
        return True
    # Not any(), as this runs for each request.
    for each in receipt.attempts:  # noqa: SIM110
        if each.engine_log:
            return True
    return False


def clear_quotes(receipt: receipt_pb2.Receipt) -> None:
    """Remove what may quote a request's content; see `EndedRequest.quotes_content`."""
    receipt.ClearField("signals")
    receipt.ClearField("warnings")
    for attempt in receipt.attempts:
        attempt.ClearField("engine_log")


def _repeats(last: object, status: Waits | Loads) -> bool:
    """Whether a status message repeats the last one except for its figures."""
    if isinstance(status, Waits):
        return isinstance(last, Waits) and last.reason == status.reason and not status.considered
    return isinstance(last, Loads) and _without_figures(last.stage) == _without_figures(status.stage)


def _without_figures(stage: str) -> str:
    """Return a stage without its figures, which are in parentheses."""
    return stage.partition(" (")[0]

"""Tasks kept in memory, as the databases keep them; a test can let it fail, and look inside."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kit.messages import changed

from router_svc.durable.tasks.task_records import (
    LOST_LEASE,
    Claim,
    ExpiredLease,
    Lane,
    NewChunk,
    NewTask,
    PendingTask,
    StateCount,
    TaskOutcome,
)
from router_svc.policy.task_release import KeptTasks, Release
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import DEFAULT_LISTED, event_number, is_terminal, task_error
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import optional_stamp, stamp_of

if TYPE_CHECKING:
    import asyncio


@dataclass(slots=True)
class Kept:
    """One task."""

    row: NewTask
    state: "task_pb2.TaskState.ValueType" = task_pb2.TASK_STATE_PENDING
    attempt: int = 0
    failures: int = 0
    owner: str = ""
    lease_until: float = 0.0
    ready_at: float = 0.0
    expires_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    error: task_pb2.TaskError | None = None
    chunks: list[NewChunk] = field(default_factory=list)
    attempts: list[task_pb2.TaskAttempt] = field(default_factory=list)

    def has(self, claim: Claim) -> bool:
        return self.state == task_pb2.TASK_STATE_RUNNING and (self.owner, self.attempt) == (claim.owner, claim.attempt)

    @property
    def last_index(self) -> int:
        return self.chunks[-1].first_index + self.chunks[-1].event_count - 1 if self.chunks else 0

    def end(
        self,
        state: "task_pb2.TaskState.ValueType",
        now: float,
        failure: task_pb2.TaskError | None,
        receipt: bytes = b"",
    ) -> None:
        self.state, self.ended_at, self.error = state, now, failure
        self.end_attempt(failure, now, receipt)
        self.owner = ""

    def end_attempt(self, failure: task_pb2.TaskError | None, now: float, receipt: bytes = b"") -> None:
        if self.attempts and not self.attempts[-1].HasField("end_time"):
            why = failure or task_error(Reason.UNSPECIFIED, "")
            self.attempts[-1] = changed(
                self.attempts[-1],
                end_time=stamp_of(now),
                reason=why.reason,
                message=why.message,
                receipt=receipt_pb2.Receipt.FromString(receipt) if receipt else None,
            )

    def wait_again(self, now: float, ready_at: float) -> None:
        self.state, self.owner, self.ready_at = task_pb2.TASK_STATE_PENDING, "", ready_at
        self.chunks.clear()
        window = self.row.window_ends_at
        self.expires_at = now + self.row.pending_limit_seconds if window is None else window

    def task(self) -> task_pb2.Task:
        last = self.last_index
        return changed(
            self.row.task,
            state=self.state,
            create_time=stamp_of(self.row.created_at),
            start_time=optional_stamp(self.started_at),
            end_time=optional_stamp(self.ended_at),
            expire_time=stamp_of(self.expires_at) if self.state == task_pb2.TASK_STATE_PENDING else None,
            attempt=self.attempt,
            error=self.error if self.state == task_pb2.TASK_STATE_FAILED else None,
            last_event=event_number(self.attempt, last) if last else 0,
            owner=self.owner,
        )


class MemoryTaskStore:
    """See TaskStore."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}
        self.is_failing = False
        """Whether every call raises SERVICE_UNAVAILABLE."""
        self.claims: list[Claim] = []
        """All that ever were."""
        self.reads = 0
        """How often lanes were read."""
        self.ended: list[tuple[Claim, TaskOutcome, bool]] = []
        """Every reported end, and whether it counted."""
        self.claims_answer_late: asyncio.Event | None = None
        """A claim that is on disk is acknowledged when it is set."""
        self.renewals_answer_late: asyncio.Event | None = None
        """A renewal that is on disk is acknowledged when it is set."""

    def only(self) -> Kept:
        """The one task."""
        (kept,) = self.kept.values()
        return kept

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def database_now(self) -> float | None:
        return None

    async def submit(self, row: NewTask) -> task_service_pb2.SubmitTaskResponse:
        known = await self.submitted(row)
        if known is not None:
            return known
        kept = self.kept[row.task.id] = Kept(row, ready_at=row.created_at, expires_at=row.expires_at)
        return task_service_pb2.SubmitTaskResponse(task=kept.task())

    async def submitted(self, row: NewTask) -> task_service_pb2.SubmitTaskResponse | None:
        self._look()
        for kept in self.kept.values():
            if row.idempotency_key and (kept.row.task.tenant, kept.row.idempotency_key) == (
                row.task.tenant,
                row.idempotency_key,
            ):
                if kept.row.digest != row.digest:
                    raise WeftError(Reason.IDEMPOTENCY_CONFLICT, "the key was used for something else")
                return task_service_pb2.SubmitTaskResponse(task=kept.task(), existed=True)
        return None

    async def open_of_request(self, request_id: str, limit: int) -> Sequence[task_pb2.Task]:
        kept = [each for each in self.kept.values() if each.row.task.request_id == request_id]
        return [each.task() for each in kept if not is_terminal(each.task())][:limit]

    async def get(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        kept = self._of(tenant, task_id)
        return None if kept is None else kept.task()

    async def details(self, tenant: str, task_id: str) -> task_service_pb2.GetTaskResponse | None:
        kept = self._of(tenant, task_id)
        if kept is None:
            return None
        return task_service_pb2.GetTaskResponse(
            task=kept.task(), spec=task_pb2.TaskSpec.FromString(kept.row.spec), attempts=list(kept.attempts)
        )

    async def list_page(
        self, tenant: str, query: task_service_pb2.ListTasksRequest
    ) -> task_service_pb2.ListTasksResponse:
        self._look()
        found = [
            kept.task()
            for kept in reversed(self.kept.values())
            if kept.row.task.tenant == tenant and (not query.states or kept.state in query.states)
        ]
        return task_service_pb2.ListTasksResponse(tasks=found[: query.page_size or DEFAULT_LISTED])

    async def chunks(
        self, task_id: str, attempt: int, after_index: int, max_bytes: int
    ) -> Sequence[task_pb2.TaskPiece]:
        self._look()
        kept = self.kept.get(task_id)
        if kept is None or kept.attempt != attempt:
            return []
        found: list[task_pb2.TaskPiece] = []
        size = 0
        for chunk in kept.chunks:
            last = chunk.first_index + chunk.event_count - 1
            if last <= after_index:
                continue
            size += len(chunk.output)
            if found and size > max_bytes:
                break
            output = task_pb2.TaskOutput.FromString(chunk.output)
            found.append(task_pb2.TaskPiece(attempt=attempt, last_event=event_number(attempt, last), output=output))
        return found

    async def cancel(self, tenant: str, task_id: str, now: float) -> task_pb2.Task | None:
        kept = self._of(tenant, task_id)
        if kept is None:
            return None
        owner = kept.owner
        if not is_terminal(kept.task()):
            kept.end(task_pb2.TASK_STATE_CANCELLED, now, None)
        return changed(kept.task(), owner=owner)

    async def delete(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        kept = self._of(tenant, task_id)
        if kept is None:
            return None
        if not is_terminal(kept.task()):
            raise WeftError(Reason.RESOURCE_IN_USE, "the task is not at its end; cancel it first")
        del self.kept[task_id]
        return kept.task()

    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        self._look()
        lanes = sorted({kept.row.lane for kept in self._ready(now)})
        return [lane for lane in lanes if after is None or lane > after][:limit]

    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        self._look()
        self.reads += 1
        found: list[PendingTask] = []
        size = 0
        for kept in self._ready(now):
            row = kept.row
            if row.lane != lane or len(found) == limit:
                continue
            size += len(row.spec)
            if found and size > max_bytes:
                break
            found.append(
                PendingTask(
                    id=row.task.id,
                    lane=lane,
                    spec=row.spec,
                    caller=row.task.caller,
                    attempt=kept.attempt,
                    failures=kept.failures,
                    max_attempts=row.task.max_attempts,
                    batch=row.task.batch,
                )
            )
        return found

    async def next_ready_at(self, now: float) -> float | None:
        self._look()
        waiting = (kept.ready_at for kept in self.kept.values() if kept.state == task_pb2.TASK_STATE_PENDING)
        return min((moment for moment in waiting if moment > now), default=None)

    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
        self._look()
        kept = self.kept.get(task_id)
        if kept is None or kept not in self._ready(now):
            return None
        kept.state, kept.owner, kept.lease_until = task_pb2.TASK_STATE_RUNNING, owner, lease_until
        kept.attempt += 1
        kept.started_at = now
        kept.attempts.append(task_pb2.TaskAttempt(attempt=kept.attempt, owner=owner, claim_time=stamp_of(now)))
        claim = Claim(task_id, owner, kept.attempt)
        self.claims.append(claim)
        if self.claims_answer_late is not None:
            await self.claims_answer_late.wait()
        return claim

    async def renew(self, owner: str, lease_until: float) -> frozenset[Claim]:
        self._look()
        mine = [
            kept for kept in self.kept.values() if kept.state == task_pb2.TASK_STATE_RUNNING and kept.owner == owner
        ]
        for kept in mine:
            kept.lease_until = lease_until
        if self.renewals_answer_late is not None:
            await self.renewals_answer_late.wait()
        return frozenset(Claim(kept.row.task.id, owner, kept.attempt) for kept in mine)

    async def append(self, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        kept = self._held(claim)
        if kept is None:
            return False
        assert chunks[0].first_index == kept.last_index + 1, "pieces follow one another"
        kept.chunks.extend(chunks)
        return True

    async def end(self, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        kept = self._held(claim)
        self.ended.append((claim, outcome, kept is not None))
        if kept is None:
            return False
        kept.chunks.extend(outcome.chunks)
        kept.end(outcome.state, now, outcome.failure, outcome.receipt)
        return True

    async def revert(
        self, claim: Claim, failure: task_pb2.TaskError, *, receipt: bytes, counts: bool, now: float, ready_at: float
    ) -> bool:
        kept = self._held(claim)
        if kept is None:
            return False
        kept.end_attempt(failure, now, receipt)
        kept.failures += counts
        kept.wait_again(now, ready_at)
        return True

    async def revert_expired(self, now: float, limit: int, *, except_of: str = "") -> Sequence[ExpiredLease]:
        self._look()
        over = [
            kept
            for kept in self.kept.values()
            if kept.state == task_pb2.TASK_STATE_RUNNING and kept.lease_until <= now and kept.owner != except_of
        ]
        return [self._take_back(kept, now) for kept in over[:limit]]

    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        self._look()
        return 0

    async def fail_expired(self, now: float, limit: int) -> Sequence[str]:
        self._look()
        over = [
            kept for kept in self.kept.values() if kept.state == task_pb2.TASK_STATE_PENDING and kept.expires_at <= now
        ]
        for kept in over[:limit]:
            kept.end(task_pb2.TASK_STATE_FAILED, now, task_error(Reason.QUEUE_TIMEOUT, "it waited too long"))
        return [kept.row.task.id for kept in over[:limit]]

    async def purge_ended(self, before: float, limit: int) -> int:
        self._look()
        over = [kept.row.task.id for kept in self.kept.values() if kept.ended_at is not None and kept.ended_at < before]
        for task_id in over[:limit]:
            del self.kept[task_id]
        return len(over[:limit])

    async def kept_counts(self) -> Mapping[str, KeptTasks]:
        self._look()
        kept: dict[str, KeptTasks] = {}
        for each in self.kept.values():
            if each.ended_at is not None:
                own = kept.get(each.row.task.tenant, KeptTasks(count=0, size=0))
                kept[each.row.task.tenant] = KeptTasks(count=own.count + 1, size=own.size + len(each.row.spec))
        return kept

    async def release_oldest(self, wanted: Release, limit: int) -> KeptTasks:
        self._look()
        ended = [each for each in self.kept.values() if each.ended_at is not None]
        ended = [each for each in ended if wanted.tenant in ("", each.row.task.tenant)]
        count = size = 0
        for each in sorted(ended, key=lambda one: one.ended_at or 0.0)[:limit]:
            if count >= wanted.count and size >= wanted.size:
                break
            count, size = count + 1, size + len(each.row.spec)
            del self.kept[each.row.task.id]
        return KeptTasks(count=count, size=size)

    async def state_counts(self) -> Mapping["task_pb2.TaskState.ValueType", StateCount]:
        self._look()
        states = Counter(kept.task().state for kept in self.kept.values())
        return {state: StateCount(count) for state, count in states.items()}

    async def open_counts(self) -> Mapping[str, int]:
        self._look()
        return Counter(kept.row.task.tenant for kept in self.kept.values() if not is_terminal(kept.task()))

    def _look(self) -> None:
        if self.is_failing:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router's database failed", retry_after_seconds=1)

    def _of(self, tenant: str, task_id: str) -> Kept | None:
        self._look()
        kept = self.kept.get(task_id)
        return kept if kept is not None and kept.row.task.tenant == tenant else None

    def _held(self, claim: Claim) -> Kept | None:
        self._look()
        kept = self.kept.get(claim.task_id)
        return kept if kept is not None and kept.has(claim) else None

    def _ready(self, now: float) -> list[Kept]:
        return [
            kept
            for kept in self.kept.values()
            if kept.state == task_pb2.TASK_STATE_PENDING and kept.ready_at <= now < kept.expires_at
        ]

    def _take_back(self, kept: Kept, now: float) -> ExpiredLease:
        claim = Claim(kept.row.task.id, kept.owner, kept.attempt)
        failure = task_error(LOST_LEASE, "the router that ran it is gone")
        kept.failures += 1
        if kept.failures >= kept.row.task.max_attempts:
            kept.end(task_pb2.TASK_STATE_FAILED, now, failure)
        else:
            kept.end_attempt(failure, now)
            kept.wait_again(now, now)
        return ExpiredLease(claim=claim, lane=kept.row.lane, state=kept.state)

"""Executes operations: a limited number concurrently, those on the same model in order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

from registry_svc.operations.actions import action_summary
from registry_svc.operations.audit_log import AuditLog
from registry_svc.operations.job import Job, JobCancelled, JobDeps, JobReport
from registry_svc.operations.live_operations import ENDED, LiveOperation, OperationTable, startable
from registry_svc.operations.operation_spans import OperationSpans
from registry_svc.operations.operation_store import OperationStore
from registry_svc.operations.runner_presence import cancelled
from registry_svc.registry_config import OperationLimits
from registry_svc.wire_values import cleaned_multiline
from registry_svc.writer import SingleWriter
from weft.api.common.v1.error_reason_pb2 import ERROR_REASON_CANCELLED
from weft.api.operations.v1.operation_pb2 import Operation, OperationResult
from weft.api.operations.v1.operation_service_pb2 import AuditEntry
from weft.documents.codec import word_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.timestamps import datetime_of, stamp_of

log = get_logger("weft.registry.operations")

MAX_STAGE_CHARS = 64
MAX_DETAIL_CHARS = 4_096
# Runners come back within seconds after a restart of a host that they share with the registry.
RESUME_PATIENCE_SECONDS = 60.0
# An unload waits at most the runner's drain time for requests to end.
UNDO_LIMIT_SECONDS = 900.0
FIRST_SAVE_PAUSE_SECONDS = 1.0
MAX_SAVE_PAUSE_SECONDS = 30.0

Step = Callable[[Operation], None]
"""Changes a copy of an operation."""


class Executor:
    """Runs the operations of a table. `writer` serializes their changes, also with the code that accepts them."""

    def __init__(
        self,
        deps: JobDeps,
        store: OperationStore,
        audit: AuditLog,
        table: OperationTable,
        writer: SingleWriter,
        settings: OperationLimits,
        spans: OperationSpans,
    ) -> None:
        self._deps = deps
        self._spans = spans
        self._clock = deps.clock
        self._store = store
        self._audit = audit
        self._table = table
        self._writer = writer
        self._settings = settings

    async def stop(self) -> None:
        """Leaves all operations unfinished; the next registry process resumes them."""
        await stop_tasks([live.task for live in self._table if live.task is not None])

    def pump(self) -> None:
        """Starts operations that may run. Called whenever an operation was accepted or has ended."""
        for live in startable(self._table, self._settings.max_running):
            live.task = start_task(self._run(live), name=live.operation.name)

    async def change(self, live: LiveOperation, step: Step, drafts: Sequence[AuditEntry] = ()) -> None:
        """Applies a step on disk, then in memory, then notifies watchers. Call it in the writer's turn.

        Does nothing if the operation has ended meanwhile. Raises SERVICE_UNAVAILABLE; then nothing has changed.
        """
        if live.operation.state in ENDED:
            return
        operation = Operation()
        operation.CopyFrom(live.operation)
        step(operation)
        if operation == live.operation:
            return
        self._audit.moved(await self._store.update(operation, drafts))
        live.operation = operation
        if operation.state in ENDED:
            live.progress, live.ends_at = Operation(), None
            self._table.remove(live)
            self._spans.ended(operation, live.trace)
        self._table.publish(live)

    async def _run(self, live: LiveOperation) -> None:
        name, summary = live.operation.name, action_summary(live.operation.action)
        log.info("operation begins", operation=name, work=summary, resumed=live.resumed)
        if live.operation.state == Operation.STATE_PENDING:
            begun = Operation(state=Operation.STATE_RUNNING, start_time=stamp_of(self._clock.utc_now()))
            await self._surely(live, lambda each: each.MergeFrom(begun), ("operation.started", "", {}))
        if live.operation.state in ENDED:
            self.pump()  # it was cancelled just before its turn
            return
        ending = await self._carried_out(live)
        state, reason = word_of(ending, "state"), Reason(ending.reason)
        log.info("operation ended", operation=name, state=state, reason=reason.name)
        detail: dict[str, object] = {"detail": ending.detail}
        if reason is not Reason.UNSPECIFIED:
            detail["reason"] = reason.name.lower()
        step = end_step(ending, self._clock.utc_now())
        await self._surely(live, step, (f"operation.{state}", live.operation.runner, detail))
        self.pump()

    async def _carried_out(self, live: LiveOperation) -> Operation:
        """Does the work. Returns the state, reason, detail and result of its end."""
        try:
            return await self._supervised(live)
        except Exception:
            log.exception("operation failed unexpectedly", operation=live.operation.name)
            return _failed(Reason.INTERNAL, "an internal error; the registry's log has the details")

    async def _supervised(self, live: LiveOperation) -> Operation:
        """Does the work, and ends it on timeout or cancellation."""
        job = self._job(live)
        left = self._seconds_left(live.operation)
        working = asyncio.create_task(job.run(), name="operation-work")
        expiring = asyncio.create_task(self._clock.sleep(left), name="operation-timeout")
        asking = asyncio.create_task(live.cancel_requested.wait(), name="operation-cancel")
        try:
            await asyncio.wait({working, expiring, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and asking.done():
                cancelling = Operation()
                cancelling.CopyFrom(live.progress)
                cancelling.stage = "cancelling"
                self._show(live, cancelling, None)
                job.request_cancel()
                await asyncio.wait({working, expiring}, return_when=asyncio.FIRST_COMPLETED)
            in_time = working.done()
            await cancelled(working)
            return await self._ending(live, job, working, in_time=in_time)
        finally:
            await cancelled(working, expiring, asking)

    async def _ending(
        self,
        live: LiveOperation,
        job: Job,
        working: "asyncio.Task[OperationResult]",
        *,
        in_time: bool,
    ) -> Operation:
        error = None if working.cancelled() else working.exception()
        if error is None and not working.cancelled():
            return Operation(state=Operation.STATE_SUCCEEDED, result=working.result())
        if live.cancel_requested.is_set() and isinstance(error, JobCancelled | WeftError | None):
            return cancelled_operation(await self._undone(job))
        if not in_time:
            left_over = await self._undone(job)
            text = f"it took longer than {self._settings.timeout_seconds:g} s"
            return _failed(Reason.DEADLINE_EXCEEDED, f"{text}; {left_over}" if left_over else text)
        if isinstance(error, WeftError):
            return _failed(error.reason, _cleaned(error.log_message))
        assert error is not None, "work that was not cancelled has a result or an error"
        raise error

    async def _undone(self, job: Job) -> str:
        """Undoes a job. Returns what could not be undone, as text."""
        undoing = asyncio.create_task(job.undo(), name="operation-undo")
        expiring = asyncio.create_task(self._clock.sleep(UNDO_LIMIT_SECONDS), name="operation-undo-timeout")
        try:
            await asyncio.wait({undoing, expiring}, return_when=asyncio.FIRST_COMPLETED)
            if undoing.done():
                return _cleaned(undoing.result())
            return f"its runner did not unload within {UNDO_LIMIT_SECONDS:g} s"
        finally:
            await cancelled(undoing, expiring)

    def _job(self, live: LiveOperation) -> Job:
        job = Job(
            self._deps,
            live.operation,
            self._report(live),
            patient_until=self._clock.monotonic() + RESUME_PATIENCE_SECONDS if live.resumed else 0.0,
        )
        if live.cancel_requested.is_set():
            job.request_cancel()
        return job

    async def _surely(self, live: LiveOperation, step: Step, entry: tuple[str, str, dict[str, object]]) -> None:
        """Applies a step that records what has happened, and retries until the database accepts it.

        At most `max_running` of them wait, and only until the registry stops.
        """
        event, actor, detail = entry
        draft = self._audit.drafted(event, live.operation, actor, **detail)
        pause = FIRST_SAVE_PAUSE_SECONDS
        while True:
            try:
                await self._writer.run(lambda: self.change(live, step, [draft]))
            except WeftError as error:
                if error.reason is not Reason.SERVICE_UNAVAILABLE:
                    raise
                log.error("operation not saved, trying again", operation=live.operation.name)  # noqa: TRY400 - the store has logged the cause
            else:
                return
            await self._clock.sleep(pause)
            pause = min(pause * 2, MAX_SAVE_PAUSE_SECONDS)

    async def _keep(self, live: LiveOperation, step: Step) -> None:
        """Applies a step without an audit entry. Raises SERVICE_UNAVAILABLE."""
        await self._writer.run(lambda: self.change(live, step))

    def _seconds_left(self, operation: Operation) -> float:
        """Returns how long a started operation may still take; at most its timeout even if the clock was set back."""
        timeout_seconds = self._settings.timeout_seconds
        spent = (self._clock.utc_now() - datetime_of(operation.start_time)).total_seconds()
        return min(max(timeout_seconds - spent, 0.0), timeout_seconds)

    def _show(self, live: LiveOperation, progress: Operation, ends_at: float | None) -> None:
        live.progress, live.ends_at = progress, ends_at
        if live.trace is not None:
            live.trace.note(progress.stage, self._clock.utc_now())
        self._table.publish(live)

    def _report(self, live: LiveOperation) -> JobReport:
        """Returns callbacks that record a job's reports in the table of operations."""

        def progressed(progress: Operation, ends_at: float | None) -> None:
            if live.operation.state in ENDED:
                return
            if not 0.0 <= progress.progress <= 1.0:
                progress.ClearField("progress")
            is_cancelled = live.cancel_requested.is_set()
            progress.stage = "cancelling" if is_cancelled else _cleaned(progress.stage)[:MAX_STAGE_CHARS]
            progress.detail = _cleaned(progress.detail)
            self._show(live, progress, ends_at)

        def begun(models: Sequence[str]) -> Awaitable[None]:
            partial = OperationResult(models=models)
            return self._keep(live, lambda operation: operation.result.CopyFrom(partial))

        def assigned(runner: str) -> Awaitable[None]:
            return self._keep(live, lambda operation: setattr(operation, "runner", runner))

        return JobReport(progress=progressed, assigned=assigned, begun=begun)


def end_step(ending: Operation, now: datetime) -> Step:
    """Returns the step that ends an operation with the state, reason, detail and result of `ending`."""

    def end(operation: Operation) -> None:
        operation.ClearField("result")
        operation.MergeFrom(ending)
        operation.end_time.CopyFrom(stamp_of(now))

    return end


def cancelled_operation(detail: str) -> Operation:
    """Returns the end of a cancelled operation."""
    return Operation(state=Operation.STATE_CANCELLED, reason=ERROR_REASON_CANCELLED, detail=detail)


def _failed(reason: Reason, detail: str) -> Operation:
    number = reason.value
    return Operation(state=Operation.STATE_FAILED, reason=number, detail=detail)  # type: ignore[arg-type]  # same numbers


def _cleaned(text: str) -> str:
    return cleaned_multiline(text[:MAX_DETAIL_CHARS], "detail", MAX_DETAIL_CHARS)

"""Executes operations: a limited number concurrently, those on the same model in order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from registry_svc.config import OperationLimits
from registry_svc.operations.actions import action_summary
from registry_svc.operations.audit_log import AuditLog
from registry_svc.operations.job import Job, JobCancelled, JobDeps, JobReport
from registry_svc.operations.live_operations import LiveOperation, OperationTable
from registry_svc.operations.operation_spans import OperationSpans
from registry_svc.operations.operation_store import OperationStore
from registry_svc.operations.policy.lifecycle import (
    Ending,
    GovernedOperation,
    OperationProgress,
    OperationState,
    Unfinished,
    assigned,
    ended,
    seconds_left,
    startable,
    started,
)
from registry_svc.operations.runner_presence import cancelled
from registry_svc.wire_values import cleaned_multiline
from registry_svc.writer import SingleWriter
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import AuditEntry
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.service import start_task, stop_tasks

log = get_logger("weft.registry.operations")

MAX_STAGE_CHARS = 64
MAX_DETAIL_CHARS = 4_096
# Runners come back within seconds after a restart of a host that they share with the registry.
RESUME_PATIENCE_SECONDS = 60.0
# An unload waits at most the runner's drain time for requests to end.
UNDO_LIMIT_SECONDS = 900.0
FIRST_SAVE_PAUSE_SECONDS = 1.0
MAX_SAVE_PAUSE_SECONDS = 30.0

Step = Callable[[GovernedOperation], GovernedOperation]


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
        unfinished = [
            Unfinished(id=live.operation.id, subjects=live.subjects, running=live.task is not None, after=live.after)
            for live in self._table
        ]
        for operation_id in startable(unfinished, self._settings.max_running):
            live = self._table.get(operation_id)
            assert live is not None, "only what is in the book can be chosen"
            live.task = start_task(self._run(live), name=f"operation-{operation_id}")

    async def change(self, live: LiveOperation, step: Step, drafts: Sequence[AuditEntry] = ()) -> None:
        """Applies a step on disk, then in memory, then notifies watchers. Call it in the writer's turn.

        Does nothing if the operation has ended meanwhile. Raises SERVICE_UNAVAILABLE; then nothing has changed.
        """
        if live.operation.ended:
            return
        operation = step(live.operation)
        if operation == live.operation:
            return
        self._audit.moved(await self._store.update(operation, drafts))
        live.operation = operation
        if operation.ended:
            live.progress = OperationProgress()
            self._table.remove(live)
            self._spans.ended(operation, live.trace)
        self._table.publish(live)

    async def _run(self, live: LiveOperation) -> None:
        operation = live.operation
        log.info("operation begins", operation=operation.name, work=action_summary(live.action), resumed=live.resumed)
        if operation.state is OperationState.PENDING:
            now = self._clock.utc_now()
            await self._surely(live, lambda each: started(each, now), ("operation.started", "", {}))
        if live.operation.ended:
            self.pump()  # it was cancelled just before its turn
            return
        ending = await self._carried_out(live)
        log.info(
            "operation ended", operation=operation.name, state=ending.state.name.lower(), reason=ending.reason.name
        )
        now = self._clock.utc_now()
        detail: dict[str, object] = {"detail": ending.detail}
        if ending.reason is not Reason.UNSPECIFIED:
            detail["reason"] = ending.reason.name.lower()
        event = f"operation.{ending.state.name.lower()}"
        await self._surely(live, lambda each: ended(each, ending, now), (event, live.operation.runner, detail))
        self.pump()

    async def _carried_out(self, live: LiveOperation) -> Ending:
        try:
            return await self._supervised(live)
        except Exception:
            log.exception("operation failed unexpectedly", operation=live.operation.name)
            return Ending(
                state=OperationState.FAILED,
                reason=Reason.INTERNAL,
                detail="an internal error; the registry's log has the details",
            )

    async def _supervised(self, live: LiveOperation) -> Ending:
        """Does the work, and ends it on timeout or cancellation."""
        job = self._job(live)
        left = seconds_left(live.operation, self._clock.utc_now(), self._settings.timeout_seconds)
        working = asyncio.create_task(job.run(), name="operation-work")
        expiring = asyncio.create_task(self._clock.sleep(left), name="operation-timeout")
        asking = asyncio.create_task(live.cancel_requested.wait(), name="operation-cancel")
        try:
            await asyncio.wait({working, expiring, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and asking.done():
                self._show(live, replace(live.progress, stage="cancelling", ends_at=None))
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
        working: "asyncio.Task[operation_pb2.OperationResult]",
        *,
        in_time: bool,
    ) -> Ending:
        error = None if working.cancelled() else working.exception()
        if error is None and not working.cancelled():
            result = working.result().SerializeToString(deterministic=True)
            return Ending(state=OperationState.SUCCEEDED, result=result)
        if live.cancel_requested.is_set() and isinstance(error, JobCancelled | WeftError | None):
            return Ending(state=OperationState.CANCELLED, reason=Reason.CANCELLED, detail=await self._undone(job))
        if not in_time:
            left_over = await self._undone(job)
            text = f"it took longer than {self._settings.timeout_seconds:g} s"
            detail = f"{text}; {left_over}" if left_over else text
            return Ending(state=OperationState.FAILED, reason=Reason.DEADLINE_EXCEEDED, detail=detail)
        if isinstance(error, WeftError):
            return Ending(state=OperationState.FAILED, reason=error.reason, detail=_cleaned(error.message))
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
        begun = operation_pb2.OperationResult.FromString(live.operation.result).models
        job = Job(
            self._deps,
            live.operation.id,
            live.action,
            self._report(live),
            begun=begun,
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

    def _show(self, live: LiveOperation, progress: OperationProgress) -> None:
        live.progress = progress
        if live.trace is not None:
            live.trace.note(progress.stage, self._clock.utc_now())
        self._table.publish(live)

    def _report(self, live: LiveOperation) -> JobReport:
        """Returns callbacks that record a job's reports in the table of operations."""

        def progressed(progress: OperationProgress) -> None:
            if live.operation.ended:
                return
            share = progress.share if progress.share is not None and 0.0 <= progress.share <= 1.0 else None
            stage = "cancelling" if live.cancel_requested.is_set() else _cleaned(progress.stage)[:MAX_STAGE_CHARS]
            self._show(live, replace(progress, stage=stage, detail=_cleaned(progress.detail), share=share))

        def begun(models: Sequence[str]) -> Awaitable[None]:
            partial = operation_pb2.OperationResult(models=models).SerializeToString(deterministic=True)
            return self._keep(live, lambda operation: replace(operation, result=partial))

        return JobReport(
            progress=progressed,
            assigned=lambda runner: self._keep(live, lambda operation: assigned(operation, runner)),
            begun=begun,
        )


def _cleaned(text: str) -> str:
    return cleaned_multiline(text[:MAX_DETAIL_CHARS], "detail", MAX_DETAIL_CHARS)

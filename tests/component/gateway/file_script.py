"""A file store and a batch store in memory: tests set the outcome of lines."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from gateway_script import delta, finished, started, usage
from kit.messages import changed

from weft.api.router.v1 import batch_service_pb2, file_service_pb2, task_pb2
from weft.durable.batches import MAX_PIECE_BYTES, BatchClient, FileClient, LineResult, batch_not_found, file_not_found
from weft.durable.tasks import is_terminal, task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MAX_KEPT = 100
HELLO = (task_pb2.TaskOutput(events=[started(), delta("Hello"), delta(finish="STOP"), usage(), finished()]),)


@dataclass
class MemoryFiles(FileClient):
    """The file store of a router. `failure` is raised by every method but `save`, which raises `save_failure`."""

    kept: dict[str, tuple[file_service_pb2.File, list[bytes]]] = field(default_factory=dict)
    failure: WeftError | None = None
    save_failure: WeftError | None = None
    keeps_nothing: bool = False
    """Whether content is read and discarded."""
    count: int = 0

    async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
        pieces, size = [], 0
        async for piece in content:
            assert 0 < len(piece) <= MAX_PIECE_BYTES
            size += len(piece)
            pieces += [] if self.keeps_nothing else [piece]
        if self.save_failure is not None:
            raise self.save_failure
        self.count += 1
        file = file_service_pb2.File(
            id=f"file-{self.count}",
            tenant=new.tenant,
            name=new.name,
            purpose=new.purpose,
            byte_count=size,
            create_time=stamp_of(NOW + timedelta(seconds=self.count)),
            expire_time=stamp_of(NOW + timedelta(days=30)),
            media_type=new.media_type,
        )
        if len(self.kept) < MAX_KEPT:
            self.kept[file.id] = (file, pieces)
        return file

    async def get(self, tenant: str, file_id: str) -> file_service_pb2.File:
        return self._find(tenant, file_id)[0]

    async def list_page(
        self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100
    ) -> file_service_pb2.ListFilesResponse:
        if after:
            self._find(tenant, after)
        own = [file for file, _ in reversed(self.kept.values()) if file.tenant == tenant]
        fitting = [file for file in own if purpose in {"", file.purpose}]
        start = [file.id for file in fitting].index(after) + 1 if after else 0
        return file_service_pb2.ListFilesResponse(
            files=fitting[start : start + limit], has_more=start + limit < len(fitting)
        )

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        for piece in self._find(tenant, file_id)[1]:
            yield piece

    async def delete(self, tenant: str, file_id: str) -> None:
        self._find(tenant, file_id)
        del self.kept[file_id]

    def text(self, file_id: str) -> str:
        """The content of a file."""
        return b"".join(self.kept[file_id][1]).decode()

    def _find(self, tenant: str, file_id: str) -> tuple[file_service_pb2.File, list[bytes]]:
        if self.failure is not None:
            raise self.failure
        found = self.kept.get(file_id)
        if found is None or found[0].tenant != tenant:
            raise file_not_found(file_id)
        return found


@dataclass
class KeptBatch:
    batch: batch_service_pb2.Batch
    results: list[LineResult] = field(default_factory=list)


@dataclass
class MemoryBatches(BatchClient):
    """The batch store of a router.

    `line_failure` is raised by `create` once it has all lines, `failure` by every other method.
    """

    kept: dict[str, KeptBatch] = field(default_factory=dict)
    callers: list[str] = field(default_factory=list)
    news: list[batch_service_pb2.Batch] = field(default_factory=list)
    failure: WeftError | None = None
    line_failure: WeftError | None = None
    keeps_nothing: bool = False
    reads: int = 0
    """How many times reading the results has begun."""
    in_hand: set[str] = field(default_factory=set)
    """Batches whose results are being written, or could not be; a test removes them to have them tried again."""

    async def create(
        self,
        new: batch_service_pb2.Batch,
        lines: AsyncIterator[batch_service_pb2.BatchLine],
        *,
        caller: str = "local",
    ) -> batch_service_pb2.Batch:
        batch_id = f"batch-{len(self.news) + 1}"
        results = [
            LineResult(custom_id=line.custom_id, task=_task(batch_id, new.tenant, place, line), origin=line.spec.origin)
            async for place, line in _counted(lines)
        ]
        if self.line_failure is not None and not new.errors:
            raise self.line_failure
        batch = batch_service_pb2.Batch(
            id=batch_id,
            tenant=new.tenant,
            state=batch_service_pb2.BATCH_STATE_FAILED if new.errors else batch_service_pb2.BATCH_STATE_IN_PROGRESS,
            endpoint=new.endpoint,
            input_file=new.input_file,
            errors=new.errors,
            total_count=len(results),
            metadata=new.metadata,
            create_time=stamp_of(NOW),
            window_end_time=new.window_end_time,
            end_time=stamp_of(NOW) if new.errors else None,
        )
        if not self.keeps_nothing:
            self.news.append(new)
            self.callers.append(caller)
            self.kept[batch.id] = KeptBatch(batch, results)
        return batch

    async def get(self, tenant: str, batch_id: str) -> batch_service_pb2.Batch:
        return self._find(tenant, batch_id).batch

    async def list_page(
        self, tenant: str, *, after: str = "", limit: int = 20
    ) -> batch_service_pb2.ListBatchesResponse:
        if after:
            self._find(tenant, after)
        own = [kept.batch for kept in reversed(self.kept.values()) if kept.batch.tenant == tenant]
        start = [batch.id for batch in own].index(after) + 1 if after else 0
        return batch_service_pb2.ListBatchesResponse(
            batches=own[start : start + limit], has_more=start + limit < len(own)
        )

    async def cancel(self, tenant: str, batch_id: str) -> batch_service_pb2.Batch:
        kept = self._find(tenant, batch_id)
        if kept.batch.state == batch_service_pb2.BATCH_STATE_IN_PROGRESS:
            left = [place for place, result in enumerate(kept.results) if not is_terminal(result.task)]
            for place in left:
                self.end(batch_id, place, task_pb2.TASK_STATE_CANCELLED)
            kept.batch = changed(kept.batch, cancel_time=NOW)
            self.close(batch_id)
        return kept.batch

    async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        self.reads += 1
        for result in self._find(tenant, batch_id).results:
            yield result

    async def ended(self) -> AsyncGenerator[batch_service_pb2.Batch]:
        while True:
            for kept in list(self.kept.values()):
                if kept.batch.state == batch_service_pb2.BATCH_STATE_FINALIZING and kept.batch.id not in self.in_hand:
                    self.in_hand.add(kept.batch.id)
                    yield kept.batch
            await asyncio.sleep(0.001)

    async def finish(
        self,
        tenant: str,
        batch_id: str,
        *,
        output_file: str = "",
        error_file: str = "",
        problem: batch_service_pb2.BatchLineError | None = None,
    ) -> batch_service_pb2.Batch:
        kept = self._find(tenant, batch_id)
        if problem is not None:
            kept.batch = changed(kept.batch, problem=problem)
            return kept.batch
        if kept.batch.state == batch_service_pb2.BATCH_STATE_FINALIZING:
            kept.batch = changed(
                kept.batch,
                state=batch_service_pb2.BATCH_STATE_FINISHED,
                output_file=output_file,
                error_file=error_file,
                problem=None,
                end_time=NOW + timedelta(minutes=2),
            )
        return kept.batch

    def end(
        self,
        batch_id: str,
        index: int,
        state: "task_pb2.TaskState.ValueType" = task_pb2.TASK_STATE_COMPLETED,
        outputs: tuple[task_pb2.TaskOutput, ...] = (),
        **fields: object,
    ) -> None:
        """End one line."""
        results = self.kept[batch_id].results
        task = changed(results[index].task, state=state, **fields)
        results[index] = replace(results[index], task=task, outputs=outputs)

    def close(self, batch_id: str) -> None:
        """All lines have ended."""
        kept = self.kept[batch_id]
        tasks = [result.task for result in kept.results]
        assert all(is_terminal(task) for task in tasks)
        states = [task.state for task in tasks]
        expired = sum(task.error == EXPIRED for task in tasks)
        kept.batch = changed(
            kept.batch,
            state=batch_service_pb2.BATCH_STATE_FINALIZING,
            total_count=len(states),
            completed_count=states.count(task_pb2.TASK_STATE_COMPLETED),
            failed_count=states.count(task_pb2.TASK_STATE_FAILED) - expired,
            cancelled_count=states.count(task_pb2.TASK_STATE_CANCELLED),
            expired_count=expired,
            lines_end_time=NOW + timedelta(minutes=1),
        )

    def _find(self, tenant: str, batch_id: str) -> KeptBatch:
        if self.failure is not None:
            raise self.failure
        found = self.kept.get(batch_id)
        if found is None or found.batch.tenant != tenant:
            raise batch_not_found(batch_id)
        return found


EXPIRED = task_error(Reason.DEADLINE_EXCEEDED, "the window was over")


async def _counted(
    lines: AsyncIterator[batch_service_pb2.BatchLine],
) -> AsyncGenerator[tuple[int, batch_service_pb2.BatchLine]]:
    index = 0
    async for line in lines:
        yield index, line
        index += 1


def _task(batch_id: str, tenant: str, index: int, line: batch_service_pb2.BatchLine) -> task_pb2.Task:
    return task_pb2.Task(
        id=f"task-{batch_id}-{index}",
        tenant=tenant,
        state=task_pb2.TASK_STATE_PENDING,
        model=line.spec.model,
        batch=batch_id,
        line=index,
        create_time=stamp_of(NOW),
        max_attempts=5,
        origin_kind=line.spec.origin_kind,
    )

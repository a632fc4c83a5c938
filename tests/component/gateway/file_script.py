"""A file store and a batch store in memory: tests set the outcome of lines."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from gateway_script import delta, finished, started, usage

from weft.api.router.v1 import task_pb2
from weft.durable.batches import (
    MAX_PIECE_BYTES,
    Batch,
    BatchLine,
    BatchPage,
    BatchState,
    FilePage,
    LineCounts,
    LineResult,
    NewBatch,
    NewFile,
    StoredFile,
    batch_not_found,
    file_not_found,
)
from weft.durable.tasks import Task, TaskFailure, TaskState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MAX_KEPT = 100
HELLO = (task_pb2.TaskOutput(events=[started(), delta("Hello"), delta(finish="STOP"), usage(), finished()]),)


@dataclass
class MemoryFiles:
    """A FilePort. `failure` is raised by every method but `save`, which raises `save_failure`."""

    kept: dict[str, tuple[StoredFile, list[bytes]]] = field(default_factory=dict)
    failure: WeftError | None = None
    save_failure: WeftError | None = None
    keeps_nothing: bool = False
    """Whether content is read and discarded."""
    count: int = 0

    async def save(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        pieces, size = [], 0
        async for piece in content:
            assert 0 < len(piece) <= MAX_PIECE_BYTES
            size += len(piece)
            pieces += [] if self.keeps_nothing else [piece]
        if self.save_failure is not None:
            raise self.save_failure
        self.count += 1
        file = StoredFile(
            id=f"file-{self.count}",
            tenant=new.tenant,
            name=new.name,
            purpose=new.purpose,
            size=size,
            created_at=NOW + timedelta(seconds=self.count),
            expires_at=NOW + timedelta(days=30),
        )
        if len(self.kept) < MAX_KEPT:
            self.kept[file.id] = (file, pieces)
        return file

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        return self._find(tenant, file_id)[0]

    async def list_page(self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100) -> FilePage:
        if after:
            self._find(tenant, after)
        own = [file for file, _ in reversed(self.kept.values()) if file.tenant == tenant]
        fitting = [file for file in own if purpose in {"", file.purpose}]
        start = [file.id for file in fitting].index(after) + 1 if after else 0
        return FilePage(files=fitting[start : start + limit], has_more=start + limit < len(fitting))

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        for piece in self._find(tenant, file_id)[1]:
            yield piece

    async def delete(self, tenant: str, file_id: str) -> None:
        self._find(tenant, file_id)
        del self.kept[file_id]

    def text(self, file_id: str) -> str:
        """The content of a file."""
        return b"".join(self.kept[file_id][1]).decode()

    def _find(self, tenant: str, file_id: str) -> tuple[StoredFile, list[bytes]]:
        if self.failure is not None:
            raise self.failure
        found = self.kept.get(file_id)
        if found is None or found[0].tenant != tenant:
            raise file_not_found(file_id)
        return found


@dataclass
class KeptBatch:
    batch: Batch
    results: list[LineResult] = field(default_factory=list)


@dataclass
class MemoryBatches:
    """A BatchPort. `line_failure` is raised by `create` once it has all lines, `failure` by every other method."""

    kept: dict[str, KeptBatch] = field(default_factory=dict)
    news: list[NewBatch] = field(default_factory=list)
    failure: WeftError | None = None
    line_failure: WeftError | None = None
    keeps_nothing: bool = False
    reads: int = 0
    """How many times reading the results has begun."""

    async def create(self, new: NewBatch, lines: AsyncIterator[BatchLine]) -> Batch:
        batch_id = f"batch-{len(self.news) + 1}"
        results = [
            LineResult(custom_id=line.custom_id, task=_task(batch_id, new.tenant, place, line), origin=line.spec.origin)
            async for place, line in _counted(lines)
        ]
        if self.line_failure is not None and not new.errors:
            raise self.line_failure
        batch = Batch(
            id=batch_id,
            tenant=new.tenant,
            state=BatchState.FAILED if new.errors else BatchState.IN_PROGRESS,
            endpoint=new.endpoint,
            input_file=new.input_file,
            errors=new.errors,
            counts=LineCounts(total=len(results)),
            metadata=new.metadata,
            created_at=NOW,
            window_ends_at=new.window_ends_at,
            ended_at=NOW if new.errors else None,
        )
        if not self.keeps_nothing:
            self.news.append(new)
            self.kept[batch.id] = KeptBatch(batch, results)
        return batch

    async def get(self, tenant: str, batch_id: str) -> Batch:
        return self._find(tenant, batch_id).batch

    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> BatchPage:
        if after:
            self._find(tenant, after)
        own = [kept.batch for kept in reversed(self.kept.values()) if kept.batch.tenant == tenant]
        start = [batch.id for batch in own].index(after) + 1 if after else 0
        return BatchPage(batches=own[start : start + limit], has_more=start + limit < len(own))

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        kept = self._find(tenant, batch_id)
        if kept.batch.state is BatchState.IN_PROGRESS:
            left = [place for place, result in enumerate(kept.results) if not result.task.state.is_terminal]
            for place in left:
                self.end(batch_id, place, TaskState.CANCELLED)
            kept.batch = replace(kept.batch, cancelled_at=NOW)
            self.close(batch_id)
        return kept.batch

    async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        self.reads += 1
        for result in self._find(tenant, batch_id).results:
            yield result

    async def finish(self, tenant: str, batch_id: str, *, output_file: str, error_file: str) -> Batch:
        kept = self._find(tenant, batch_id)
        if kept.batch.state is BatchState.FINALIZING:
            kept.batch = replace(
                kept.batch,
                state=BatchState.FINISHED,
                output_file=output_file,
                error_file=error_file,
                ended_at=NOW + timedelta(minutes=2),
            )
        return kept.batch

    def end(
        self,
        batch_id: str,
        place: int,
        state: TaskState = TaskState.COMPLETED,
        outputs: tuple[task_pb2.TaskOutput, ...] = (),
        **fields: object,
    ) -> None:
        """End one line."""
        results = self.kept[batch_id].results
        task = replace(results[place].task, state=state, **fields)  # type: ignore[arg-type]
        results[place] = replace(results[place], task=task, outputs=outputs)

    def close(self, batch_id: str) -> None:
        """All lines have ended."""
        kept = self.kept[batch_id]
        tasks = [result.task for result in kept.results]
        assert all(task.state.is_terminal for task in tasks)
        states = [task.state for task in tasks]
        expired = sum(task.error == EXPIRED for task in tasks)
        counts = LineCounts(
            total=len(states),
            completed=states.count(TaskState.COMPLETED),
            failed=states.count(TaskState.FAILED) - expired,
            cancelled=states.count(TaskState.CANCELLED),
            expired=expired,
        )
        lines_ended_at = NOW + timedelta(minutes=1)
        kept.batch = replace(kept.batch, state=BatchState.FINALIZING, counts=counts, lines_ended_at=lines_ended_at)

    def _find(self, tenant: str, batch_id: str) -> KeptBatch:
        if self.failure is not None:
            raise self.failure
        found = self.kept.get(batch_id)
        if found is None or found.batch.tenant != tenant:
            raise batch_not_found(batch_id)
        return found


EXPIRED = TaskFailure(reason=Reason.DEADLINE_EXCEEDED, message="the window was over")


async def _counted(lines: AsyncIterator[BatchLine]) -> AsyncGenerator[tuple[int, BatchLine]]:
    place = 0
    async for line in lines:
        yield place, line
        place += 1


def _task(batch_id: str, tenant: str, place: int, line: BatchLine) -> Task:
    return Task(
        id=f"task-{batch_id}-{place}",
        tenant=tenant,
        state=TaskState.PENDING,
        model=line.spec.model,
        batch=batch_id,
        line=place,
        created_at=NOW,
        max_attempts=5,
        origin_kind=line.spec.origin_kind,
    )

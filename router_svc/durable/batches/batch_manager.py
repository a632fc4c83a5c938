"""Who keeps batches: lines taken in whole or not at all, counted, cancelled, handed out, and in the end forgotten."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from router_svc.durable.batches.batch_sql import BatchTable
from router_svc.durable.batches.config import BatchLimits
from router_svc.durable.batches.item_intake import ItemIntake
from router_svc.durable.batches.item_sql import CHANGED_AT_ONCE, Item, ItemContent, ItemTable, ItemTally
from router_svc.durable.batches.uploads import INTAKE_LIMIT_SECONDS, Uploads, upload_timed_out
from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.sql_rows import utc
from router_svc.durable.tasks.store_port import ManyChanged
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.store.tables import MAX_ID_CHARS
from weft.api.router.v1 import task_pb2
from weft.dispatch.agents import KnownNames
from weft.durable.batches import (
    BATCH_PREFIX,
    MAX_LINE_ERRORS,
    MAX_METADATA,
    MAX_METADATA_NAME_CHARS,
    MAX_METADATA_VALUE_CHARS,
    Batch,
    BatchLine,
    BatchPage,
    BatchState,
    LineCounts,
    LineError,
    LineResult,
    NewBatch,
    batch_not_found,
)
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, is_token, new_id, require_token
from weft.kernel.reasons import Reason

MAX_ENDPOINT_CHARS = 64
MAX_ERROR_CHARS = 1_000
"""What is longer in an error is cut."""
CLOCK_SLACK_SECONDS = 60.0
"""By how much the clock of whoever names the window may be ahead."""


def checked(new: NewBatch, now: float, max_window_seconds: float) -> NewBatch:
    """The batch with errors as long as they may be. Raises INVALID_ARGUMENT naming `batch.field`."""
    if not 1 <= len(new.endpoint) <= MAX_ENDPOINT_CHARS or not new.endpoint.isprintable():
        raise invalid_field("batch.endpoint", f"must be 1 to {MAX_ENDPOINT_CHARS} printable characters")
    if new.input_file:
        require_token(new.input_file, "batch.input_file", MAX_ID_CHARS)
    _check_metadata(new.metadata)
    window_seconds = new.window_ends_at.timestamp() - now
    if not 0 < window_seconds <= max_window_seconds + CLOCK_SLACK_SECONDS:
        raise invalid_field("batch.window_end_time", f"must be in at most {max_window_seconds:g} seconds from now")
    return replace(new, errors=_cut(new.errors))


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid_field("batch.metadata", f"must have at most {MAX_METADATA} entries")
    for name, value in metadata.items():
        if not 1 <= len(name) <= MAX_METADATA_NAME_CHARS:
            raise invalid_field("batch.metadata", f"must have names of 1 to {MAX_METADATA_NAME_CHARS} characters")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise invalid_field("batch.metadata", f"must have values of at most {MAX_METADATA_VALUE_CHARS} characters")


def _cut(errors: Sequence[LineError]) -> Sequence[LineError]:
    if len(errors) > MAX_LINE_ERRORS:
        raise invalid_field("batch.errors", f"must have at most {MAX_LINE_ERRORS} entries")
    return tuple(
        LineError(
            code=error.code[:MAX_ERROR_CHARS],
            message=error.message[:MAX_ERROR_CHARS],
            line=error.line,
            field=error.field[:MAX_ERROR_CHARS],
        )
        for error in errors
    )


MAX_LISTED = 100
MAX_CREATIONS = 16
"""Batches whose lines come in at once."""
READ_AT_ONCE = 64
"""Lines whose results are looked up at once ..."""
MAX_READ_BYTES = 4 * 1024 * 1024
"""... and read, unless one alone is longer."""
SWEPT_AT_ONCE = 100
SETTLED_AT_ONCE = 10
"""Batches whose lines a sweep counts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTables:
    """Where batches are kept."""

    batches: BatchTable
    lines: ItemTable


class BatchManager:
    """See `weft.durable.batches.BatchPort`."""

    def __init__(
        self,
        tables: BatchTables,
        limits: BatchLimits,
        task_limits: TaskLimits,
        events: TaskEventBus,
        clock: Clock,
        *,
        names: KnownNames | None = None,
    ) -> None:
        self._batches = tables.batches
        self._lines = tables.lines
        self._limits = limits
        self._task_limits = task_limits
        self._events = events
        self._clock = clock
        self._names = names
        self._creations = Uploads("batches", MAX_CREATIONS)

    async def create(self, new: NewBatch, lines: AsyncIterator[BatchLine]) -> Batch:
        """See BatchPort.create. Raises DEADLINE_EXCEEDED, too, where the lines do not come to their end."""
        now = self._now()
        new = checked(new, now, self._limits.max_window_seconds)
        if await self._batches.kept(new.tenant) >= self._limits.max_batches_per_tenant:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant keeps {self._limits.max_batches_per_tenant} batches, as many as it may",
            )
        batch_id = new_id(BATCH_PREFIX)
        if new.errors:
            async for _ in lines:
                raise invalid_field("lines", "a batch with errors has none")
            await self._batches.begin(batch_id, new, now)
            return _batch_of(batch_id, new, now, BatchState.FAILED)
        async with self._creations.one(lambda: self._lines.drop(batch_id)):
            count = await self._take_in(batch_id, new, now, lines)
        return _batch_of(batch_id, new, now, BatchState.IN_PROGRESS, count)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """See BatchPort.get. Whoever asks first after the last line's end writes down how they ended."""
        found = await self._batches.get(tenant, batch_id) if is_token(batch_id, MAX_REQUEST_ID_CHARS) else None
        if found is None:
            raise batch_not_found(batch_id)
        return (await self._settled([found]))[0]

    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> BatchPage:
        """See BatchPort.list_page. Raises INVALID_ARGUMENT, too."""
        if not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        if after and not is_token(after, MAX_REQUEST_ID_CHARS):
            raise batch_not_found(after)
        found = await self._batches.list_page(tenant, after, limit + 1)
        if found is None:
            raise batch_not_found(after)
        return BatchPage(batches=await self._settled(found[:limit]), has_more=len(found) > limit)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """See BatchPort.cancel. One whose lines are at their end stays as it is."""
        batch = await self.get(tenant, batch_id)
        if batch.state is not BatchState.IN_PROGRESS or not await self._batches.mark_cancelled(batch_id, self._now()):
            return batch
        await self._cancel_lines(batch_id)
        return await self.get(tenant, batch_id)

    async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        """See BatchPort.results. Lines whose tasks were deleted, or forgotten after their time, are not there."""
        await self.get(tenant, batch_id)
        after = -1
        while page := await self._lines.page(batch_id, after, READ_AT_ONCE):
            for some in _bunches(page):
                contents = await self._lines.contents(some)
                for line in some:
                    content = contents.get(line.task.id)
                    if content is not None:
                        yield _result_of(line, content)
            after = page[-1].task.line

    async def finish(self, tenant: str, batch_id: str, *, output_file: str, error_file: str) -> Batch:
        """See BatchPort.finish. Raises INVALID_ARGUMENT, too, for files that are not the tenant's results."""
        batch = await self.get(tenant, batch_id)
        if batch.state is BatchState.FINISHED:
            return batch
        if batch.state is not BatchState.FINALIZING:
            raise WeftError(Reason.RESOURCE_IN_USE, f"batch {batch_id} is not at the end of its lines")
        results = {"output_file": output_file, "error_file": error_file}
        for name, file_id in results.items():
            if file_id and not is_token(file_id, MAX_REQUEST_ID_CHARS):
                raise invalid_field(name, "must be the id of a file")
        missing = await self._batches.finish(tenant, batch_id, results, self._now())
        if missing:
            raise invalid_field(missing, f"no file {results[missing]} with results is kept")
        return await self.get(tenant, batch_id)

    async def sweep(self, *, all_broken: bool = False) -> None:
        """Forget what broke off and what is over, and go on with what was cut off.

        `all_broken`: nobody but this router takes batches in, and it just began.
        """
        now = self._now()
        while await self._batches.bring_back(now, SWEPT_AT_ONCE):
            pass
        await self._drop_broken(now if all_broken else now - INTAKE_LIMIT_SECONDS)
        await self._settle_unended()
        over = now - self._limits.keep_batch_seconds
        while await self._batches.purge_ended(over, SWEPT_AT_ONCE) == SWEPT_AT_ONCE:
            pass

    async def stop(self, grace_seconds: float) -> None:
        """Let go of what broke off."""
        await self._creations.stop(grace_seconds)

    async def _take_in(self, batch_id: str, new: NewBatch, now: float, lines: AsyncIterator[BatchLine]) -> int:
        room = await self._room(new.tenant)
        await self._batches.begin(batch_id, new, now)
        intake = ItemIntake(batch_id, new, now, room, (self._limits, self._task_limits), self._names)
        async with aclosing(intake.chunks(lines)) as chunks:
            async for rows in chunks:
                if not await self._lines.add(batch_id, rows):
                    raise upload_timed_out("batch")
        intake.require_room_for_all(await self._room(new.tenant))
        news = intake.news
        if not await self._lines.activate(batch_id, intake.count, news):
            raise upload_timed_out("batch")
        for each in news:
            self._events.publish(each)
        return intake.count

    async def _room(self, tenant: str) -> int:
        """How many more tasks a tenant may have that are not at their end."""
        return self._task_limits.max_open_per_tenant - await self._lines.open_count(tenant)

    async def _settled(self, found: Sequence[Batch]) -> Sequence[Batch]:
        """Batches with the counts of now, and those whose lines are at their end written down as such."""
        unended = [batch.id for batch in found if batch.state is BatchState.IN_PROGRESS]
        if not unended:
            return found
        tallies = await self._lines.tallies(unended)
        return [await self._counted(batch, tallies[batch.id]) if batch.id in tallies else batch for batch in found]

    async def _counted(self, batch: Batch, tally: ItemTally) -> Batch:
        counted = replace(batch, counts=tally.counts(batch.counts.total))
        ended_at = await self._freeze(batch.id, tally)
        if ended_at is None:
            return counted
        return replace(counted, state=BatchState.FINALIZING, lines_ended_at=utc(ended_at))

    async def _freeze(self, batch_id: str, tally: ItemTally) -> float | None:
        """When the last of all lines ended; None: some are open."""
        if tally.open:
            return None
        ended_at = self._now() if tally.last_ended_at is None else tally.last_ended_at
        await self._batches.freeze(batch_id, tally.counts(0), ended_at)
        return ended_at

    async def _cancel_lines(self, batch_id: str) -> None:
        now = self._now()
        try:
            while await self._lines.cancel_some(batch_id, now, CHANGED_AT_ONCE):
                pass
            while await self._lines.cancel_next(batch_id, now):
                pass
        finally:
            # Whoever runs some of them ends its calls.
            self._events.publish(ManyChanged())

    async def _drop_broken(self, before: float) -> None:
        more = True
        while more:
            found = await self._batches.broken(before, SWEPT_AT_ONCE)
            for batch_id in found:
                await self._lines.drop(batch_id)
            more = len(found) == SWEPT_AT_ONCE

    async def _settle_unended(self) -> None:
        """Lines are forgotten some time after their end: until then somebody must have counted them."""
        after = 0
        while found := await self._batches.unended(after, SETTLED_AT_ONCE):
            for batch in found:
                if batch.is_cancelled:
                    await self._cancel_lines(batch.id)
            for batch_id, tally in (await self._lines.tallies([batch.id for batch in found])).items():
                await self._freeze(batch_id, tally)
            after = found[-1].seq

    def _now(self) -> float:
        return self._clock.utc_now().timestamp()


def _batch_of(batch_id: str, new: NewBatch, now: float, state: BatchState, count: int = 0) -> Batch:
    return Batch(
        id=batch_id,
        tenant=new.tenant,
        state=state,
        endpoint=new.endpoint,
        input_file=new.input_file,
        errors=new.errors,
        counts=LineCounts(total=count),
        metadata=new.metadata,
        created_at=utc(now),
        window_ends_at=new.window_ends_at,
        ended_at=utc(now) if state is BatchState.FAILED else None,
    )


def _bunches(lines: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """So many lines at a time as are read at once."""
    some: list[Item] = []
    size = 0
    for line in lines:
        if some and size + line.size > MAX_READ_BYTES:
            yield some
            some, size = [], 0
        some.append(line)
        size += line.size
    if some:
        yield some


def _result_of(line: Item, content: ItemContent) -> LineResult:
    return LineResult(
        custom_id=line.custom_id,
        task=line.task,
        origin=task_pb2.TaskSpec.FromString(content.spec).origin,
        outputs=tuple(task_pb2.TaskOutput.FromString(output) for output in content.outputs),
    )

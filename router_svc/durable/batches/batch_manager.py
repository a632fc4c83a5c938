"""The batch manager: creates batches completely or not at all, counts and cancels items, and purges old batches.

The intake validates the items of a new batch as they arrive, and turns each into a task row.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b

from router_svc.durable.batches.batch_sql import CHANGED_AT_ONCE, BatchStore, Item, ItemContent, ItemTally
from router_svc.durable.batches.uploads import UPLOAD_LIMIT_SECONDS, Uploads, upload_timed_out
from router_svc.durable.limits import BatchLimits, TaskLimits
from router_svc.durable.tasks.spec_validation import checked_row
from router_svc.durable.tasks.store_port import Lane, LaneFilled, ManyChanged, StoreEvent, TaskRow
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_media import TaskMedia
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.dispatch.agents import KnownNames
from weft.durable.batches import (
    BATCH_PREFIX,
    MAX_CUSTOM_ID_CHARS,
    MAX_LINE_ERRORS,
    MAX_METADATA,
    MAX_METADATA_NAME_CHARS,
    MAX_METADATA_VALUE_CHARS,
    LineResult,
    batch_not_found,
)
from weft.durable.tasks import payload_of
from weft.kernel.clock import Clock
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, is_token, new_id, require_token
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import datetime_of, stamp_of

MAX_WINDOW_SECONDS = 7 * 86_400.0
"""Longest completion window of a batch."""
CHUNK_LINES = 256
"""Items that one transaction writes at most ..."""
CHUNK_BYTES = 4 * 1024 * 1024
"""... and about how many bytes."""
MAX_LANES_PUBLISHED = 256
"""Lanes that are published one by one."""
_DIGEST_BYTES = 16


class ItemIntake:
    """The intake of one batch. `room`: how many more open tasks its tenant may have."""

    def __init__(
        self,
        batch: batch_pb.Batch,
        caller: str,
        room: int,
        limits: tuple[BatchLimits, TaskLimits],
        names: KnownNames | None = None,
        media: TaskMedia | None = None,
    ) -> None:
        self._media = media or TaskMedia(None)
        self._batch = batch
        self._caller = caller
        self._created_at = datetime_of(batch.create_time).timestamp()
        self._window_ends_at = datetime_of(batch.window_end_time).timestamp()
        self._room = room
        self._limits, self._task_limits = limits
        self._names = names
        self._seen: set[bytes] = set()
        self._lanes: set[Lane] = set()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of items so far."""
        return self._count

    @property
    def events(self) -> Sequence[StoreEvent]:
        """Events to publish when all items are stored."""
        if len(self._lanes) > MAX_LANES_PUBLISHED:
            return [ManyChanged()]
        return [LaneFilled(lane) for lane in self._lanes]

    def require_room_for_all(self, room: int) -> None:
        """Checks the room again at the end, after other submissions. Raises TOO_MANY_RESOURCES."""
        if self._count > room:
            raise self._too_many()

    async def chunks(self, lines: AsyncIterator[batch_pb.BatchLine]) -> AsyncGenerator[list[TaskRow]]:
        """Yields the items as task rows, in chunks.

        Raises INVALID_ARGUMENT or REQUEST_TOO_LARGE naming `lines[n].field`, n counted from 0, and TOO_MANY_RESOURCES.
        """
        rows: list[TaskRow] = []
        size = 0
        async for line in lines:
            if self._count < self._limits.max_lines:
                await self._media.require_files(self._batch.tenant, line.spec, f"lines[{self._count}].spec")
            row = self._row_of(line)
            rows.append(row)
            size += len(row.spec)
            if len(rows) >= CHUNK_LINES or size >= CHUNK_BYTES:
                yield rows
                rows, size = [], 0
        if not self._count:
            raise invalid_field("lines", "must have at least one")
        if rows:
            yield rows

    def _row_of(self, line: batch_pb.BatchLine) -> TaskRow:
        place = self._count
        self._require_room()
        self._check_custom_id(line.custom_id, f"lines[{place}].custom_id")
        row = self._checked(line, f"lines[{place}].spec")
        self._count += 1
        if len(self._lanes) <= MAX_LANES_PUBLISHED:
            self._lanes.add(row.lane)
        return replace(
            row, batch=self._batch.id, line=place, custom_id=line.custom_id, window_ends_at=self._window_ends_at
        )

    def _checked(self, line: batch_pb.BatchLine, field: str) -> TaskRow:
        if line.spec.options.priority:
            raise invalid_field(f"{field}.options.priority", "must not be set: lines of a batch are durable work")
        row = checked_row(
            line.spec,
            self._task_limits,
            field,
            tenant=self._batch.tenant,
            caller=self._caller,
            created_at=self._created_at,
        )
        if self._names is not None and not line.spec.wait_for_model:
            self._names.require(row.lane.model, f"{field}.model")
            self._names.require_taken(row.lane.model, payload_of(line.spec), f"{field}.model")
        return row

    def _require_room(self) -> None:
        most = self._limits.max_lines
        if self._count >= most:
            raise FieldError("lines", f"must be at most {most}", Reason.REQUEST_TOO_LARGE)
        if self._count >= self._room:
            raise self._too_many()

    def _too_many(self) -> WeftError:
        return WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"the tenant would have more than {self._task_limits.max_open_per_tenant} tasks that have not ended, its "
            "limit (router.tasks.max_open_per_tenant); send the batch when some have ended, or in parts",
        )

    def _check_custom_id(self, custom_id: str, field: str) -> None:
        # PostgreSQL stores no NUL.
        if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS or "\0" in custom_id:
            raise invalid_field(field, f"must be 1 to {MAX_CUSTOM_ID_CHARS} characters")
        digest = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            raise invalid_field(field, "is that of an earlier line")
        self._seen.add(digest)


MAX_ENDPOINT_CHARS = 64
MAX_ERROR_CHARS = 1_000
"""Characters of an error that are stored."""
CLOCK_SLACK_SECONDS = 60.0
"""By how much the clock of the caller that sets the window may be ahead."""


def accepted(new: batch_pb.Batch, now: float, max_window_seconds: float) -> batch_pb.Batch:
    """Returns the new batch as it is stored first: in progress, or failed if it has errors.

    Raises INVALID_ARGUMENT naming `batch.field`.
    """
    if not 1 <= len(new.endpoint) <= MAX_ENDPOINT_CHARS or not new.endpoint.isprintable():
        raise invalid_field("batch.endpoint", f"must be 1 to {MAX_ENDPOINT_CHARS} printable characters")
    if new.input_file:
        require_token(new.input_file, "batch.input_file", MAX_REQUEST_ID_CHARS)
    _check_metadata(new.metadata)
    window_seconds = datetime_of(new.window_end_time).timestamp() - now
    if not 0 < window_seconds <= max_window_seconds + CLOCK_SLACK_SECONDS:
        raise invalid_field("batch.window_end_time", f"must be in at most {max_window_seconds:g} seconds from now")
    return batch_pb.Batch(
        id=new_id(BATCH_PREFIX),
        tenant=new.tenant,
        state=batch_pb.BATCH_STATE_FAILED if new.errors else batch_pb.BATCH_STATE_IN_PROGRESS,
        endpoint=new.endpoint,
        input_file=new.input_file,
        errors=_cut(new.errors),
        metadata=new.metadata,
        create_time=stamp_of(now),
        window_end_time=new.window_end_time,
        end_time=stamp_of(now) if new.errors else None,
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid_field("batch.metadata", f"must have at most {MAX_METADATA} entries")
    for name, value in metadata.items():
        if not 1 <= len(name) <= MAX_METADATA_NAME_CHARS:
            raise invalid_field("batch.metadata", f"must have names of 1 to {MAX_METADATA_NAME_CHARS} characters")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise invalid_field("batch.metadata", f"must have values of at most {MAX_METADATA_VALUE_CHARS} characters")


def _cut(errors: Sequence[batch_pb.BatchLineError]) -> Sequence[batch_pb.BatchLineError]:
    if len(errors) > MAX_LINE_ERRORS:
        raise invalid_field("batch.errors", f"must have at most {MAX_LINE_ERRORS} entries")
    return tuple(
        batch_pb.BatchLineError(
            code=error.code[:MAX_ERROR_CHARS],
            message=error.message[:MAX_ERROR_CHARS],
            line=error.line,
            field=error.field[:MAX_ERROR_CHARS],
        )
        for error in errors
    )


MAX_LISTED = 100
MAX_CREATIONS = 16
"""Batches that are created at once."""
READ_AT_ONCE = 64
"""Items whose results are listed at once ..."""
MAX_READ_BYTES = 4 * 1024 * 1024
"""... and bytes of results read at once, unless one item alone is longer."""
SWEPT_AT_ONCE = 100
SETTLED_AT_ONCE = 10
"""Batches whose items a sweep counts at once."""


class BatchManager:
    """The batch port of a router."""

    def __init__(
        self,
        store: BatchStore,
        limits: BatchLimits,
        task_limits: TaskLimits,
        events: TaskEventBus,
        clock: Clock,
        *,
        names: KnownNames | None = None,
        media: TaskMedia | None = None,
    ) -> None:
        self._media = media
        self._store = store
        self._limits = limits
        self._task_limits = task_limits
        self._events = events
        self._clock = clock
        self._names = names
        self._creations = Uploads("batches", MAX_CREATIONS)
        self._began_at = self._now()
        """Incomplete batches from before are those of a router that ended."""

    async def create(
        self, new: batch_pb.Batch, lines: AsyncIterator[batch_pb.BatchLine], *, caller: str = "local"
    ) -> batch_pb.Batch:
        """Creates a batch. Also raises DEADLINE_EXCEEDED if the items do not arrive in time."""
        now = self._now()
        batch = accepted(new, now, MAX_WINDOW_SECONDS)
        if await self._store.count(batch.tenant) >= self._limits.max_batches_per_tenant:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {self._limits.max_batches_per_tenant} batches, its limit "
                "(router.batches.max_batches_per_tenant)",
            )
        if batch.errors:
            async for _ in lines:
                raise invalid_field("lines", "a batch with errors has none")
            await self._store.begin(batch, now)
            return batch
        async with self._creations.slot(lambda: self._store.drop(batch.id)):
            batch.total_count = await self._receive(batch, caller, lines)
        return batch

    async def get(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        """Returns a batch. The first read after the last item ended stores the final counts."""
        found = await self._store.get(tenant, batch_id) if is_token(batch_id, MAX_REQUEST_ID_CHARS) else None
        if found is None:
            raise batch_not_found(batch_id)
        return (await self._with_counts([found]))[0]

    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> batch_pb.ListBatchesResponse:
        """Returns a page of batches. Also raises INVALID_ARGUMENT."""
        if not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        if after and not is_token(after, MAX_REQUEST_ID_CHARS):
            raise batch_not_found(after)
        found = await self._store.list_page(tenant, after, limit + 1)
        if found is None:
            raise batch_not_found(after)
        return batch_pb.ListBatchesResponse(batches=await self._with_counts(found[:limit]), has_more=len(found) > limit)

    async def cancel(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        """Cancels a batch. One whose items have all ended stays as it is."""
        batch = await self.get(tenant, batch_id)
        if batch.state != batch_pb.BATCH_STATE_IN_PROGRESS or not await self._store.mark_cancelled(
            batch_id, self._now()
        ):
            return batch
        await self._cancel_items(batch_id)
        return await self.get(tenant, batch_id)

    async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        """Yields the results of a batch, without items whose tasks were deleted or purged."""
        await self.get(tenant, batch_id)
        after = -1
        while page := await self._store.page(batch_id, after, READ_AT_ONCE):
            for some in _read_groups(page):
                contents = await self._store.contents(some)
                for line in some:
                    content = contents.get(line.task.id)
                    if content is not None:
                        yield _result_of(line, content)
            after = page[-1].task.line

    async def finish(self, tenant: str, batch_id: str, *, output_file: str, error_file: str) -> batch_pb.Batch:
        """Finishes a batch. Also raises INVALID_ARGUMENT for files that are not result files of the tenant."""
        batch = await self.get(tenant, batch_id)
        if batch.state == batch_pb.BATCH_STATE_FINISHED:
            return batch
        if batch.state != batch_pb.BATCH_STATE_FINALIZING:
            raise WeftError(Reason.RESOURCE_IN_USE, f"batch {batch_id} has lines that have not ended")
        results = {"output_file": output_file, "error_file": error_file}
        for name, file_id in results.items():
            if file_id and not is_token(file_id, MAX_REQUEST_ID_CHARS):
                raise invalid_field(name, "must be the id of a file")
        missing = await self._store.finish(tenant, batch_id, results, self._now())
        if missing:
            raise invalid_field(missing, f"there is no result file {results[missing]}")
        return await self.get(tenant, batch_id)

    async def sweep(self) -> None:
        """Purges old and incomplete batches, and completes interrupted cancellations and counts."""
        now = self._now()
        while await self._store.bring_back(now, SWEPT_AT_ONCE):
            pass
        await self._drop_incomplete(max(self._began_at, now - UPLOAD_LIMIT_SECONDS))
        await self._count_open_batches()
        over = now - self._limits.keep_batch_seconds
        while await self._store.purge_ended(over, SWEPT_AT_ONCE) == SWEPT_AT_ONCE:
            pass

    async def stop(self, grace_seconds: float) -> None:
        """Waits for the removal of failed creations."""
        await self._creations.stop(grace_seconds)

    async def _receive(self, batch: batch_pb.Batch, caller: str, lines: AsyncIterator[batch_pb.BatchLine]) -> int:
        room = await self._room(batch.tenant)
        await self._store.begin(batch, datetime_of(batch.create_time).timestamp())
        intake = ItemIntake(batch, caller, room, (self._limits, self._task_limits), self._names, self._media)
        async with aclosing(intake.chunks(lines)) as chunks:
            async for rows in chunks:
                if not await self._store.add(batch.id, rows):
                    raise upload_timed_out("batch")
        intake.require_room_for_all(await self._room(batch.tenant))
        if not await self._store.activate(batch.id, intake.count):
            raise upload_timed_out("batch")
        for each in intake.events:
            self._events.publish(each)
        return intake.count

    async def _room(self, tenant: str) -> int:
        """Returns how many more open tasks a tenant may have."""
        return self._task_limits.max_open_per_tenant - await self._store.open_count(tenant)

    async def _with_counts(self, found: Sequence[batch_pb.Batch]) -> Sequence[batch_pb.Batch]:
        """Sets the current counts of batches as read; stores the final counts of those whose items have all ended."""
        unended = {batch.id: batch for batch in found if batch.state == batch_pb.BATCH_STATE_IN_PROGRESS}
        tallies = await self._store.tallies(list(unended)) if unended else {}
        for batch_id, tally in tallies.items():
            batch = unended[batch_id]
            for field, count in tally.counts.items():
                setattr(batch, field, count)
            ended_at = await self._store_counts(batch_id, tally)
            if ended_at is not None:
                batch.state = batch_pb.BATCH_STATE_FINALIZING
                batch.lines_end_time.CopyFrom(stamp_of(ended_at))
        return found

    async def _store_counts(self, batch_id: str, tally: ItemTally) -> float | None:
        """Stores the final counts; returns when the last item ended, None if some are open."""
        if tally.open:
            return None
        ended_at = self._now() if tally.last_ended_at is None else tally.last_ended_at
        await self._store.store_counts(batch_id, tally, ended_at)
        return ended_at

    async def _cancel_items(self, batch_id: str) -> None:
        now = self._now()
        try:
            while await self._store.cancel_some(batch_id, now, CHANGED_AT_ONCE):
                pass
        finally:
            # The engines of items that run now stop their calls.
            self._events.publish(ManyChanged())

    async def _drop_incomplete(self, before: float) -> None:
        more = True
        while more:
            found = await self._store.incomplete(before, SWEPT_AT_ONCE)
            for batch_id in found:
                await self._store.drop(batch_id)
            more = len(found) == SWEPT_AT_ONCE

    async def _count_open_batches(self) -> None:
        """Stores the final counts of batches without readers, before their items are purged."""
        after = 0
        while found := await self._store.open_batches(after, SETTLED_AT_ONCE):
            for batch in found:
                if batch.cancelled_at is not None:
                    await self._cancel_items(batch.id)
            for batch_id, tally in (await self._store.tallies([batch.id for batch in found])).items():
                await self._store_counts(batch_id, tally)
            after = found[-1].seq

    def _now(self) -> float:
        return self._clock.utc_now().timestamp()


def _read_groups(lines: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Splits items into groups that are read at once."""
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

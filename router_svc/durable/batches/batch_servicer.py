"""The batch service: creates batches completely or not at all, counts and cancels items, and purges old batches."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import grpc
from typing_extensions import override

from router_svc.call_metadata import id_in, tenant_in
from router_svc.durable.batches.batch_sql import CHANGED_AT_ONCE, BatchStore, ItemTally, batch_of
from router_svc.durable.files import FileServicer
from router_svc.durable.limits import BatchLimits, TaskLimits
from router_svc.durable.store_service import Rpcs, StoreService
from router_svc.durable.tasks.spec_validation import checked_task, limit_to_caller
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.durable.tasks.task_records import (
    ItemEnded,
    Lane,
    LaneFilled,
    ManyChanged,
    NewTask,
    PendingTask,
    StoreEvent,
    TasksEnded,
)
from router_svc.durable.tasks.task_servicer import asking_caller
from router_svc.durable.uploads import (
    IDLE_SECONDS,
    UPLOAD_LIMIT_SECONDS,
    Uploads,
    incomplete_stream,
    received,
    upload_timed_out,
)
from router_svc.durable.webhooks.outbox import Outbox
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import batch_service_pb2_grpc, file_service_pb2, file_service_pb2_grpc, task_pb2
from weft.dispatch.agents import KnownNames
from weft.dispatch.aliases import name_asked_model
from weft.durable.batches import (
    BATCH_PREFIX,
    MAX_CUSTOM_ID_CHARS,
    MAX_LINE_ERRORS,
    MAX_LINES_PER_MESSAGE,
    MAX_METADATA,
    MAX_METADATA_NAME_CHARS,
    MAX_METADATA_VALUE_CHARS,
    BatchClient,
    FileClient,
    batch_not_found,
)
from weft.durable.tasks import payload_of
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer, answering
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_restarting, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, SystemClock, wait_for_event
from weft.kernel.time.timestamps import datetime_of, stamp_of
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, new_id, require_token
from weft.sql.sweeper import Sweeper

Context = grpc.aio.ServicerContext[Any, Any]

log = get_logger("weft.router")

MAX_WINDOW_SECONDS = 7 * 86_400.0
CHUNK_LINES = 256
"""Maximum items per transaction ..."""
CHUNK_BYTES = 4 * 1024 * 1024
"""... and approximate maximum bytes."""
MAX_LANES_PUBLISHED = 256
"""Maximum lanes that are published individually."""
_DIGEST_BYTES = 16


StopItems = Callable[[Callable[[PendingTask], bool]], Awaitable[None]]
"""Cancels the wanted items that run in this process; see `TaskEngine.cancel`."""


async def ignore_items(_: Callable[[PendingTask], bool]) -> None:
    """StopItems of a process that runs no tasks."""


class ItemIntake:
    """Validates the items of a new batch as they arrive and turns them into tasks.

    `room`: open tasks that its tenant may still add.
    """

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
        """Checks again for room at the end, after other submissions. Raises TOO_MANY_RESOURCES."""
        if self._count > room:
            raise self._too_many()

    async def chunks(self, lines: AsyncIterator[batch_pb.BatchLine]) -> AsyncGenerator[list[NewTask]]:
        """Yields the items as new tasks, in chunks.

        Raises INVALID_ARGUMENT or REQUEST_TOO_LARGE naming `lines[n].field`, n counted from 0, and TOO_MANY_RESOURCES.
        """
        some: list[NewTask] = []
        size = 0
        async for line in lines:
            if self._count < self._limits.max_lines:
                await self._media.require_files(self._batch.tenant, line.spec, f"lines[{self._count}].spec")
            new = self._item_of(line)
            some.append(new)
            size += len(new.spec)
            if len(some) >= CHUNK_LINES or size >= CHUNK_BYTES:
                yield some
                some, size = [], 0
        if not self._count:
            raise invalid_field("lines", "must have at least one")
        if some:
            yield some

    def _item_of(self, line: batch_pb.BatchLine) -> NewTask:
        place = self._count
        self._require_room()
        self._check_custom_id(line.custom_id, f"lines[{place}].custom_id")
        new = self._checked(line, f"lines[{place}].spec")
        self._count += 1
        if len(self._lanes) <= MAX_LANES_PUBLISHED:
            self._lanes.add(new.lane)
        new.task.batch, new.task.line = self._batch.id, place
        return replace(new, custom_id=line.custom_id, window_ends_at=self._window_ends_at)

    def _checked(self, line: batch_pb.BatchLine, field: str) -> NewTask:
        if line.spec.options.priority:
            raise invalid_field(f"{field}.options.priority", "must not be set: lines of a batch are durable work")
        new = checked_task(
            line.spec,
            self._task_limits,
            field,
            tenant=self._batch.tenant,
            caller=self._caller,
            created_at=self._created_at,
        )
        if self._names is not None and not line.spec.wait_for_model:
            self._names.require(new.task.model, f"{field}.model")
            self._names.require_taken(new.task.model, payload_of(line.spec), f"{field}.model")
        return new

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
        # PostgreSQL cannot store NUL.
        if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS or "\0" in custom_id:
            raise invalid_field(field, f"must be 1 to {MAX_CUSTOM_ID_CHARS} characters")
        digest = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            raise invalid_field(field, "is used by an earlier line")
        self._seen.add(digest)


MAX_ENDPOINT_CHARS = 64
MAX_BASE_CHARS = 512
MAX_ERROR_CHARS = 1_000
CLOCK_SLACK_SECONDS = 60.0
"""Maximum lead of the clock of a caller that does not state `create_time`."""


def accepted(new: batch_pb.Batch, now: float, max_window_seconds: float) -> batch_pb.Batch:
    """Returns the new batch as first stored: in progress, or failed if it has errors.

    Raises INVALID_ARGUMENT naming `batch.field`.
    """
    if not 1 <= len(new.endpoint) <= MAX_ENDPOINT_CHARS or not new.endpoint.isprintable():
        raise invalid_field("batch.endpoint", f"must be 1 to {MAX_ENDPOINT_CHARS} printable characters")
    if new.input_file:
        require_token(new.input_file, "batch.input_file", MAX_REQUEST_ID_CHARS)
    if len(new.result_base) > MAX_BASE_CHARS or not new.result_base.isascii():
        raise invalid_field("batch.result_base", f"must have at most {MAX_BASE_CHARS} ASCII characters")
    _check_metadata(new.metadata)
    # The caller's clock may differ from this one, so only the length of its window counts.
    asked_at = datetime_of(new.create_time).timestamp() if new.HasField("create_time") else now
    window_seconds = datetime_of(new.window_end_time).timestamp() - asked_at
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
        result_base=new.result_base,
        create_time=stamp_of(now),
        window_end_time=stamp_of(now + window_seconds),
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


COUNT_PAUSE_SECONDS = 1.0
"""Pause after a database failure."""
MAX_LISTED = 100
DEFAULT_LISTED = 20
MAX_CREATIONS = 16
"""Maximum batches being created concurrently."""
READ_AT_ONCE = 64
"""Maximum results listed at a time ..."""
MAX_READ_BYTES = 4 * 1024 * 1024
"""... and maximum bytes read at a time, unless a single item is larger."""
SWEPT_AT_ONCE = 100
SETTLED_AT_ONCE = 10
"""Batches that a sweep counts at a time."""
RETRY_SECONDS = 15.0
"""Time after a failed attempt to write its results until a batch is assigned again."""
WRITING_SECONDS = 3_600.0
"""How long a batch is reserved for the caller that writes its results."""
MAX_PROBLEMS = 1_000
"""Maximum remembered failed attempts; the oldest is dropped first."""


class BatchServicer(AnsweringServicer, batch_service_pb2_grpc.BatchServiceServicer):
    """BatchService of a router."""

    def __init__(  # noqa: PLR0913 - what a router provides
        self,
        store: BatchStore,
        limits: BatchLimits,
        task_limits: TaskLimits,
        events: TaskEventBus,
        clock: Clock,
        *,
        names: KnownNames | None = None,
        media: TaskMedia | None = None,
        idle_seconds: float = IDLE_SECONDS,
        stop_items: StopItems = ignore_items,
    ) -> None:
        """`names`: valid targets of items, ids and aliases included; None: any name is accepted literally."""
        self._media = media
        self._stop_items = stop_items
        self._idle_seconds = idle_seconds
        self._store = store
        self._limits = limits
        self._task_limits = task_limits
        self._events = events
        self._clock = clock
        self._names = names
        self._creations = Uploads("batches", MAX_CREATIONS)
        self._ended: Counter[str] = Counter()
        """Items that ended since the last check of their batch, by batch id."""
        self._has_ended = asyncio.Event()
        self._open: dict[str, int] = {}
        """Lower bound of a batch's open items; they are recounted when it reaches 0."""
        self._settling: asyncio.Task[None] | None = None
        self._in_hand: dict[str, float] = {}
        """Until when a batch is reserved for the caller that writes its results (monotonic), by batch id."""
        self._problems: dict[str, tuple[batch_pb.BatchLineError, float]] = {}
        """Why a batch's results could not be written, and when it is assigned again (monotonic), by batch id."""
        self._has_unwritten = asyncio.Event()
        self._began_at = self._now()
        """Incomplete batches from before this time belong to a router that ended."""

    def start(self) -> None:
        """Starts counting the items of batches as they end."""
        self._events.subscribe(self._note_event)
        self._settling = start_restarting(self._settle_ended, name="batch-settler", clock=self._clock)

    @override
    async def CreateBatch(
        self, request_iterator: AsyncIterator[batch_pb.CreateBatchRequest], context: Context
    ) -> batch_pb.CreateBatchResponse:
        tenant = tenant_in(context)
        async with (
            received(request_iterator, idle_seconds=self._idle_seconds) as (first, messages),
            aclosing(_lines(first, messages, partial(self._name, tenant))) as lines,
        ):
            batch = await self._create(_new(tenant, first.batch), lines, asking_caller(first.requested_by))
        return batch_pb.CreateBatchResponse(batch=batch)

    def _name(self, tenant: str, spec: task_pb2.TaskSpec) -> None:
        """Resolves the model of a line in its spec."""
        if not caller().names_tenants:
            spec.ClearField("asked_model")
        if self._names is not None:
            name_asked_model(self._names.view, spec, tenant)

    async def _create(self, new: batch_pb.Batch, lines: AsyncIterator[batch_pb.BatchLine], asks: str) -> batch_pb.Batch:
        now = self._now()
        batch = accepted(new, now, MAX_WINDOW_SECONDS)
        if await self._store.count(batch.tenant) >= self._limits.max_batches_per_tenant:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {self._limits.max_batches_per_tenant} batches, its limit; delete some",
            )
        if batch.errors:
            async for _ in lines:
                raise invalid_field("lines", "a batch with errors has none")
            await self._store.begin(batch)
            return batch
        async with self._creations.slot(lambda: self._store.drop(batch.id)):
            batch.total_count = await self._receive(batch, asks, lines)
        return batch

    @override
    async def GetBatch(self, request: batch_pb.GetBatchRequest, context: Context) -> batch_pb.GetBatchResponse:
        return batch_pb.GetBatchResponse(batch=await self._get(tenant_in(context), id_in(request.id)))

    async def _get(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        """Returns a batch. The first read after the last item ended stores the final counts."""
        found = await self._store.get(tenant, batch_id)
        if found is None:
            raise batch_not_found(batch_id)
        return (await self._with_counts([found]))[0]

    @override
    async def ListBatches(self, request: batch_pb.ListBatchesRequest, context: Context) -> batch_pb.ListBatchesResponse:
        tenant, limit = tenant_in(context), request.limit or DEFAULT_LISTED
        if not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        found = await self._store.list_page(tenant, id_in(request.after, "after") if request.after else "", limit + 1)
        if found is None:
            raise batch_not_found(request.after)
        return batch_pb.ListBatchesResponse(batches=await self._with_counts(found[:limit]), has_more=len(found) > limit)

    @override
    async def CancelBatch(self, request: batch_pb.CancelBatchRequest, context: Context) -> batch_pb.CancelBatchResponse:
        """Cancels a batch; unchanged if all items have ended."""
        tenant, batch_id = tenant_in(context), id_in(request.id)
        batch = await self._get(tenant, batch_id)
        is_open = batch.state == batch_pb.BATCH_STATE_IN_PROGRESS
        if is_open and await self._store.mark_cancelled(batch_id, self._now()):
            await self._cancel_items(batch_id)
            batch = await self._get(tenant, batch_id)
        return batch_pb.CancelBatchResponse(batch=batch)

    @override
    async def ReadBatchResults(
        self, request: batch_pb.ReadBatchResultsRequest, context: Context
    ) -> AsyncGenerator[batch_pb.ReadBatchResultsResponse]:
        async with answering(context):
            await self._get(tenant_in(context), id_in(request.id))
            async with aclosing(self._results(request.id)) as results:
                async for each in results:
                    yield each

    async def _results(self, batch_id: str) -> AsyncGenerator[batch_pb.ReadBatchResultsResponse]:
        """Yields the results of a batch, without items whose tasks were deleted or purged."""
        after: int | None = -1
        while after is not None:
            some, after = await self._store.results(batch_id, after, READ_AT_ONCE, MAX_READ_BYTES)
            for each in some:
                yield each

    @override
    async def WatchEndedBatches(
        self, request: batch_pb.WatchEndedBatchesRequest, context: Context
    ) -> AsyncGenerator[batch_pb.WatchEndedBatchesResponse]:
        async with answering(context), aclosing(self._hand_out()) as batches:
            async for batch in batches:
                yield batch_pb.WatchEndedBatchesResponse(batch=batch)

    async def _hand_out(self) -> AsyncGenerator[batch_pb.Batch]:
        """Yields batches with unwritten results, each to one caller until FinishBatch or the caller's end."""
        mine: set[str] = set()
        try:
            while True:
                self._has_unwritten.clear()
                while (batch := await self._next_unwritten()) is not None:
                    mine.add(batch.id)
                    yield batch
                await wait_for_event(self._has_unwritten, self._clock, RETRY_SECONDS)
        finally:
            for batch_id in mine:
                self._in_hand.pop(batch_id, None)
            self._has_unwritten.set()

    async def _next_unwritten(self) -> batch_pb.Batch | None:
        """Reserves the oldest batch that has no writer; None: there is none."""
        now, taken = self._clock.monotonic(), len(self._in_hand) + len(self._problems)
        for batch in await self._store.unwritten(taken + 1):
            _, retry_at = self._problems.get(batch.id, (None, now))
            if max(retry_at, self._in_hand.get(batch.id, now)) <= now:
                self._in_hand[batch.id] = now + WRITING_SECONDS
                return batch
        return None

    @override
    async def FinishBatch(self, request: batch_pb.FinishBatchRequest, context: Context) -> batch_pb.FinishBatchResponse:
        tenant, batch_id = tenant_in(context), id_in(request.id)
        try:
            if request.HasField("problem"):
                self._note_problem(batch_id, request.problem)
                batch = await self._get(tenant, batch_id)
            else:
                results = {"output_file": request.output_file, "error_file": request.error_file}
                batch = await self._finish(tenant, batch_id, results)
        finally:
            self._in_hand.pop(batch_id, None)
        return batch_pb.FinishBatchResponse(batch=batch)

    def _note_problem(self, batch_id: str, problem: batch_pb.BatchLineError) -> None:
        (told,) = _cut([problem])
        self._problems[batch_id] = told, self._clock.monotonic() + RETRY_SECONDS
        if len(self._problems) > MAX_PROBLEMS:
            del self._problems[next(iter(self._problems))]

    async def _finish(self, tenant: str, batch_id: str, results: dict[str, str]) -> batch_pb.Batch:
        """Finishes a batch. Raises INVALID_ARGUMENT for files that are not result files of the tenant."""
        batch = await self._get(tenant, batch_id)
        if batch.state == batch_pb.BATCH_STATE_FINISHED:
            return batch
        if batch.state != batch_pb.BATCH_STATE_FINALIZING:
            raise WeftError(Reason.RESOURCE_IN_USE, f"batch {batch_id} has lines that have not ended")
        for name, file_id in results.items():
            if file_id:
                id_in(file_id, name)
        self._problems.pop(batch_id, None)
        missing = await self._store.finish(tenant, batch_id, results, self._now())
        if missing:
            raise invalid_field(missing, f"there is no result file {results[missing]}")
        return await self._get(tenant, batch_id)

    async def sweep(self) -> None:
        """Purges old and incomplete batches, and completes interrupted cancellations and counts."""
        now = self._now()
        while await self._store.bring_back(now, SWEPT_AT_ONCE):
            pass
        before = max(self._began_at, now - UPLOAD_LIMIT_SECONDS)
        while found := await self._store.incomplete(before, SWEPT_AT_ONCE):
            for batch_id in found:
                await self._store.drop(batch_id)
        await self._count_open_batches()
        over = now - self._limits.keep_batch_seconds
        while await self._store.purge_ended(over, SWEPT_AT_ONCE) == SWEPT_AT_ONCE:
            pass

    async def stop(self, grace_seconds: float) -> None:
        """Waits for the removal of failed creations."""
        if self._settling is not None:
            settling, self._settling = self._settling, None
            await stop_tasks([settling])
        await self._creations.stop(grace_seconds)

    async def _receive(self, batch: batch_pb.Batch, caller: str, lines: AsyncIterator[batch_pb.BatchLine]) -> int:
        room = await self._room(batch.tenant)
        await self._store.begin(batch)
        intake = ItemIntake(batch, caller, room, (self._limits, self._task_limits), self._names, self._media)
        async with aclosing(intake.chunks(lines)) as chunks:
            async for some in chunks:
                if not await self._store.add(batch.id, some):
                    raise upload_timed_out("batch")
        intake.require_room_for_all(await self._room(batch.tenant))
        if not await self._store.activate(batch.id, intake.count):
            raise upload_timed_out("batch")
        for each in intake.events:
            self._events.publish(each)
        return intake.count

    async def _room(self, tenant: str) -> int:
        return self._task_limits.max_open_per_tenant - await self._store.open_count(tenant)

    async def _with_counts(self, found: Sequence[batch_pb.Batch]) -> Sequence[batch_pb.Batch]:
        """Sets the current counts of the batches; stores the final counts if all items have ended."""
        unended = {batch.id: batch for batch in found if batch.state == batch_pb.BATCH_STATE_IN_PROGRESS}
        tallies = await self._store.tallies(list(unended)) if unended else {}
        for batch_id, tally in tallies.items():
            batch = unended[batch_id]
            tally.show_in(batch)
            ended_at = await self._store_counts(batch_id, tally)
            if ended_at is not None:
                batch.state = batch_pb.BATCH_STATE_FINALIZING
                batch.lines_end_time.CopyFrom(stamp_of(ended_at))
        for batch in found:
            if batch.state == batch_pb.BATCH_STATE_FINALIZING and batch.id in self._problems:
                batch.problem.CopyFrom(self._problems[batch.id][0])
        return found

    def _note_event(self, event: StoreEvent) -> None:
        if isinstance(event, ItemEnded):
            self._ended[event.batch_id] += 1
            self._has_ended.set()

    async def _settle_ended(self) -> None:
        """Stores the final counts of each batch when its last item ends, until cancelled."""
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            ended, self._ended = self._ended, Counter()
            try:
                if ended.pop("", 0):
                    await self._count_open_batches()
                for batch_id, count in ended.items():
                    self._open[batch_id] = self._open.get(batch_id, 0) - count
                    if self._open[batch_id] <= 0:
                        await self._count_again(batch_id)
            except WeftError as error:
                log.warning("ended batches were not counted", reason=error.reason.name)
                await self._clock.sleep(COUNT_PAUSE_SECONDS)
                self._ended[""] += 1
                self._has_ended.set()

    async def _count_again(self, batch_id: str) -> None:
        tally = (await self._store.tallies([batch_id]))[batch_id]
        if await self._store_counts(batch_id, tally) is None:
            self._open[batch_id] = tally.open
        else:
            del self._open[batch_id]

    async def _store_counts(self, batch_id: str, tally: ItemTally) -> float | None:
        """Stores the final counts; returns when the last item ended; None: some are open."""
        if tally.open:
            return None
        ended_at = self._now() if tally.last_ended_at is None else tally.last_ended_at
        await self._store.store_counts(batch_id, tally, ended_at)
        self._has_unwritten.set()
        return ended_at

    async def _cancel_items(self, batch_id: str) -> None:
        now = self._now()
        await self._stop_items(lambda item: item.batch == batch_id)
        try:
            while await self._store.cancel_some(batch_id, now, CHANGED_AT_ONCE):
                pass
        finally:
            # The engines that run items now stop their calls.
            self._events.publish(ManyChanged())
            self._events.publish(ItemEnded(batch_id))

    async def _count_open_batches(self) -> None:
        """Stores the final counts of batches without readers before their items are purged."""
        after = 0
        while found := await self._store.open_batches(after, SETTLED_AT_ONCE):
            batches = [batch_of(row) for row in found]
            for batch in batches:
                if batch.HasField("cancel_time"):
                    await self._cancel_items(batch.id)
            for batch_id, tally in (await self._store.tallies([batch.id for batch in batches])).items():
                await self._store_counts(batch_id, tally)
            after = found[-1].seq

    def _now(self) -> float:
        return self._clock.utc_now().timestamp()


def _new(tenant: str, batch: batch_pb.Batch) -> batch_pb.Batch:
    if not batch.HasField("window_end_time"):
        raise invalid_field("batch.window_end_time", "is required")
    batch.tenant = tenant
    return batch


async def _lines(
    first: batch_pb.CreateBatchRequest,
    messages: AsyncIterator[batch_pb.CreateBatchRequest],
    name_model: Callable[[task_pb2.TaskSpec], None],
) -> AsyncGenerator[batch_pb.BatchLine]:
    """Yields the items; the last message has their count, as a broken connection may look like an end."""
    count = 0
    message: batch_pb.CreateBatchRequest | None = first
    last = first
    while message is not None:
        if len(message.lines) > MAX_LINES_PER_MESSAGE:
            raise invalid_field("lines", f"must be at most {MAX_LINES_PER_MESSAGE} in one message")
        for line in message.lines:
            name_model(line.spec)
            limit_to_caller(line.spec, caller())
            yield line
        count += len(message.lines)
        last, message = message, await anext(messages, None)
    if not last.HasField("batch"):
        raise incomplete_stream()
    if last.batch.total_count != count:
        raise invalid_field("batch.total_count", f"must be the number of lines that were sent, which is {count}")


class BatchService(StoreService):
    """Serves a router's files and batches."""

    def __init__(  # noqa: PLR0913 - what a router provides
        self,
        database: RouterDatabase,
        limits: BatchLimits,
        task_limits: TaskLimits,
        events: TaskEventBus,
        *,
        clock: Clock | None = None,
        names: KnownNames | None = None,
        files: FileServicer | None = None,
        stop_items: StopItems = ignore_items,
        outbox: Outbox | None = None,
    ) -> None:
        """`events`: the bus of the task service in this process. `files`: shared with tasks; None: separate.

        `names`: models, routes and agents that items may use; None: any name is accepted.
        """
        clock = clock or SystemClock()
        self._files = files or FileServicer(database, limits, clock)
        store, media = BatchStore(database), TaskMedia(self._files)
        store.outbox = outbox or Outbox()
        store.report_ends = lambda ended: events.publish(TasksEnded(ended))
        self._batches = BatchServicer(
            store, limits, task_limits, events, clock, names=names, media=media, stop_items=stop_items
        )
        self.files, self.batches = FileClient(self._files), BatchClient(self._batches)
        """Clients of the services in this process."""
        sweeps = {"files": self._files.sweep, "batches": self._batches.sweep}
        super().__init__(
            database,
            Sweeper("batch-sweeper", sweeps, limits.sweep_interval_seconds, clock),
            Rpcs(
                file_service_pb2.DESCRIPTOR.services_by_name["FileService"].full_name,
                file_service_pb2_grpc.add_FileServiceServicer_to_server,
                self._files,
            ),
            Rpcs(
                batch_pb.DESCRIPTOR.services_by_name["BatchService"].full_name,
                batch_service_pb2_grpc.add_BatchServiceServicer_to_server,
                self._batches,
            ),
        )

    @override
    async def begin(self) -> None:
        self._batches.start()

    @override
    async def end(self, grace_seconds: float) -> None:
        await self._files.stop(grace_seconds)
        await self._batches.stop(grace_seconds)

"""A `BatchPort` over gRPC."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import grpc
from typing_extensions import override

from weft.api.router.v1 import batch_service_pb2 as pb
from weft.api.router.v1 import batch_service_pb2_grpc, task_pb2
from weft.durable.batches import (
    Batch,
    BatchLine,
    BatchPage,
    BatchPort,
    BatchState,
    LineCounts,
    LineError,
    LineResult,
    NewBatch,
)
from weft.durable.remote_stores import COMMIT_TIMEOUT_SECONDS, TIMEOUT_SECONDS, answered, as_tenant, read_stream, upload
from weft.durable.tasks import task_of
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from weft.api.router.v1.batch_service_pb2_grpc import BatchServiceAsyncStub

MAX_LINES_PER_MESSAGE = 256
MAX_LINE_BYTES_PER_MESSAGE = 3 * 1024 * 1024
"""Unless one line alone is longer."""
_KIND = "batches"
_COUNTS = ("total", "completed", "failed", "cancelled", "expired")
_MOMENTS = {
    "cancel_time": "cancelled_at",
    "lines_end_time": "lines_ended_at",
    "end_time": "ended_at",
}


class RemoteBatches(BatchPort):
    """A BatchPort whose store is behind a channel."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._stub = cast("BatchServiceAsyncStub", batch_service_pb2_grpc.BatchServiceStub(channel))

    async def create(self, new: NewBatch, lines: AsyncIterator[BatchLine]) -> Batch:
        """As BatchPort.create. `new.caller` is not sent: the store authenticates the caller itself."""
        call: Any = self._stub.CreateBatch(metadata=as_tenant(new.tenant))
        async with aclosing(_messages(new, lines)) as messages:
            done = await upload(call, messages, kind=_KIND, timeout_seconds=self._timeout_seconds)
        return batch_of(done.batch)

    @override
    async def get(self, tenant: str, batch_id: str) -> Batch:
        found = await self._ask(self._stub.GetBatch, tenant, pb.GetBatchRequest(id=batch_id))
        return batch_of(found.batch)

    @override
    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> BatchPage:
        found = await self._ask(self._stub.ListBatches, tenant, pb.ListBatchesRequest(after=after, limit=limit))
        return BatchPage(batches=[batch_of(message) for message in found.batches], has_more=found.has_more)

    @override
    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        request = pb.CancelBatchRequest(id=batch_id)
        timeout_seconds = max(self._timeout_seconds, COMMIT_TIMEOUT_SECONDS)
        return batch_of((await self._ask(self._stub.CancelBatch, tenant, request, timeout_seconds)).batch)

    @override
    async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        call: Any = self._stub.ReadBatchResults(pb.ReadBatchResultsRequest(id=batch_id), metadata=as_tenant(tenant))
        partial: _Partial | None = None
        async with aclosing(read_stream(call, kind=_KIND, timeout_seconds=self._timeout_seconds)) as messages:
            async for message in messages:
                if message.HasField("task"):
                    if partial is not None:
                        yield partial.whole()
                    partial = _Partial(message)
                if partial is not None and message.HasField("output"):
                    partial.outputs.append(message.output)
        if partial is not None:
            yield partial.whole()

    @override
    async def finish(self, tenant: str, batch_id: str, *, output_file: str, error_file: str) -> Batch:
        request = pb.FinishBatchRequest(id=batch_id, output_file=output_file, error_file=error_file)
        return batch_of((await self._ask(self._stub.FinishBatch, tenant, request)).batch)

    async def _ask(self, method: Any, tenant: str, request: object, timeout_seconds: float | None = None) -> Any:
        timeout = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return await answered(method(request, metadata=as_tenant(tenant), timeout=timeout), kind=_KIND)


@dataclass(slots=True)
class _Partial:
    """A line whose outputs are still arriving."""

    first: pb.ReadBatchResultsResponse
    outputs: list[task_pb2.TaskOutput] = field(default_factory=list)

    def whole(self) -> LineResult:
        """Returns the complete line."""
        first = self.first
        return LineResult(
            custom_id=first.custom_id,
            task=task_of(first.task),
            origin=first.origin,
            outputs=tuple(self.outputs),
        )


async def _messages(new: NewBatch, lines: AsyncIterator[BatchLine]) -> AsyncGenerator[pb.CreateBatchRequest]:
    yield pb.CreateBatchRequest(batch=_new_message(new))
    some: list[pb.BatchLine] = []
    size, count = 0, 0
    async for line in lines:
        message = pb.BatchLine(custom_id=line.custom_id, spec=line.spec)
        length = message.ByteSize()
        if some and (len(some) >= MAX_LINES_PER_MESSAGE or size + length > MAX_LINE_BYTES_PER_MESSAGE):
            yield pb.CreateBatchRequest(lines=some)
            some, size = [], 0
        some.append(message)
        size += length
        count += 1
    yield pb.CreateBatchRequest(batch=pb.Batch(total_count=count), lines=some)


def _new_message(new: NewBatch) -> pb.Batch:
    message = pb.Batch(
        endpoint=new.endpoint, input_file=new.input_file, metadata=new.metadata, errors=_error_messages(new.errors)
    )
    message.window_end_time.FromDatetime(new.window_ends_at)
    return message


def _error_messages(errors: Sequence[LineError]) -> list[pb.BatchLineError]:
    return [
        pb.BatchLineError(code=error.code, message=error.message, line=error.line, field=error.field)
        for error in errors
    ]


def batch_message(batch: Batch) -> pb.Batch:
    """Converts a batch to its message."""
    message = pb.Batch(
        id=batch.id,
        tenant=batch.tenant,
        state=batch.state.value,  # type: ignore[arg-type]  # same numbers
        endpoint=batch.endpoint,
        input_file=batch.input_file,
        output_file=batch.output_file,
        error_file=batch.error_file,
        errors=_error_messages(batch.errors),
        metadata=batch.metadata,
        **{f"{name}_count": getattr(batch.counts, name) for name in _COUNTS},
    )
    message.create_time.FromDatetime(batch.created_at)
    message.window_end_time.FromDatetime(batch.window_ends_at)
    for name, attribute in _MOMENTS.items():
        moment = getattr(batch, attribute)
        if moment is not None:
            getattr(message, name).FromDatetime(moment)
    return message


def batch_of(message: pb.Batch) -> Batch:
    """Converts a message to a batch. Raises INTERNAL for a state that this release does not know."""
    try:
        state = BatchState(message.state)
    except ValueError:
        raise WeftError(
            Reason.INTERNAL, "the router is of a newer release, whose batches this one cannot read"
        ) from None
    return Batch(
        id=message.id,
        tenant=message.tenant,
        state=state,
        endpoint=message.endpoint,
        input_file=message.input_file,
        output_file=message.output_file,
        error_file=message.error_file,
        errors=errors_of(message),
        counts=LineCounts(**{name: getattr(message, f"{name}_count") for name in _COUNTS}),
        metadata=dict(message.metadata),
        created_at=message.create_time.ToDatetime(UTC),
        window_ends_at=message.window_end_time.ToDatetime(UTC),
        cancelled_at=_moment(message, "cancel_time"),
        lines_ended_at=_moment(message, "lines_end_time"),
        ended_at=_moment(message, "end_time"),
    )


def errors_of(message: pb.Batch) -> Sequence[LineError]:
    """Returns the line errors of a batch's message."""
    return tuple(
        LineError(code=error.code, message=error.message, line=error.line, field=error.field)
        for error in message.errors
    )


def _moment(message: pb.Batch, name: str) -> datetime | None:
    stamp: Timestamp = getattr(message, name)
    return stamp.ToDatetime(UTC) if message.HasField(name) else None  # type: ignore[arg-type]  # one of _MOMENTS

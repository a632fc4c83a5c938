"""BatchService over the batch port; translation only."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC
from typing import Any

import grpc
from typing_extensions import override

from router_svc.call_metadata import metadata_of, tenant_of
from router_svc.durable.batches.uploads import IDLE_SECONDS, incomplete_stream, with_idle_timeout
from weft.api.router.v1 import batch_service_pb2 as pb
from weft.api.router.v1 import batch_service_pb2_grpc
from weft.durable.batches import BatchLine, BatchPort, LineResult, NewBatch
from weft.durable.remote_batches import MAX_LINES_PER_MESSAGE, batch_message, errors_of
from weft.durable.tasks import task_message
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.principal import MAY_LEAVE
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

DEFAULT_LISTED = 20

Context = grpc.aio.ServicerContext[Any, Any]


class BatchServicer(batch_service_pb2_grpc.BatchServiceServicer):
    """BatchService over the batch port."""

    def __init__(self, batches: BatchPort, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._batches = batches
        self._idle_seconds = idle_seconds

    @override
    async def CreateBatch(
        self, request_iterator: AsyncIterator[pb.CreateBatchRequest], context: Context
    ) -> pb.CreateBatchResponse:
        async with answering(context):
            tenant = _tenant(context)
            async with aclosing(
                with_idle_timeout(aiter(request_iterator), idle_seconds=self._idle_seconds)
            ) as messages:
                first = await anext(messages, None)
                if first is None:
                    raise incomplete_stream()
                async with aclosing(_lines(first, messages)) as lines:
                    batch = await self._batches.create(_new(tenant, first.batch), lines)
            return pb.CreateBatchResponse(batch=batch_message(batch))
        raise AssertionError("abort has raised")

    @override
    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        async with answering(context):
            batch = await self._batches.get(_tenant(context), _id(request.id))
            return pb.GetBatchResponse(batch=batch_message(batch))
        raise AssertionError("abort has raised")

    @override
    async def ListBatches(self, request: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        async with answering(context):
            page = await self._batches.list_page(
                _tenant(context),
                after=_id(request.after, "after") if request.after else "",
                limit=request.limit or DEFAULT_LISTED,
            )
            return pb.ListBatchesResponse(batches=map(batch_message, page.batches), has_more=page.has_more)
        raise AssertionError("abort has raised")

    @override
    async def CancelBatch(self, request: pb.CancelBatchRequest, context: Context) -> pb.CancelBatchResponse:
        async with answering(context):
            batch = await self._batches.cancel(_tenant(context), _id(request.id))
            return pb.CancelBatchResponse(batch=batch_message(batch))
        raise AssertionError("abort has raised")

    @override
    async def ReadBatchResults(
        self, request: pb.ReadBatchResultsRequest, context: Context
    ) -> AsyncGenerator[pb.ReadBatchResultsResponse]:
        async with (
            answering(context),
            aclosing(self._batches.results(_tenant(context), _id(request.id))) as results,
        ):
            async for result in results:
                for message in _result_messages(result):
                    yield message

    @override
    async def FinishBatch(self, request: pb.FinishBatchRequest, context: Context) -> pb.FinishBatchResponse:
        async with answering(context):
            batch = await self._batches.finish(
                _tenant(context),
                _id(request.id),
                output_file=_id(request.output_file, "output_file") if request.output_file else "",
                error_file=_id(request.error_file, "error_file") if request.error_file else "",
            )
            return pb.FinishBatchResponse(batch=batch_message(batch))
        raise AssertionError("abort has raised")


def _new(tenant: str, batch: pb.Batch) -> NewBatch:
    if not batch.HasField("window_end_time"):
        raise invalid_field("batch.window_end_time", "is required")
    return NewBatch(
        tenant=tenant,
        endpoint=batch.endpoint,
        input_file=batch.input_file,
        window_ends_at=batch.window_end_time.ToDatetime(UTC),
        metadata=dict(batch.metadata),
        errors=errors_of(batch),
        caller=caller().name,
    )


async def _lines(
    first: pb.CreateBatchRequest, messages: AsyncIterator[pb.CreateBatchRequest]
) -> AsyncGenerator[BatchLine]:
    """Yields the items; the last message states their count, because a broken connection may look like an end."""
    count = 0
    message: pb.CreateBatchRequest | None = first
    last = first
    while message is not None:
        if len(message.lines) > MAX_LINES_PER_MESSAGE:
            raise invalid_field("lines", f"must be at most {MAX_LINES_PER_MESSAGE} in one message")
        for line in message.lines:
            if line.spec.options.allow_remote:
                caller().require(MAY_LEAVE)
            yield BatchLine(custom_id=line.custom_id, spec=line.spec)
        count += len(message.lines)
        last, message = message, await anext(messages, None)
    if not last.HasField("batch"):
        raise incomplete_stream()
    if last.batch.total_count != count:
        raise invalid_field("batch.total_count", f"must be how many lines were sent, which is {count}")


def _result_messages(result: LineResult) -> list[pb.ReadBatchResultsResponse]:
    first = pb.ReadBatchResultsResponse(
        task=task_message(result.task), custom_id=result.custom_id, origin=result.origin
    )
    return [first, *(pb.ReadBatchResultsResponse(output=output) for output in result.outputs)]


def _tenant(context: Context) -> str:
    return tenant_of(metadata_of(context))


def _id(text: str, field: str = "id") -> str:
    return require_token(text, field, MAX_REQUEST_ID_CHARS)

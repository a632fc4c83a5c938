"""The placement port over gRPC: one bidirectional Place stream per request."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import grpc
from google.protobuf import duration_pb2

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.dispatch.placement import Decision, Grant, LoadingModel, PlacementRequest, PoolQueue, WaitingInQueue
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.rpc import error_from_call
from weft.kernel.telemetry import TRACEPARENT

if TYPE_CHECKING:
    from weft.api.router.v1.placement_service_pb2_grpc import PlacementServiceAsyncStub

    PlaceCall = grpc.aio.StreamStreamCall[pb.PlaceRequest, pb.PlaceResponse]


QUEUES_TIMEOUT_SECONDS = 5.0


class RemotePlacement:
    """A PlacementPort whose scheduler is behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cast("PlacementServiceAsyncStub", placement_service_pb2_grpc.PlacementServiceStub(channel))

    def place(self, request: PlacementRequest) -> "RemotePlace":
        """See PlacementPort.place."""
        return RemotePlace(self._stub, request)

    async def queues(self) -> Sequence[PoolQueue]:
        """See QueueSource.queues."""
        try:
            response = await self._stub.ListQueues(pb.ListQueuesRequest(), timeout=QUEUES_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        return [
            PoolQueue(
                pool=queue.pool,
                waiting=queue.waiting_count,
                max_waiting=queue.max_waiting,
                running=queue.running_count,
                average_wait_seconds=_seconds(queue.average_wait) if queue.HasField("average_wait") else None,
            )
            for queue in response.queues
        ]


class RemotePlace:
    """A Placement over one Place call."""

    def __init__(self, stub: "PlacementServiceAsyncStub", request: PlacementRequest) -> None:
        self._stub = stub
        self._request = request
        self._call: PlaceCall | None = None

    async def __aenter__(self) -> Self:
        request = self._request
        metadata = ((TRACEPARENT, request.traceparent),) if request.traceparent else None
        self._call = self._stub.Place(timeout=request.seconds_left, metadata=metadata)
        await self._write(pb.PlaceRequest(open=_open_to_proto(request)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            self._call.cancel()

    async def next_decision(self) -> Decision:
        """See Placement.next_decision."""
        assert self._call is not None, "next_decision before the placement was entered"
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        if not isinstance(response, pb.PlaceResponse):
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router ended the placement without a decision")
        return _decision_from_proto(response)

    async def report_first_content(self, attempt: int) -> None:
        """See Placement.report_first_content."""
        await self._write(pb.PlaceRequest(first_content=pb.FirstContent(attempt=attempt)))

    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None:
        """See Placement.report_attempt_failed."""
        failed = pb.AttemptFailed(attempt=attempt, reason=reason.value)  # type: ignore[arg-type]  # same numbers
        await self._write(pb.PlaceRequest(attempt_failed=failed))

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> None:
        """See Placement.report_finished."""
        finished = pb.PlaceFinished(reason=reason.value, receipt=receipt)  # type: ignore[arg-type]  # same numbers
        await self._write(pb.PlaceRequest(finished=finished))
        assert self._call is not None, "a report before the placement was entered"
        if not self._call.done():
            # The router ends the stream when it has counted the end; leaving earlier would cancel the report.
            await self._call.code()

    async def _write(self, request: pb.PlaceRequest) -> None:
        """Sends a message to the router. A lost router is noticed by the next read, not here."""
        assert self._call is not None, "a report before the placement was entered"
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)


def _open_to_proto(request: PlacementRequest) -> pb.PlaceOpen:
    message = pb.PlaceOpen(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        operation=request.operation.value,  # type: ignore[arg-type]  # same numbers
        # Unset means normal too, and that the caller named no class.
        priority=request.priority.wire if request.names_priority else 0,  # type: ignore[arg-type]  # same numbers
        allow_remote=request.allow_remote,
        attempts_used=request.attempts_used,
        prompt_tokens=request.prompt_tokens,
        max_output_tokens=request.max_output_tokens,
        needed_skills=[skill.value for skill in sorted(request.skills)],  # type: ignore[misc]  # same numbers
        needed_tools=sorted(request.tools),
        affinity_key=request.affinity_key,
        prefix_digests=request.prefix_digests,
        client_id=request.client_id,
    )
    message.age.FromNanoseconds(int(request.age_seconds * 1e9))
    if request.seconds_left is not None:
        message.time_left.FromNanoseconds(int(request.seconds_left * 1e9))
    return message


def _decision_from_proto(response: pb.PlaceResponse) -> Decision:
    match response.WhichOneof("kind"):
        case "queued":
            queued = response.queued
            return WaitingInQueue(
                position=queued.position,
                reason=queued.reason,
                eta_seconds=_seconds(queued.eta) if queued.HasField("eta") else None,
            )
        case "loading":
            loading = response.loading
            return LoadingModel(
                stage=loading.stage,
                progress=loading.progress if loading.HasField("progress") else None,
                eta_seconds=_seconds(loading.eta) if loading.HasField("eta") else None,
            )
        case "granted":
            granted = response.granted
            return Grant(
                claims=granted.ticket.claims,
                mac=granted.ticket.mac,
                runner=granted.runner,
                runner_incarnation=granted.runner_incarnation,
                address=granted.address,
                host=granted.host,
                model=granted.model,
                attempt=granted.attempt,
                keep_alive_seconds=_seconds(granted.keep_alive) if granted.HasField("keep_alive") else None,
                priority=Priority.from_wire(granted.priority) if granted.priority else None,
                seconds_left=_seconds(granted.time_left) if granted.HasField("time_left") else None,
            )
        case _:
            raise WeftError(Reason.INTERNAL, "the router sent a decision this version does not know")


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e9

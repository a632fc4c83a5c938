"""The router over gRPC: placements (one bidirectional Place stream per request) and health checks."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.dispatch.placement import (
    PLACED_AGAIN,
    Decision,
    OnCancelled,
    Placement,
    RouterPort,
    request_cancelled,
)
from weft.kernel.clock import Clock, wait_for_event
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import task_is_cancelled
from weft.kernel.log import get_logger
from weft.kernel.placement_request import PlacementRequest, PoolQueue
from weft.kernel.reasons import Reason
from weft.kernel.rpc import calling, error_from_call
from weft.kernel.service import start_task, stop_tasks
from weft.kernel.telemetry import TRACEPARENT
from weft.kernel.timestamps import optional_seconds

if TYPE_CHECKING:
    from weft.api.router.v1.placement_service_pb2_grpc import PlacementServiceAsyncStub

    PlaceCall = grpc.aio.StreamStreamCall[pb.PlaceRequest, pb.PlaceResponse]


QUEUES_TIMEOUT_SECONDS = 5.0


class RemotePlacement(RouterPort):
    """A RouterPort for a scheduler behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cast("PlacementServiceAsyncStub", placement_service_pb2_grpc.PlacementServiceStub(channel))

    @override
    def place(self, request: PlacementRequest) -> "RemotePlace":
        return RemotePlace(self._stub, request)

    @override
    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        finished = pb.PlaceFinished(reason=receipt.reason, receipt=receipt)
        report = pb.ReportEndRequest(open=_open_to_proto(request), finished=finished)
        with calling(Reason.SERVICE_UNAVAILABLE):
            return (await self._stub.ReportEnd(report)).recorded

    @override
    async def queues(self) -> Sequence[PoolQueue]:
        with calling(Reason.SERVICE_UNAVAILABLE):
            response = await self._stub.ListQueues(pb.ListQueuesRequest(), timeout=QUEUES_TIMEOUT_SECONDS)
        return [
            PoolQueue(
                pool=queue.pool,
                waiting=queue.waiting_count,
                max_waiting=queue.max_waiting,
                running=queue.running_count,
                average_wait_seconds=optional_seconds(queue, "average_wait"),
            )
            for queue in response.queues
        ]


class RemotePlace(Placement):
    """A Placement over one Place call."""

    def __init__(self, stub: "PlacementServiceAsyncStub", request: PlacementRequest) -> None:
        self._stub = stub
        self._request = request
        self._call: PlaceCall | None = None
        self._reading: asyncio.Future[object] | None = None
        """The pending read of the message after a grant; None: no read is pending."""
        self._on_cancelled: OnCancelled | None = None
        self.is_disconnected = False
        """Whether the call ended without an answer from the router."""
        self._is_refused = False
        """Whether the router ended the request itself, and so knows its end."""

    async def __aenter__(self) -> Self:
        request = self._request
        metadata = ((TRACEPARENT, request.traceparent),) if request.traceparent else None
        self._call = self._stub.Place(timeout=request.seconds_left, metadata=metadata)
        await self._write(pb.PlaceRequest(open=_open_to_proto(request)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Breaks the reference cycle with the request, which would delay freeing both.
        self._on_cancelled = None
        if self._call is not None:
            self._call.cancel()

    @override
    async def next_decision(self) -> Decision:
        assert self._call is not None, "next_decision before the placement was entered"
        reading, self._reading, self._on_cancelled = self._reading, None, None
        try:
            response = await (self._call.read() if reading is None else reading)
        except grpc.aio.AioRpcError as error:
            is_bare = rpc_status.from_call(error) is None
            self.is_disconnected = is_bare and error.code() == grpc.StatusCode.UNAVAILABLE
            # A read that had not started raises this instead of CancelledError.
            was_cut = is_bare and error.code() == grpc.StatusCode.CANCELLED
            if self.is_disconnected or was_cut:
                raise WeftError(Reason.NO_ROUTER_AVAILABLE, "the router does not answer") from error
            found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
            # A stopping router counts as lost: the request is placed again.
            is_stopping = found.reason is Reason.SHUTTING_DOWN
            self._is_refused = not (is_bare or is_stopping or found.reason in PLACED_AGAIN)
            raise (WeftError(Reason.SERVICE_UNAVAILABLE, found.message) if is_stopping else found) from error
        except asyncio.CancelledError:
            # The placement was abandoned or its channel was closed; a cancelled request arrives differently.
            if task_is_cancelled():
                raise
            raise WeftError(Reason.NO_ROUTER_AVAILABLE, "the router does not answer") from None
        if not isinstance(response, pb.PlaceResponse):
            raise WeftError(Reason.NO_ROUTER_AVAILABLE, "the router ended the placement without a decision")
        match response.WhichOneof("kind"):
            case "queued" | "loading" | "granted":
                return response
            case "cancelled":
                raise request_cancelled(response.cancelled.cancelled_by)
        raise WeftError(Reason.INTERNAL, "the router sent a decision this version does not know")

    def abandon(self) -> None:
        """Stops waiting for the router: `next_decision` raises NO_ROUTER_AVAILABLE."""
        if self._call is not None:
            self._call.cancel()

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        assert self._call is not None, "watch_cancellation before the placement was entered"
        self._on_cancelled = on_cancelled
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._reading.add_done_callback(self._note_read)

    def _note_read(self, reading: "asyncio.Future[object]") -> None:
        """Passes on a cancellation. Anything else, including a lost router, is left for the next decision."""
        if reading.cancelled() or reading.exception() is not None or self._on_cancelled is None:
            return
        response = reading.result()
        if isinstance(response, pb.PlaceResponse) and response.WhichOneof("kind") == "cancelled":
            self._on_cancelled(request_cancelled(response.cancelled.cancelled_by))

    @override
    async def report_first_content(self, attempt: int) -> None:
        await self._write(pb.PlaceRequest(first_content=pb.FirstContent(attempt=attempt)))

    @override
    async def report_attempt_failed(self, attempt: int, reason: Reason, message: str = "") -> None:
        number: Any = reason.value
        failed = pb.AttemptFailed(attempt=attempt, reason=number, message=message)
        await self._write(pb.PlaceRequest(attempt_failed=failed))

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        finished = pb.PlaceFinished(reason=reason.value, receipt=receipt)  # type: ignore[arg-type]  # same numbers
        await self._write(pb.PlaceRequest(finished=finished))
        assert self._call is not None, "a report before the placement was entered"
        # The router ends the stream after counting the end; leaving earlier would cancel the report.
        return await self._call.code() is grpc.StatusCode.OK or self._is_refused

    async def _write(self, request: pb.PlaceRequest) -> None:
        """Sends a message to the router. The next read, not this write, detects a lost router."""
        assert self._call is not None, "a report before the placement was entered"
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise


def _open_to_proto(request: PlacementRequest) -> pb.PlaceOpen:
    message = pb.PlaceOpen(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        operation=request.operation.value,  # type: ignore[arg-type]  # same numbers
        # Unset means normal, and that the caller named no class.
        priority=request.priority.wire if request.names_priority else 0,  # type: ignore[arg-type]  # same numbers
        allow_remote=request.allow_remote,
        attempts_used=request.attempts_used,
        prompt_tokens=request.prompt_tokens,
        max_output_tokens=request.max_output_tokens,
        work=request.work,
        needed_thinking=request.thinking.value,  # type: ignore[arg-type]  # same numbers
        needed_skills=[skill.value for skill in sorted(request.skills)],  # type: ignore[misc]  # same numbers
        needed_tools=sorted(request.tools),
        affinity_key=request.affinity_key,
        prefix_digests=request.prefix_digests,
        prompt_digest=request.prompt_digest,
        client_id=request.client_id,
        asked_model=request.asked_model,
        caller=request.caller,
        is_counted=request.is_counted,
    )
    if (holder := request.prefix_holder) is not None:
        message.prefix_holder.model, message.prefix_holder.runner = holder.model, holder.runner
        message.prefix_holder.runner_incarnation = holder.incarnation
        message.prefix_holder.digest_count = holder.digest_count
    message.age.FromNanoseconds(int(request.age_seconds * 1e9))
    if request.seconds_left is not None:
        message.time_left.FromNanoseconds(int(request.seconds_left * 1e9))
    return message


log = get_logger("weft.router_watch")

CHECK_INTERVAL_SECONDS = 1.0
CHECK_TIMEOUT_SECONDS = 2.0
"""A router that does not answer a health check within this time counts as lost."""
_PLACEMENT = pb.DESCRIPTOR.services_by_name["PlacementService"].full_name


class RouterSource(Protocol):
    """Source of the router's availability."""

    @property
    def is_there(self) -> bool:
        """Whether a router answered the last health check."""
        ...


class RouterWatch:
    """Checks a router's health at an interval, because a frozen process keeps its connections open."""

    def __init__(
        self,
        router: grpc.aio.Channel,
        clock: Clock,
        on_answer: Callable[[bool], None] = lambda _is_there: None,
        interval: Callable[[], float] = lambda: CHECK_INTERVAL_SECONDS,
    ) -> None:
        """`on_answer` is called with each result, `interval` for the delay until the next check."""
        self._stub = health_pb2_grpc.HealthStub(router)
        self._clock = clock
        self._on_answer = on_answer
        self._interval = interval
        self._hurried = asyncio.Event()
        self.is_there = False
        """See RouterSource.is_there; False before the first answer."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the health checks."""
        self._task = start_task(self._follow(), name="router-watch")

    async def stop(self) -> None:
        """Stops the health checks. Safe to call twice or before starting."""
        if self._task is not None:
            await stop_tasks([self._task])
            self._task = None

    async def _follow(self) -> None:
        while True:
            was_there, self.is_there = self.is_there, await self._answers()
            if was_there and not self.is_there:
                log.warning("no router answers")
            elif self.is_there and not was_there:
                log.info("a router answers")
            self._on_answer(self.is_there)
            self._hurried.clear()
            await wait_for_event(self._hurried, self._clock, self._interval())

    def hurry(self) -> None:
        """Checks the router's health immediately."""
        self._hurried.set()

    async def _answers(self) -> bool:
        request = health_pb2.HealthCheckRequest(service=_PLACEMENT)
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                answer = await self._stub.Check(request, timeout=CHECK_TIMEOUT_SECONDS)
        except WeftError:
            return False
        except Exception:
            # If this task ended, its last result would stay forever.
            log.exception("the router cannot be asked for its health")
            return False
        status = cast("health_pb2.HealthCheckResponse", answer).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

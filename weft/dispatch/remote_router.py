"""A router over gRPC: placements (one bidirectional Place stream per request), and whether it answers."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.router_pb2 import Router
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.api.router.v1.quote_pb2 import Quote
from weft.dispatch.placement import (
    PLACED_AGAIN,
    Decision,
    OnCancelled,
    Placement,
    RouterPort,
    request_cancelled,
)
from weft.kernel.channels.rpc import RpcMethod, calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import TRACEPARENT
from weft.kernel.time.clock import Clock, wait_for_event, within
from weft.kernel.time.timestamps import optional_duration, optional_seconds
from weft.link.carried_calls import CallStream, CarriedCall

if TYPE_CHECKING:
    from weft.api.router.v1.placement_service_pb2_grpc import PlacementServiceAsyncStub

log = get_logger("weft.router_watch")

QUEUES_TIMEOUT_SECONDS = 5.0
CHECK_INTERVAL_SECONDS = 1.0
CHECK_TIMEOUT_SECONDS = 2.0
"""A router that does not answer a health check within this time counts as lost."""
LEADER_WAIT_SECONDS = 1.0
"""How long a request waits for a leader before it is placed again."""
NO_ROUTER = "no router of the mesh leads"
_SERVICE = pb.DESCRIPTOR.services_by_name["PlacementService"]
PLACE, REPORT_END, QUOTE, LIST_QUEUES = (
    RpcMethod(_SERVICE.methods_by_name[name]) for name in ("Place", "ReportEnd", "Quote", "ListQueues")
)
"""The first two belong to one request: calls of them share a stream."""


class RouterSource(Protocol):
    """Source of the router's availability."""

    @property
    def is_reachable(self) -> bool:
        """Whether a router answered the last health check."""
        ...


class RemoteRouter(RouterPort):
    """A RouterPort for the scheduler of one router process, whose health it checks after `start`.

    A lost router places no requests: it is a standby, failed the last health check, or just failed a call. The checks
    find a frozen process too, which keeps its connections open.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        clock: Clock,
        router: Router | None = None,
        *,
        is_lost: bool = False,
        led: asyncio.Event | None = None,
        on_change: Callable[["RemoteRouter"], None] = lambda _: None,
        interval: Callable[[], float] = lambda: CHECK_INTERVAL_SECONDS,
    ) -> None:
        """`is_lost`: until its first answer. `led` is set while any router leads.

        `on_change` is called when it is lost or reachable again, `interval` for the delay until the next check.
        """
        self.router = router or Router(name="router")
        self.channel = channel
        self._stub = cast("PlacementServiceAsyncStub", placement_service_pb2_grpc.PlacementServiceStub(channel))
        self.stream = CallStream(channel, Reason.SERVICE_UNAVAILABLE, Reason.SERVICE_UNAVAILABLE)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._clock = clock
        self._on_change = on_change
        self._interval = interval
        self._hurried = asyncio.Event()
        self._checks: asyncio.Task[None] | None = None
        self.led = led or asyncio.Event()
        self.is_reachable = False
        """Whether it answered the last health check; False before the first answer."""
        self.lost = asyncio.Event()
        if is_lost:
            self.lost.set()
        self.waiting: set[RemotePlace] = set()
        """Placements to abandon when it is lost."""

    @property
    def is_lost(self) -> bool:
        """Whether it places no requests."""
        return self.lost.is_set()

    def start(self) -> None:
        """Starts the health checks."""
        self._checks = start_task(self._follow(), name=f"router-watch-{self.router.name}")

    async def stop(self) -> None:
        """Stops the health checks. Safe to call twice or before starting."""
        if self._checks is not None:
            checks, self._checks = self._checks, None
            await stop_tasks([checks])

    async def close(self) -> None:
        """Stops the checks, closes the channel and abandons waiting placements."""
        await self.stop()
        self._abandon_all()
        await self.channel.close(grace=None)

    def hurry(self) -> None:
        """Checks its health immediately."""
        self._hurried.set()

    def note_lost(self) -> None:
        """Marks it as lost until its next successful health check."""
        if self.is_lost:
            return
        if self.is_reachable:
            log.warning("router lost", router=self.router.name, address=self.router.address)
        self.is_reachable = False
        self._abandon_all()
        self._on_change(self)

    @override
    def place(self, request: PlacementRequest) -> "RemotePlace":
        return RemotePlace(self, request)

    @override
    async def quote(self, request: PlacementRequest) -> Sequence[Quote]:
        asked = pb.QuoteRequest(open=_open_to_proto(request))
        with calling(Reason.SERVICE_UNAVAILABLE):
            return (await self._stub.Quote(asked, timeout=QUEUES_TIMEOUT_SECONDS)).quotes

    @override
    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        finished = pb.PlaceFinished(reason=receipt.reason, receipt=receipt)
        call = self.stream.call(REPORT_END, (), None)
        try:
            await call.write(pb.ReportEndRequest(open=_open_to_proto(request), finished=finished))
            recorded: bool = (await call.read()).recorded
        finally:
            call.cancel()
        return recorded

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

    def _abandon_all(self) -> None:
        self.lost.set()
        for each in list(self.waiting):
            each.abandon()

    async def _follow(self) -> None:
        while True:
            if not await self._answers():
                self.note_lost()
            elif self.is_lost or not self.is_reachable:
                self.is_reachable = True
                self.lost.clear()
                log.info("router leads", router=self.router.name, address=self.router.address)
                self._on_change(self)
            self._hurried.clear()
            await wait_for_event(self._hurried, self._clock, self._interval())

    async def _answers(self) -> bool:
        request = health_pb2.HealthCheckRequest(service=_SERVICE.full_name)
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                answer = await self._health.Check(request, timeout=CHECK_TIMEOUT_SECONDS)
        except WeftError:
            return False
        except Exception:
            # If this task ended, its last result would stay forever.
            log.exception("the router cannot be asked for its health")
            return False
        status = cast("health_pb2.HealthCheckResponse", answer).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)


class RemotePlace(Placement):
    """A Placement over one Place call, which stops waiting when its router is lost."""

    def __init__(self, router: RemoteRouter, request: PlacementRequest) -> None:
        self._router = router
        self._request = request
        self._call: CarriedCall | None = None
        """None: it is not entered, or the router was lost before."""
        self._reading: asyncio.Future[object] | None = None
        """The pending read of the message after a grant; None: no read is pending."""
        self._on_cancelled: OnCancelled | None = None
        self._is_refused = False
        """Whether the router ended the request itself, and so knows its end."""

    async def __aenter__(self) -> Self:
        request, router = self._request, self._router
        if not router.is_lost:
            metadata = ((TRACEPARENT, request.traceparent),) if request.traceparent else ()
            self._call = router.stream.call(PLACE, metadata, request.seconds_left)
            await self._call.write(pb.PlaceRequest(open=_open_to_proto(request)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Breaks the reference cycle with the request, which would delay freeing both.
        self._on_cancelled = None
        self.abandon()

    @override
    async def next_decision(self) -> Decision:
        router, call = self._router, self._call
        if call is None:
            with suppress(TimeoutError):
                await within(LEADER_WAIT_SECONDS, router.led.wait())
            raise WeftError(Reason.NO_ROUTER_AVAILABLE, NO_ROUTER)
        if router.is_lost:
            raise self._lost()
        router.waiting.add(self)
        try:
            return await self._read(call)
        finally:
            router.waiting.discard(self)

    async def _read(self, call: CarriedCall) -> Decision:
        reading, self._reading, self._on_cancelled = self._reading, None, None
        try:
            response = await (call.read() if reading is None else reading)
        except WeftError as error:
            is_stopping = error.reason is Reason.SHUTTING_DOWN
            if not call.is_answered:
                if is_stopping or error.reason is Reason.SERVICE_UNAVAILABLE:
                    # Keeps the next placement away from this router until a health check succeeds.
                    self._router.note_lost()
                elif error.reason is not Reason.CANCELLED:
                    # Its deadline passed, or the router refuses the stream.
                    raise
                # An abandoned placement ends as cancelled; a cancelled request arrives differently.
                raise self._lost() from error
            # A stopping router counts as lost: the request is placed again.
            self._is_refused = not (is_stopping or error.reason in PLACED_AGAIN)
            raise (WeftError(Reason.SERVICE_UNAVAILABLE, error.message) if is_stopping else error) from error
        if not isinstance(response, pb.PlaceResponse):
            raise WeftError(Reason.NO_ROUTER_AVAILABLE, "the router ended the placement without a decision")
        match response.WhichOneof("kind"):
            case "queued" | "loading" | "granted":
                return response
            case "cancelled":
                raise request_cancelled(response.cancelled.cancelled_by)
        raise WeftError(Reason.INTERNAL, "the router sent a decision this version does not know")

    def _lost(self) -> WeftError:
        return WeftError(Reason.NO_ROUTER_AVAILABLE, f"the router {self._router.router.name} does not answer")

    def abandon(self) -> None:
        """Stops waiting for the router: `next_decision` raises NO_ROUTER_AVAILABLE."""
        if self._call is not None:
            self._call.cancel()

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        if self._call is None:
            return
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
    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        number: Any = reason.value
        wait = optional_duration(retry_after_seconds)
        failed = pb.AttemptFailed(attempt=attempt, reason=number, message=message, retry_after=wait)
        await self._write(pb.PlaceRequest(attempt_failed=failed))

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        call = self._call
        if call is None or self._router.is_lost:
            return False
        finished = pb.PlaceFinished(reason=reason.value, receipt=receipt)  # type: ignore[arg-type]  # same numbers
        await self._write(pb.PlaceRequest(finished=finished))
        # The router ends the call after counting the end; leaving earlier would cancel the report.
        return await self._ends_well(call) or self._is_refused

    async def _ends_well(self, call: CarriedCall) -> bool:
        reading, self._reading = self._reading, None
        try:
            response = await (call.read() if reading is None else reading)
            while response is not grpc.aio.EOF:
                response = await call.read()
        except WeftError:
            return False
        return True

    async def _write(self, request: pb.PlaceRequest) -> None:
        """Sends a message to the router unless it is lost, which the next read, not this write, detects."""
        if self._call is not None and not self._router.is_lost:
            await self._call.write(request)


def _open_to_proto(request: PlacementRequest) -> pb.PlaceOpen:
    message = pb.PlaceOpen(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        operation=request.operation.value,  # type: ignore[arg-type]  # same numbers
        # Unset means normal, and that the caller named no class.
        priority=request.priority.wire if request.names_priority else 0,  # type: ignore[arg-type]  # same numbers
        max_priority=request.max_priority.as_ceiling,  # type: ignore[arg-type]  # same numbers
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
        labels=sorted(request.labels),
    )
    if (holder := request.prefix_holder) is not None:
        message.prefix_holder.model, message.prefix_holder.runner = holder.model, holder.runner
        message.prefix_holder.runner_incarnation = holder.incarnation
        message.prefix_holder.digest_count = holder.digest_count
    message.age.FromNanoseconds(int(request.age_seconds * 1e9))
    if request.seconds_left is not None:
        message.time_left.FromNanoseconds(int(request.seconds_left * 1e9))
    if request.max_wait_seconds is not None:
        message.max_wait.FromNanoseconds(int(request.max_wait_seconds * 1e9))
    return message

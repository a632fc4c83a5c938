"""PlacementService: the placement port for dispatchers in other processes. Translation only."""

import asyncio
from typing import assert_never

import grpc

from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.dispatch.dispatcher import waiting_event
from weft.dispatch.port import Decision, Grant, LoadingModel, Placement, PlacementRequest, RouterPort, WaitingInQueue
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_name, require_token
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation, Priority
from weft.kernel.rpc import answering
from weft.kernel.service import stop_tasks
from weft.kernel.telemetry import TRACEPARENT, valid_traceparent

PlaceContext = grpc.aio.ServicerContext[pb.PlaceRequest, pb.PlaceResponse]


class PlacementServicer(placement_service_pb2_grpc.PlacementServiceServicer):
    """See PlacementService."""

    def __init__(self, placement: RouterPort) -> None:
        self._placement = placement

    # grpc.aio also takes a coroutine that reads and writes through the context; the stub only knows iterators.
    async def Place(self, _requests: object, context: PlaceContext) -> None:  # type: ignore[override]  # noqa: N802
        """See PlacementService.Place."""
        async with answering(context):
            first = await context.read()
            if not isinstance(first, pb.PlaceRequest) or first.WhichOneof("kind") != "open":
                raise invalid_field("open", "must be the first message of a placement")
            async with self._placement.place(_request_from_proto(first.open, _traceparent(context))) as place:
                listening = asyncio.create_task(self._listen(context, place))
                telling = asyncio.create_task(self._tell(context, place))
                try:
                    done, _ = await asyncio.wait({listening, telling}, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                finally:
                    await stop_tasks(task for task in (listening, telling) if not task.done())

    async def ListQueues(  # noqa: N802 - the rpc's name
        self,
        request: pb.ListQueuesRequest,  # noqa: ARG002 - it asks for all of them
        context: grpc.aio.ServicerContext[pb.ListQueuesRequest, pb.ListQueuesResponse],
    ) -> pb.ListQueuesResponse:
        """See PlacementService.ListQueues."""
        async with answering(context):
            queues = [
                pb.PoolQueue(
                    pool=queue.pool,
                    waiting_count=queue.waiting,
                    max_waiting=queue.max_waiting,
                    running_count=queue.running,
                )
                for queue in await self._placement.queues()
            ]
            return pb.ListQueuesResponse(queues=queues)
        raise AssertionError("abort has raised")

    async def _listen(self, context: PlaceContext, place: Placement) -> None:
        """Take the dispatcher's reports until it says that the request is over, or hangs up."""
        while isinstance(request := await context.read(), pb.PlaceRequest):
            match request.WhichOneof("kind"):
                case "first_content":
                    await place.report_first_content(request.first_content.attempt)
                case "attempt_failed":
                    failed = request.attempt_failed
                    await place.report_attempt_failed(failed.attempt, _reason(failed.reason))
                case "finished":
                    await place.report_finished(_reason(request.finished.reason))
                    return
                case _:
                    raise invalid_field("kind", "only reports may follow `open`")

    async def _tell(self, context: PlaceContext, place: Placement) -> None:
        while True:
            await context.write(_decision_to_proto(await place.next_decision()))


def _request_from_proto(message: pb.PlaceOpen, traceparent: str) -> PlacementRequest:
    if message.operation not in {operation.value for operation in Operation}:
        raise invalid_field("open.operation", "must be chat, completion or embedding")
    if message.priority not in {0, *(priority.value for priority in Priority)}:
        raise invalid_field("open.priority", "must be high, normal or low")
    if message.attempts_used < 0 or message.age.ToNanoseconds() < 0:
        raise invalid_field("open", "age and attempts_used must not be negative")
    return PlacementRequest(
        request_id=require_token(message.request_id, "open.request_id", MAX_REQUEST_ID_CHARS),
        tenant=require_token(message.tenant, "open.tenant", MAX_TENANT_CHARS),
        model=require_name(message.model, "open.model"),
        operation=Operation(message.operation),
        priority=Priority(message.priority or Priority.NORMAL),
        allow_remote=message.allow_remote,
        age_seconds=message.age.ToNanoseconds() / 1e9,
        seconds_left=message.time_left.ToNanoseconds() / 1e9 if message.HasField("time_left") else None,
        attempts_used=message.attempts_used,
        traceparent=traceparent,
    )


def _traceparent(context: PlaceContext) -> str:
    carried = next((value for key, value in context.invocation_metadata() or () if key == TRACEPARENT), "")
    return valid_traceparent(str(carried)) or ""


def _decision_to_proto(decision: Decision) -> pb.PlaceResponse:
    match decision:
        case Grant():
            granted = pb.Granted(
                runner=decision.runner,
                runner_incarnation=decision.runner_incarnation,
                address=decision.address,
                host=decision.host,
                model=decision.model,
                attempt=decision.attempt,
            )
            granted.ticket.claims = decision.claims
            granted.ticket.mac = decision.mac
            return pb.PlaceResponse(granted=granted)
        case WaitingInQueue():
            return pb.PlaceResponse(queued=waiting_event(decision).queued)
        case LoadingModel():
            return pb.PlaceResponse(loading=waiting_event(decision).loading)
        case _:
            assert_never(decision)


def _reason(number: int) -> Reason:
    try:
        return Reason(number)
    except ValueError:
        return Reason.INTERNAL

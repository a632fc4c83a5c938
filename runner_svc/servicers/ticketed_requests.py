"""Cancellation of requests that proxies carried to this runner, or were to carry."""

from typing import Any

import grpc
from typing_extensions import override

from runner_svc.servicers.request_admission import FoundByCancel, RequestAdmission
from weft.api.runner.v1 import ticketed_request_service_pb2 as pb
from weft.api.runner.v1 import ticketed_request_service_pb2_grpc
from weft.dispatch.placement import MAX_CANCELLER_CHARS
from weft.kernel.errors import invalid_field
from weft.kernel.rpc import answering

_OUTCOMES = {
    FoundByCancel.UNDER_WAY: pb.CancelTicketedRequestResponse.OUTCOME_CANCELLED,
    FoundByCancel.UNUSED: pb.CancelTicketedRequestResponse.OUTCOME_VOIDED,
    FoundByCancel.ENDED: pb.CancelTicketedRequestResponse.OUTCOME_ENDED,
}


class TicketedRequestServicer(ticketed_request_service_pb2_grpc.TicketedRequestServiceServicer):
    """Implements TicketedRequestService; translation only."""

    def __init__(self, desk: RequestAdmission) -> None:
        self._desk = desk

    @override
    async def CancelTicketedRequest(
        self, request: pb.CancelTicketedRequestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelTicketedRequestResponse:
        async with answering(context):
            if len(request.cancelled_by) > MAX_CANCELLER_CHARS:
                raise invalid_field("cancelled_by", f"must have at most {MAX_CANCELLER_CHARS} characters")
            found = self._desk.cancel(request.ticket, request.cancelled_by)
            return pb.CancelTicketedRequestResponse(outcome=_OUTCOMES[found])
        raise AssertionError("abort has raised")

    @override
    async def VoidTicket(
        self, request: pb.VoidTicketRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.VoidTicketResponse:
        async with answering(context):
            return pb.VoidTicketResponse(voided=self._desk.void(request.ticket))
        raise AssertionError("abort has raised")

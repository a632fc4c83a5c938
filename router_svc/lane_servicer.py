"""Reports of runners about requests that proxies carried to them."""

import hmac
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from typing_extensions import override

from weft.api.router.v1 import lane_service_pb2 as pb
from weft.api.router.v1 import lane_service_pb2_grpc
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.lane import AttemptReports
from weft.dispatch.tickets import sign
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering

log = get_logger("weft.router")

MAX_REPORTS = 256
"""Reports in one call."""


class LaneServicer(lane_service_pb2_grpc.LaneServiceServicer):
    """Implements LaneService: checks the ticket of each report, and passes it on."""

    def __init__(self, reports: AttemptReports, view: Callable[[], FleetView]) -> None:
        """`view`: the newest one, with the keys of the runners' sessions."""
        self._reports = reports
        self._view = view

    @override
    async def ReportAttempts(
        self,
        request: pb.ReportAttemptsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ReportAttemptsResponse:
        async with answering(context):
            if len(request.reports) > MAX_REPORTS:
                raise invalid_field("reports", f"has more than {MAX_REPORTS} entries")
            if not self._view().revision:
                # It has just started: a refusal would cost the reports, which runners repeat.
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router does not know the mesh yet")
            return pb.ReportAttemptsResponse(outcomes=map(self._note, request.reports))
        raise AssertionError("abort has raised")

    def _note(self, report: pb.AttemptReport) -> pb.ReportAttemptsResponse.Outcome.ValueType:
        claims = self._claims(report.ticket)
        if claims is None:
            log.warning("report of an attempt refused: its ticket is not one of the mesh")
            return pb.ReportAttemptsResponse.OUTCOME_REFUSED
        if self._reports.note_attempt(claims, report):
            return pb.ReportAttemptsResponse.OUTCOME_ACCEPTED
        return pb.ReportAttemptsResponse.OUTCOME_UNKNOWN

    def _claims(self, ticket: ticket_pb2.Ticket) -> ticket_pb2.TicketClaims | None:
        """Returns the claims of a ticket that is signed with the key of the runner that it names; None: it is not."""
        try:
            claims = ticket_pb2.TicketClaims.FromString(ticket.claims)
        except DecodeError:
            return None
        runner = self._view().runners.get(claims.runner)
        if runner is None or not runner.ticket_key:
            return None
        return claims if hmac.compare_digest(sign(ticket.claims, runner.ticket_key), ticket.mac) else None

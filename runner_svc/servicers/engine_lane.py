"""Slots of engines that a proxy calls itself: held for as long as a router's call lasts."""

import asyncio
from typing import Any

import grpc

from runner_svc.servicers.request_admission import RequestAdmission
from weft.api.runner.v1 import engine_lane_service_pb2 as pb
from weft.api.runner.v1 import serve_options_pb2, ticket_pb2
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import add_methods, answering
from weft.link.carried_calls import CarriedCalls


class EngineLaneServicer:
    """Implements EngineLaneService.

    To slots, unloads, evictions, drains and the watchdog a held slot is a request: only its tokens are not seen.
    """

    def __init__(self, desk: RequestAdmission) -> None:
        self._desk = desk

    def add_to_server(self, server: grpc.aio.Server, carried: CarriedCalls) -> None:
        """Add the service to a server; its calls are carried too."""
        add_methods(server, {HOLD_SLOT: self._hold_slot})
        carried.serve(HOLD_SLOT, self._hold_slot)

    async def _hold_slot(self, request: pb.HoldSlotRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            if not instance.config.engine_lane or permit.model != instance.model:
                message = f"{permit.model} does not say `lane: engine`; its requests go to the runner's HTTP API"
                raise WeftError(Reason.UNSUPPORTED_OPERATION, message, metadata={"model": permit.model})
            with self._desk.hold(permit, instance, _options(request.ticket)) as work:
                # The router ends the call when it knows that the request has ended: that is no cancelled request.
                work.record.answered = True
                async with work.lend() as engine:
                    await context.write(pb.HoldSlotResponse(url=engine.url, api_key=engine.api_key, model=engine.model))
                    await asyncio.Event().wait()


def _options(ticket: ticket_pb2.Ticket) -> serve_options_pb2.ServeOptions:
    """Returns how the request is handled, by the terms of its verified ticket."""
    terms = ticket_pb2.TicketClaims.FromString(ticket.claims).lane
    options = serve_options_pb2.ServeOptions(priority=terms.priority)
    if terms.HasField("keep_alive"):
        options.keep_alive.CopyFrom(terms.keep_alive)
    return options

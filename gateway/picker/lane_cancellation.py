"""Cancellation of a request that a proxy carries to a runner: a call to each runner that has a ticket for it."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import grpc

from weft.api.runner.v1 import ticket_pb2
from weft.api.runner.v1 import ticketed_request_service_pb2 as pb
from weft.dispatch.placement import Grant
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, RpcMethod, error_from_call

log = get_logger("weft.picker")

CALL_SECONDS = 2.0
"""How long a runner may take to answer."""
_SERVICE = pb.DESCRIPTOR.services_by_name["TicketedRequestService"]
_CANCEL = RpcMethod(_SERVICE.methods_by_name["CancelTicketedRequest"])
_VOID = RpcMethod(_SERVICE.methods_by_name["VoidTicket"])
_Outcome = pb.CancelTicketedRequestResponse.Outcome
_REPORTED = frozenset({_Outcome.OUTCOME_CANCELLED, _Outcome.OUTCOME_ENDED})


def not_cancellable() -> WeftError:
    """Returns the error for the cancellation of a request that a proxy has sent to an engine itself."""
    words = (
        "a proxy carries this request to the engine itself (`lane: engine`), which cannot be told to end it; its "
        "caller ends it by closing the connection"
    )
    return WeftError(Reason.UNSUPPORTED_OPERATION, words)


async def cancel_at_runners(channels: ChannelPool, grants: Collection[Grant], cancelled_by: str) -> bool:
    """Cancels the request of some grants; returns whether a runner had it, and reports its end.

    If none had it, none takes it any more, as far as they answer.
    """
    request = partial(pb.CancelTicketedRequestRequest, cancelled_by=cancelled_by)
    answers = await asyncio.gather(*(_call(channels, grant, _CANCEL, request) for grant in grants))
    return any(answer is not None and answer.outcome in _REPORTED for answer in answers)


async def void_at_runners(channels: ChannelPool, grants: Collection[Grant]) -> bool | None:
    """Returns whether no runner has had the request of some grants, so that none takes it any more.

    None: one did not answer, and none has had it as far as the others say.
    """
    answers = await asyncio.gather(*(_call(channels, grant, _VOID, pb.VoidTicketRequest) for grant in grants))
    if any(answer is not None and not answer.voided for answer in answers):
        return False
    return None if None in answers else True


async def _call(channels: ChannelPool, grant: Grant, rpc: RpcMethod, request_of: Callable[..., Any]) -> Any:
    """Returns the answer of a grant's runner; None: it did not answer."""
    ticket = ticket_pb2.Ticket(claims=grant.claims, mac=grant.mac)
    try:
        channel = await channels.get(grant.address)
        method: Any = channel.unary_unary(
            rpc.path,
            request_serializer=rpc.request.SerializeToString,
            response_deserializer=rpc.response.FromString,
        )
        metadata = grpc.aio.Metadata(*metadata_of(grant.address))
        return await method(request_of(ticket=ticket), timeout=CALL_SECONDS, metadata=metadata)
    except (grpc.aio.AioRpcError, WeftError) as failure:
        error = failure if isinstance(failure, WeftError) else error_from_call(failure, Reason.WORKER_LOST)
        log.warning(
            "a runner was not reached about a ticket",
            runner=grant.runner,
            call=rpc.name,
            reason=error.reason.name.lower(),
        )
        return None

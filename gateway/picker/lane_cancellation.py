"""Cancellation of a request that a proxy has carried to a runner: a word to each runner that has a ticket for it."""

import asyncio
from collections.abc import Collection
from typing import Any

import grpc

from weft.api.runner.v1 import ticketed_request_service_pb2 as pb
from weft.dispatch.placement import Grant
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, RpcMethod, error_from_call

log = get_logger("weft.picker")

CANCEL_SECONDS = 2.0
"""How long a runner may take to answer."""
_SERVICE = pb.DESCRIPTOR.services_by_name["TicketedRequestService"]
_CANCEL = RpcMethod(_SERVICE.methods_by_name["CancelTicketedRequest"])
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
    outcomes = await asyncio.gather(*(_cancel(channels, grant, cancelled_by) for grant in grants))
    return not _REPORTED.isdisjoint(outcomes)


async def _cancel(channels: ChannelPool, grant: Grant, cancelled_by: str) -> int:
    request = pb.CancelTicketedRequestRequest(cancelled_by=cancelled_by)
    request.ticket.claims, request.ticket.mac = grant.claims, grant.mac
    try:
        channel = await channels.get(grant.address)
        method: Any = channel.unary_unary(
            _CANCEL.path,
            request_serializer=_CANCEL.request.SerializeToString,
            response_deserializer=_CANCEL.response.FromString,
        )
        answer = await method(request, timeout=CANCEL_SECONDS, metadata=grpc.aio.Metadata(*metadata_of(grant.address)))
    except (grpc.aio.AioRpcError, WeftError) as failure:
        error = failure if isinstance(failure, WeftError) else error_from_call(failure, Reason.WORKER_LOST)
        log.warning("a runner was not told of a cancellation", runner=grant.runner, reason=error.reason.name.lower())
        return _Outcome.OUTCOME_UNSPECIFIED
    return int(answer.outcome)

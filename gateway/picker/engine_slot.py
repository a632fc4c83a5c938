"""The slot of an engine that a proxy calls itself, held for one request."""

from collections.abc import Callable
from typing import Any

import grpc

from weft.api.runner.v1 import engine_lane_service_pb2
from weft.dispatch.dispatcher import require_cancelled, runner_error
from weft.dispatch.operations import ended_early
from weft.dispatch.placement import Grant
from weft.kernel.address import metadata_of
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, RpcMethod, error_from_call

_HOLD = RpcMethod(engine_lane_service_pb2.DESCRIPTOR.services_by_name["EngineLaneService"].methods_by_name["HoldSlot"])


class EngineSlot:
    """A slot that a runner holds while its call lasts. Its key is a secret, which goes into one header."""

    def __init__(self, rpc: Any, answer: engine_lane_service_pb2.HoldSlotResponse) -> None:
        self._rpc = rpc
        self.url: str = answer.url
        self.api_key: str = answer.api_key
        self.model: str = answer.model

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` when the runner ends the call: its engine, or the runner itself, is gone."""
        self._rpc.add_done_callback(lambda _: on_lost())

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        self._rpc.cancel()


async def hold_slot(channels: ChannelPool, grant: Grant) -> EngineSlot:
    """Takes the slot of a grant. Raises the WeftError with which the runner refuses, as for any attempt."""
    channel = await channels.get(grant.address)
    request = engine_lane_service_pb2.HoldSlotRequest()
    request.ticket.claims, request.ticket.mac = grant.claims, grant.mac
    method: Any = channel.unary_stream(
        _HOLD.path,
        request_serializer=_HOLD.request.SerializeToString,
        response_deserializer=_HOLD.response.FromString,
    )
    rpc = method(request, metadata=grpc.aio.Metadata(*metadata_of(grant.address)))
    try:
        answer = await rpc.read()
    except grpc.aio.AioRpcError as error:
        raise runner_error(error_from_call(error, Reason.WORKER_LOST)) from error
    except BaseException:
        rpc.cancel()
        require_cancelled()
        raise
    if answer is grpc.aio.EOF:
        raise ended_early()
    return EngineSlot(rpc, answer)

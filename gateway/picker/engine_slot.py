"""The slots of engines that a proxy calls itself, each held for one request."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from weft.api.runner.v1 import engine_lane_service_pb2
from weft.dispatch.dispatcher import require_cancelled, runner_error
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.dispatch.operations import ended_early
from weft.dispatch.placement import Grant
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, error_from_call
from weft.link.carriers import Carriers


class EngineSlot:
    """A slot that a runner holds while its call lasts. Its key is a secret, which goes into one header."""

    def __init__(self, call: Any, answer: engine_lane_service_pb2.HoldSlotResponse) -> None:
        """`call`: an rpc, or a carried one."""
        self._call = call
        self.url: str = answer.url
        self.api_key: str = answer.api_key
        self.model: str = answer.model

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` when the runner ends the call: its engine, or the runner itself, is gone."""
        self._call.add_done_callback(lambda _: on_lost())

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        self._call.cancel()


class EngineSlots:
    """Takes the slots of one picker's requests: over one stream to each runner of this machine, else by a call each.

    A stream of its own, beside that of the chats of a gateway in this process, whose tokens would delay it.
    """

    def __init__(self, channels: ChannelPool) -> None:
        """The slots are given back when `channels` are closed."""
        self._channels = channels
        self._carriers = Carriers(channels)

    async def hold(self, grant: Grant) -> EngineSlot:
        """Takes the slot of a grant. Raises the WeftError with which the runner refuses, as for any attempt."""
        call = await self._begin(grant)
        try:
            return EngineSlot(call, await _answer_of(call))
        except BaseException:
            call.cancel()
            raise

    async def _begin(self, grant: Grant) -> Any:
        request = HOLD_SLOT.request()
        request.ticket.claims, request.ticket.mac = grant.claims, grant.mac
        carried = self._carriers.call(grant.address, HOLD_SLOT, request, (), None)
        if carried is not None:
            return carried
        channel = await self._channels.get(grant.address)
        method: Any = channel.unary_stream(
            HOLD_SLOT.path,
            request_serializer=HOLD_SLOT.request.SerializeToString,
            response_deserializer=HOLD_SLOT.response.FromString,
        )
        return method(request, metadata=grpc.aio.Metadata(*metadata_of(grant.address)))


async def _answer_of(call: Any) -> engine_lane_service_pb2.HoldSlotResponse:
    try:
        answer: Any = await call.read()
        if answer is not grpc.aio.EOF and call.done():
            # It has ended at once: there is no slot any more, and the next message is the reason.
            answer = await call.read()
    except grpc.aio.AioRpcError as error:
        raise runner_error(error_from_call(error, Reason.WORKER_LOST)) from error
    except WeftError as error:
        raise runner_error(error) from error
    except asyncio.CancelledError:
        require_cancelled()
        raise
    if answer is grpc.aio.EOF:
        raise ended_early()
    found: engine_lane_service_pb2.HoldSlotResponse = answer
    return found

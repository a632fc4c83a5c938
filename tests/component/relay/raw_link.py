"""A link whose runner sends what it likes."""

from typing import Any, cast

import grpc
from relay_harness import TOKEN, refusal, soon

from weft.api.common.v1 import link_pb2 as pb
from weft.api.router.v1 import relay_service_pb2, relay_service_pb2_grpc
from weft.kernel.errors.error_tree import WeftError

OPEN = "/weft.api.registry.v1.RunnerSessionService/OpenSession"
HEARTBEAT = "/weft.api.registry.v1.RunnerSessionService/Heartbeat"


class RawLink:
    """A peer that sends what it likes."""

    def __init__(self, channel: grpc.aio.Channel, token: str = TOKEN, *more: tuple[str, str]) -> None:
        stub = relay_service_pb2_grpc.RelayServiceStub(channel)
        self.call: Any = cast("Any", stub.Attach)(metadata=(("authorization", f"Bearer {token}"), *more))

    async def send(self, *frames: pb.LinkFrame) -> None:
        await self.call.write(relay_service_pb2.AttachRequest(frames=frames))

    async def start(self, call_id: int, method: str, message: Any) -> None:
        """A whole unary call, without its answer."""
        await self.send(
            pb.LinkFrame(call_id=call_id, start=pb.CallStart(method=method, initial_credit=65_536)),
            pb.LinkFrame(call_id=call_id, part=pb.MessagePart(data=message.SerializeToString())),
            pb.LinkFrame(call_id=call_id, half_close=pb.HalfClose()),
        )

    async def ask(self, call_id: int, method: str, message: Any) -> pb.CallEnd:
        """A whole unary call; how the first call that ends now ended."""
        await self.start(call_id, method, message)
        while True:
            response = await soon(self.call.read())
            for answer in response.frames:
                if answer.HasField("end"):
                    return cast("pb.CallEnd", answer.end)


async def end_of(call: Any) -> WeftError:
    """The error of a call, past what it still gives."""

    async def read_on() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    return await refusal(read_on())

"""A runner that is called without a gRPC call of its own, and what its callers read."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from weft.api.common.v1 import event_pb2
from weft.api.runner.v1 import generation_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering
from weft.link.carriers import CarriedCall
from weft.link.own_calls import OwnCall

METADATA = (("x-request-id", "r1"), ("traceparent", "00-1-2-00"))
SOON_SECONDS = 10.0


class CalledRunner:
    """Answers with texts, or as the agent says that a request names."""

    def __init__(self, texts: Sequence[str] = ("a", "b", "c")) -> None:
        self.texts = texts
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.seconds_left: float | None = None
        self.metadata: tuple[Any, ...] = ()
        self.written = 0

    async def generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """The servicer: the agents `fail` and `fault` end it at once, `hang` after the first text."""
        async with answering(context):
            self.metadata, self.seconds_left = context.invocation_metadata(), context.time_remaining()
            if request.agent == "fail":
                raise WeftError(Reason.NO_SLOT_AVAILABLE, "all 2 slots are taken", retry_after_seconds=2.5)
            if request.agent == "fault":
                raise ZeroDivisionError
            for text in self.texts:
                event = event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))
                await context.write(pb.GenerateResponse(events=[event]))
                self.written += 1
                self.begun.set()
                if request.agent == "hang":
                    await self._hang()

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


async def read_text(call: CarriedCall | OwnCall) -> str:
    """Returns the texts of a call that ends in order, joined."""
    text = ""
    async with asyncio.timeout(SOON_SECONDS):
        while (response := await call.read()) is not grpc.aio.EOF:
            text += response.events[0].delta.text
    return text


async def error_of_call(call: CarriedCall | OwnCall) -> WeftError:
    """Returns the error that ends a call."""
    with pytest.raises(WeftError) as caught:
        await read_text(call)
    return caught.value

"""A scheduler and a runner for a real dispatcher: every request is granted, answered and recorded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gateway_script import Step, hello
from kit.grpc_server import served

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import generation_service_pb2, generation_service_pb2_grpc
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import FleetSource
from weft.dispatch.placement import Decision, OnCancelled, Placement
from weft.kernel.channels.rpc import ChannelPool, answering
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.link.carried_calls import CallStreams
from weft_testing.carried import carry


class GrantingScheduler(Placement):
    """Grants every attempt of a request on the same runner."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.runner = "r1"
        self._attempt = 0
        self.placed: list[PlacementRequest] = []

    def place(self, request: PlacementRequest) -> Self:
        self.placed.append(request)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def next_decision(self) -> Decision:
        self._attempt += 1
        granted = Granted(
            runner=self.runner, runner_incarnation="1", address=self._address, model="tiny", attempt=self._attempt
        )
        return Decision(granted=granted)

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None: ...

    async def report_first_content(self, attempt: int) -> None: ...

    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None: ...

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        return True


class AnsweringRunner(generation_service_pb2_grpc.GenerationServiceServicer):
    """Answers with `steps`, by default hello; first it fails with each of `failures`."""

    def __init__(self, failures: list[Exception]) -> None:
        self._failures = failures
        self.steps = hello()
        self.asked: list[generation_service_pb2.GenerateRequest] = []

    async def Generate(  # noqa: N802 - the rpc's name
        self, request: generation_service_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_service_pb2.GenerateResponse]:
        self.asked.append(request)
        async with answering(context):
            if self._failures:
                raise self._failures.pop(0)
            for step in self.steps:
                yield generation_service_pb2.GenerateResponse(events=_frame(step))


def _frame(step: Step) -> list[event_pb2.InferenceEvent]:
    assert isinstance(step, list)
    return step


@asynccontextmanager
async def dispatching(
    folder: Path, fleet: FleetSource, *failures: Exception
) -> AsyncIterator[tuple[Dispatcher, GrantingScheduler, AnsweringRunner]]:
    """A dispatcher with the agents of `fleet`, over a runner at a socket in `folder`."""
    runner, address = AnsweringRunner(list(failures)), f"unix:{folder / 'runner.sock'}"
    scheduler, channels = GrantingScheduler(address), ChannelPool()
    async with served(lambda server: carry(server, runner, generation_service_pb2), address=address):
        try:
            yield Dispatcher(scheduler, CallStreams(channels), fleet=fleet), scheduler, runner
        finally:
            await channels.close()

"""A runner on a real gRPC server, a recording registry, and servers that weft did not start."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_status import rpc_status
from kit.fake_backend import run_fake_backend
from kit.waiting import until

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_service import RunnerService, build
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, sampling_pb2
from weft.api.registry.v1 import runner_pb2, runner_session_service_pb2_grpc
from weft.api.registry.v1 import runner_session_service_pb2 as session_pb
from weft.api.runner.v1 import (
    generation_service_pb2,
    load_pb2,
    permit_pb2,
    runner_service_pb2,
    runner_service_pb2_grpc,
    ticket_pb2,
)
from weft.dispatch.tickets import Action, PermitTarget, make_permit, sign
from weft.documents.left_out import left_out
from weft.kernel.channels.rpc import calling, error_to_status, new_server, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock, SystemClock
from weft_testing.carried import CarriedStub

if TYPE_CHECKING:
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

State = runner_pb2.InstanceState
TICKET_KEY = b"k" * 32
POLL_SECONDS = 0.01
WAIT_SECONDS = 20.0


class NotingRegistry(runner_session_service_pb2_grpc.RunnerSessionServiceServicer):
    """A registry that records every call, and fails the next ones as the test sets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.opened: list[session_pb.OpenSessionRequest] = []
        self.beats: list[session_pb.HeartbeatRequest] = []
        self.beat_times: list[float] = []
        self.closed = 0
        self.failures: list[WeftError] = []
        self.taken: set[str] = set()
        """Names of models and agents that it leaves out."""
        self.answers = asyncio.Event()
        self.answers.set()
        self._server: grpc.aio.Server | None = None

    async def serve(self, address: str) -> None:
        self._server = new_server()
        runner_session_service_pb2_grpc.add_RunnerSessionServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)
        await self._server.start()

    async def end(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    @property
    def capability(self) -> runner_pb2.Capability:
        return self.beats[-1].capability if self.beats else runner_pb2.Capability()

    async def OpenSession(  # noqa: N802 - the rpc's name
        self, request: Any, context: Any
    ) -> session_pb.OpenSessionResponse:
        self.opened.append(request)
        await self._trouble(context)
        return session_pb.OpenSessionResponse(
            session_id=request.session_id or "session-1",
            ticket_key=TICKET_KEY,
            heartbeat_interval=Duration(seconds=30),
            report_interval=Duration(seconds=5),
            left_out=[
                left_out(kind, item.name, "the name is taken", is_name_taken=True)
                for kind, items in (("model", request.models), ("agent", request.agents))
                for item in items
                if item.name in self.taken
            ],
        )

    async def Heartbeat(  # noqa: N802 - the rpc's name
        self, request: Any, context: Any
    ) -> session_pb.HeartbeatResponse:
        self.beats.append(request)
        self.beat_times.append(self._clock.monotonic())
        await self._trouble(context)
        return session_pb.HeartbeatResponse()

    async def RetireSession(  # noqa: N802 - the rpc's name
        self, request: session_pb.RetireSessionRequest, context: Any
    ) -> session_pb.RetireSessionResponse:
        raise NotImplementedError

    async def CloseSession(  # noqa: N802 - the rpc's name
        self, request: Any, context: Any
    ) -> session_pb.CloseSessionResponse:
        self.closed += 1
        return session_pb.CloseSessionResponse()

    async def _trouble(self, context: Any) -> None:
        await self.answers.wait()
        if self.failures:
            await context.abort_with_status(rpc_status.to_status(error_to_status(self.failures.pop(0))))


@dataclass
class RunningRunner:
    """The runner under test, and its clients."""

    service: RunnerService
    registry: NotingRegistry
    control: "RunnerServiceAsyncStub"
    generation: CarriedStub
    tickets: int = field(default=0)

    async def until(self, phase: Phase, model: str = "m") -> State:
        """Waits until `model` is reported in `phase`; returns its state."""
        return await self.until_state(lambda state: state.phase == phase.value, model)

    async def until_state(self, condition: Callable[[State], bool], model: str = "m") -> State:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            states = {state.model: state for state in self.registry.capability.instances}
            if model in states and condition(states[model]):
                return states[model]
            assert time.monotonic() < deadline, f"still {states}"
            await asyncio.sleep(POLL_SECONDS)

    async def until_opened(self, count: int) -> None:
        """Wait for that many sessions to have been opened."""
        await until(lambda: len(self.registry.opened) >= count)

    async def until_idle(self, model: str) -> None:
        """Wait until no request holds a slot of `model`."""
        deadline = time.monotonic() + WAIT_SECONDS
        while any(
            instance.active_request_ids
            for instance in (await self.control.Describe(runner_service_pb2.DescribeRequest())).instances
            if instance.model == model
        ):
            assert time.monotonic() < deadline, "a request holds on to its slot"

    async def wake(self, model: str = "m") -> None:
        await self.control.Wake(runner_service_pb2.WakeRequest(model=model))

    async def described(self, line_count: int = 0) -> runner_service_pb2.InstanceDescription:
        """Returns the description of the first model."""
        request = runner_service_pb2.DescribeRequest(log_line_count=line_count)
        return (await self.control.Describe(request)).instances[0]

    async def permit(self, action: Action, model: str = "m") -> permit_pb2.OperationPermit:
        """Returns a permit as the registry signs it, once the runner has the session's key."""
        await until(lambda: bool(self.registry.beats))
        target = PermitTarget(runner="r1", incarnation=self.registry.opened[-1].runner.incarnation, key=TICKET_KEY)
        return make_permit(target, action, model=model, operation_id="op-1", now=time.time())

    async def load(
        self, model: str = "m", options: load_pb2.LoadOptions | None = None
    ) -> list[runner_service_pb2.LoadResponse]:
        """Returns every message of a load."""
        permit = await self.permit(Action.LOAD, model)
        request = runner_service_pb2.LoadRequest(model=model, permit=permit, options=options)
        return [response async for response in self.control.Load(request)]

    async def unload(self, model: str = "m") -> runner_service_pb2.UnloadResponse:
        permit = await self.permit(Action.UNLOAD, model)
        return await self.control.Unload(runner_service_pb2.UnloadRequest(model=model, permit=permit))

    def ticket(self, **claims: Any) -> ticket_pb2.Ticket:
        """Returns a valid ticket with these claims."""
        self.tickets += 1
        found = ticket_pb2.TicketClaims(
            request_id=f"req-{self.tickets}",
            ticket_id=f"ticket-{self.tickets}",
            runner="r1",
            runner_incarnation=self.registry.opened[-1].runner.incarnation,
            **claims,
        )
        found.expire_time.FromSeconds(int(time.time()) + 30)
        raw = found.SerializeToString()
        return ticket_pb2.Ticket(claims=raw, mac=sign(raw, TICKET_KEY))

    def generate(
        self,
        *,
        model: str = "m",
        max_tokens: int = 8,
        allow_remote: bool = False,
        behaviour: agent_behaviour_pb2.AgentBehaviour | None = None,
        seconds_left: float | None = None,
        ticket: Mapping[str, Any] | None = None,
        **chat: Any,
    ) -> Any:
        """Starts a Generate call with a valid ticket; `ticket`, `chat`: more fields of its claims and the payload."""
        message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="Count.")])
        request = generation_service_pb2.GenerateRequest(
            ticket=self.ticket(model=model, attempt=1, allow_remote=allow_remote, **(ticket or {})),
            chat=chat_pb2.ChatPayload(
                **{
                    "messages": [message],
                    "sampling": sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0),
                    **chat,
                },
            ),
            behaviour=behaviour,
        )
        return self.generation.Generate(request, timeout=seconds_left)


@asynccontextmanager
async def noting_registry(folder: Path, clock: Clock) -> AsyncIterator[tuple[NotingRegistry, str]]:
    """Yields a recording registry and its address."""
    registry, address = NotingRegistry(clock), f"unix:{folder}/registry.sock"
    await registry.serve(address)
    try:
        yield registry, address
    finally:
        registry.answers.set()
        await registry.end()


@asynccontextmanager
async def running_runner(folder: Path, models: Sequence[ServedModel], **settings: Any) -> AsyncIterator[RunningRunner]:
    """A started runner "r1"."""
    async with noting_registry(folder, SystemClock()) as (registry, registry_address):
        address = f"unix:{folder}/runner.sock"
        config = RunnerConfig(
            name="r1",
            host="h",
            address=address,
            registry_address=registry_address,
            session_file=folder / "r1.session",
            models=tuple(models),
            **settings,
        )
        service, server = build(config), new_server()
        service.register(server)
        server.add_insecure_port(address)
        await server.start()
        await service.start()
        channel = open_channel(address)
        try:
            yield RunningRunner(
                service=service,
                registry=registry,
                control=cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel)),
                generation=CarriedStub(channel, generation_service_pb2),
            )
        finally:
            await channel.close(grace=None)
            await service.stop(0.0)
            await server.stop(None)


@asynccontextmanager
async def ready_runner(folder: Path, models: Sequence[ServedModel], **settings: Any) -> AsyncIterator[RunningRunner]:
    """A started runner "r1" whose first model is ready."""
    async with running_runner(folder, models, **settings) as runner:
        await runner.until(Phase.READY, models[0].name)
        yield runner


class OtherServer:
    """A server that weft did not start, on a fixed port, which tests start and end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.starts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    async def begin(self, *flags: str, **switches: Any) -> None:
        self.starts += 1
        begun = asyncio.Event()
        self._ending.clear()
        self._task = asyncio.create_task(self._serve(begun, flags, switches))
        await begun.wait()

    async def end(self) -> None:
        self._ending.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def _serve(self, begun: asyncio.Event, flags: Sequence[str], switches: dict[str, Any]) -> None:
        async with run_fake_backend("--port", str(self._port), "--embeddings", *flags, **switches):
            begun.set()
            await self._ending.wait()


async def refusal(call: Any) -> WeftError:
    with pytest.raises(WeftError) as refused, calling(Reason.WORKER_LOST):
        await call
    return refused.value


async def events_of(call: Any) -> list[Any]:
    """Returns the remaining events of a Generate call."""
    events: list[Any] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        events += response.events
    return events

"""A relay and a dial-out runner over real sockets; the registry and the runner's engine are scripted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from kit.resources import carried

from router_svc.relay import Relay, add_relay_to_server
from router_svc.router_config import RelayConfig
from runner_svc.dial_out import DialOut, DialOutConfig, LinkEvent, LinkState
from runner_svc.policy.backoff import RedialLimits
from weft.api.common.v1 import embedding_pb2, event_pb2
from weft.api.registry.v1 import (
    join_token_service_pb2,
    join_token_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
)
from weft.api.runner.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    runner_service_pb2,
    runner_service_pb2_grpc,
)
from weft.kernel.channels.rpc import CHANNEL_OPTIONS, answering, error_from_call, new_server, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock, SystemClock
from weft.link.carried_calls import CarriedCalls
from weft.link.link import LINK_CHANNEL_OPTIONS, LINK_SERVER_OPTIONS
from weft_testing.carried import CarriedStub, carry

if TYPE_CHECKING:
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

RUNNER = "laptop"
HOST = "anns-laptop"
TOKEN = "wjt_abc_secret"
MACHINE = "wjm_laptop000000_secret"
LIMIT_SECONDS = 20.0
POLL_SECONDS = 0.005
GenerateResponse = generation_service_pb2.GenerateResponse
Generation = Callable[[generation_service_pb2.GenerateRequest, Any], AsyncIterator[GenerateResponse]]


class ScriptedRegistry(
    runner_session_service_pb2_grpc.RunnerSessionServiceServicer,
    join_token_service_pb2_grpc.JoinTokenServiceServicer,
    registry_service_pb2_grpc.RegistryServiceServicer,
):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.good_tokens = {TOKEN}
        self.token_checks = 0
        self.machines: set[str] = set()
        """Credentials that machines presented with their tokens."""
        self.is_away = False
        self.refuse_open: WeftError | None = None
        self.host = ""
        """What it calls the machines of runners; empty: as they do."""
        self.runners: dict[str, runner_pb2.Runner] = {}
        self.opened: list[runner_session_service_pb2.OpenSessionRequest] = []
        self.heartbeats: list[runner_session_service_pb2.HeartbeatRequest] = []
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        self.told: list[str] = []
        """Names of the session calls in the order in which they came."""
        self.may_answer = asyncio.Event()
        """Cleared: OpenSession and GetRunner keep their callers waiting."""
        self.may_answer.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        runner_session_service_pb2_grpc.add_RunnerSessionServiceServicer_to_server(self, server)
        join_token_service_pb2_grpc.add_JoinTokenServiceServicer_to_server(self, server)
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(self, server)

    async def CheckJoinToken(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.token_checks += 1
        async with answering(context):
            if self.is_away:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "away")
            self.machines.add(request.machine)
            if request.token not in self.good_tokens:
                raise WeftError(Reason.UNAUTHENTICATED, "not good")
            return join_token_service_pb2.CheckJoinTokenResponse()

    async def OpenSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            self.told.append("open")
            if self.refuse_open is not None:
                raise self.refuse_open
            self.opened.append(request)
            await self.may_answer.wait()
            request.runner.status = runner_pb2.Runner.STATUS_ACTIVE
            self.runners[request.runner.name] = request.runner
            session_id = request.session_id or f"session-{len(self.opened)}"
            response = runner_session_service_pb2.OpenSessionResponse(
                session_id=session_id, ticket_key=b"k" * 32, host=self.host
            )
            response.report_interval.FromMilliseconds(50)
            return response

    async def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.heartbeats.append(request)
        return runner_session_service_pb2.HeartbeatResponse()

    async def CloseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.told.append("close")
        self.closed.put_nowait(request.session_id)
        return runner_session_service_pb2.CloseSessionResponse()

    async def GetResource(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self.may_answer.wait()
        async with answering(context):
            if request.name not in self.runners:
                raise WeftError(Reason.NOT_FOUND, "no such runner")
            return registry_service_pb2.GetResourceResponse(resource=carried(self.runners[request.name]))


class ScriptedRunner(
    generation_service_pb2_grpc.GenerationServiceServicer,
    embedding_service_pb2_grpc.EmbeddingServiceServicer,
    runner_service_pb2_grpc.RunnerServiceServicer,
):
    """The runner's own services; what Generate does is up to the test."""

    def __init__(self) -> None:
        self.generate: Generation = counting(3)
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.metadata: dict[str, str | bytes] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        self.carried = carry(server, self, generation_service_pb2, embedding_service_pb2)
        runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        try:
            async with answering(context):
                async for response in self.generate(request, context):
                    yield response
        except (asyncio.CancelledError, GeneratorExit):
            # The latter where gRPC itself was waiting for room.
            self.cancelled.put_nowait(request.completion.suffix)
            raise

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        return embedding_service_pb2.EmbedResponse(
            embeddings=[embedding_pb2.Embedding(values=[1.0] * len(request.payload.inputs[0].text))]
        )

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        return runner_service_pb2.DescribeResponse(runner=runner_pb2.Runner(name=RUNNER))


def frame(text: str) -> GenerateResponse:
    return GenerateResponse(events=[event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))])


def text_of(response: Any) -> str:
    return "".join(event.delta.text for event in response.events)


def counting(count: int) -> Generation:
    async def generate(_request: Any, _context: Any) -> AsyncIterator[GenerateResponse]:
        for number in range(count):
            yield frame(f"tok{number} ")

    return generate


def prompt(text: str = "hi") -> generation_service_pb2.GenerateRequest:
    request = generation_service_pb2.GenerateRequest()
    request.completion.suffix = text
    return request


@dataclass
class Mesh:
    """The mesh's side."""

    registry: ScriptedRegistry
    relay: Relay
    relay_server: grpc.aio.Server
    address: str
    """The router's own gRPC target."""
    target: str
    """Where runners join."""
    channel: grpc.aio.Channel
    folder: Path
    metadata: tuple[tuple[str, str], ...] = (("weft-runner", RUNNER),)
    _requests: CarriedStub | None = None

    @property
    def requests(self) -> CarriedStub:
        if self._requests is None:
            self._requests = CarriedStub(self.channel, generation_service_pb2, embedding_service_pb2)
        return self._requests

    @property
    def runner(self) -> "RunnerServiceAsyncStub":
        return cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(self.channel))

    def stream(self, text: str = "hi", **options: Any) -> Any:
        """A Generate call to the runner behind the relay."""
        return self.requests.Generate(prompt(text), metadata=self.metadata, **options)


@asynccontextmanager
async def running_mesh_side(
    folder: Path,
    *,
    add_to_registry: Callable[[grpc.aio.Server], None] = lambda _: None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Mesh]:
    """A scripted registry, with more services if need be, and a relay, each on a server of its own."""
    # The generated base classes count every method as abstract; those that are left out answer UNIMPLEMENTED.
    registry: ScriptedRegistry = cast("Any", ScriptedRegistry)()
    registry_server = new_server()
    registry.add_to(registry_server)
    add_to_registry(registry_server)
    registry_server.add_insecure_port(f"unix:{folder}/registry.sock")
    await registry_server.start()
    router_server, address = new_server(), f"unix:{folder}/router.sock"
    relay = Relay(RelayConfig(address=address, **settings), clock or SystemClock())
    router_server.add_generic_rpc_handlers((relay.services(),))
    CarriedCalls({}, relay.forward).add_to_server(router_server)
    router_server.add_insecure_port(address)
    await router_server.start()
    relay_server = grpc.aio.server(options=LINK_SERVER_OPTIONS)
    add_relay_to_server(relay, relay_server)
    port = relay_server.add_insecure_port("127.0.0.1:0")
    # Without it gRPC itself keeps megabytes for a reader that stands still.
    narrow = (("grpc.http2.bdp_probe", 0), *CHANNEL_OPTIONS)
    to_router = grpc.aio.insecure_channel(address, options=narrow)
    async with open_channel(f"unix:{folder}/registry.sock") as to_registry, to_router as channel:
        relay.start(to_registry)
        await relay_server.start()
        try:
            yield Mesh(registry, relay, relay_server, address, f"127.0.0.1:{port}", channel, folder)
        finally:
            # A test that failed may have left somebody waiting.
            registry.may_answer.set()
            await relay.stop(0.0)
            await relay_server.stop(None)
            await router_server.stop(None)
            await registry_server.stop(None)


@dataclass
class Laptop:
    """The runner's side."""

    script: ScriptedRunner
    dial_out: DialOut
    sessions: "RunnerSessionServiceAsyncStub"
    name: str
    news: list[LinkEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    fresh: asyncio.Event = field(default_factory=asyncio.Event)
    mesh_times: list[datetime] = field(default_factory=list)
    session_id: str = ""

    async def until(self, state: LinkState) -> LinkEvent:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not (found := [news for news in self.news if news.state is state]):
                self.changed.clear()
                await self.changed.wait()
        self.news.clear()
        return found[0]

    async def open(self, session_id: str = "", *, max_requests: int = 0) -> str:
        """Open a session over a fresh link, as the runner's session does."""
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.fresh.wait()
        self.fresh.clear()
        runner = runner_pb2.Runner(name=self.name, incarnation="life-1", host=HOST, address="unix:/secret/place")
        runner.capability.max_requests = max_requests
        request = runner_session_service_pb2.OpenSessionRequest(runner=runner, session_id=session_id)
        self.session_id = (await self.sessions.OpenSession(request, timeout=LIMIT_SECONDS)).session_id
        return self.session_id

    async def beat(self, session_id: str, *, max_requests: int = 0) -> None:
        request = runner_session_service_pb2.HeartbeatRequest(session_id=session_id, incarnation="life-1", sequence=1)
        request.capability.max_requests = max_requests
        await self.sessions.Heartbeat(request, timeout=LIMIT_SECONDS)


@asynccontextmanager
async def running_laptop(
    mesh: Mesh,
    *,
    name: str = RUNNER,
    token: str = TOKEN,
    target: str = "",
    folder: str = "laptop",
    add_to_runner: Callable[[grpc.aio.Server], None] = lambda _: None,
) -> AsyncIterator[Laptop]:
    """A scripted runner that dials out to the mesh."""
    place = mesh.folder / folder
    place.mkdir()
    server, local = new_server(), f"unix:{place}/runner.sock"
    script: ScriptedRunner = cast("Any", ScriptedRunner)()
    where = target or mesh.target

    async def plaintext() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(where, options=LINK_CHANNEL_OPTIONS)

    config = DialOutConfig(
        target=where,
        open_channel=plaintext,
        token=token,
        machine=MACHINE,
        local_address=local,
        redial=RedialLimits(first_seconds=0.1, max_seconds=0.2),
    )
    laptop: Laptop
    fresh = asyncio.Event()

    def tell(news: LinkEvent) -> None:
        laptop.news.append(news)
        laptop.changed.set()

    times: list[datetime] = []
    dial_out = DialOut(
        config,
        tell,
        carried=lambda: script.carried,
        note_fresh_link=fresh.set,
        note_mesh_time=times.append,
        random=Random(1),
    )
    script.add_to(server)
    add_to_runner(server)
    dial_out.register(server)
    server.add_insecure_port(local)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(local))
        sessions = runner_session_service_pb2_grpc.RunnerSessionServiceStub(channel)
        laptop = Laptop(script, dial_out, cast("Any", sessions), name, fresh=fresh, mesh_times=times)
        await server.start()
        stack.push_async_callback(server.stop, None)
        await dial_out.start()
        stack.push_async_callback(dial_out.stop, 0.0)
        yield laptop


async def eventually(condition: Callable[[], Any]) -> None:
    """Return once `condition` holds, or raise TimeoutError."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            if condition():
                return
            await asyncio.sleep(POLL_SECONDS)


async def soon(awaitable: Awaitable[Any]) -> Any:
    """What it gives, or TimeoutError."""
    async with asyncio.timeout(LIMIT_SECONDS):
        return await awaitable


async def refusal(call: Awaitable[Any]) -> WeftError:
    """The error with which it ends."""
    with pytest.raises((WeftError, grpc.aio.AioRpcError)) as caught:
        await soon(call)
    found: Exception = caught.value
    return error_from_call(found, Reason.INTERNAL) if isinstance(found, grpc.RpcError) else cast("WeftError", found)

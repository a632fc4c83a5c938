"""Both ways into a mesh behind one interface: the gateway, and the lane of a proxy that asks the endpoint picker.

The lane is a proxy as Envoy is one by weft's configuration (`weft_app.edge.lane`): it asks a real picker over gRPC with
messages of the external processor, and carries the request with the ticket to the HTTP port of a runner, or to a
gateway. Scripted are the scheduler, which grants what the dispatcher's script does not refuse, and the engine: gateway
and runner have the same `ScriptedDispatcher`.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, cast

import aiohttp
import pytest
from gateway_script import FixedFleet, RunningGateway, ScriptedDispatcher, model
from gateway_script import serving as serving_gateway
from multidict import CIMultiDict
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.types import Receive, Scope, Send

import gateway.picker.service
import gateway.runner_service
from gateway.app import gate_of
from gateway.auth.authentication import KeyRingSource
from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.errors import ClientGoneError
from gateway.http.disconnect import WhileConnected
from gateway.http.server import AppServer
from gateway.metrics import GatewayMetrics
from gateway.picker import lane_requests
from gateway.picker.limits import PickerLimits
from gateway.runner_api.ports import LanePorts, RunnerApiPorts, RunnerFacts, RunnerStage
from gateway.runner_api.state import RunnerApiConfig
from gateway.runner_service import RunnerApiService
from runner_svc.servicers.request_admission import RequestAdmission, RunnerIdentity
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.call import Call
from weft.dispatch.fleet import FleetSource, FleetView, RunnerView
from weft.dispatch.lane import LaneWaits, set_lane_terms
from weft.dispatch.placement import Grant, OnCancelled, Placement, PlacementPort, PlacementRequest
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.dispatch.ticket_placement import TicketRunner
from weft.dispatch.tickets import TicketGate, sign
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import (
    ANSWER_NAMESPACE,
    DESTINATION,
    PROCESS_METHOD,
    REQUEST_ID_HEADER,
    TRY_NEXT_HEADER,
)
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import ChannelPool, open_channel
from weft.kernel.rpc_server.server import LocalServer
from weft_app.edge.lane import LANE_PATHS, OWN_HEADERS

WAYS = ("gateway", "lane")
OF_THE_SCHEDULER = frozenset(
    {
        Reason.QUEUE_FULL,
        Reason.QUEUE_TIMEOUT,
        Reason.RATE_LIMIT_EXCEEDED,
        Reason.MODEL_NOT_FOUND,
        Reason.NO_RUNNER_AVAILABLE,
        Reason.DEADLINE_EXCEEDED,
        Reason.DEADLINE_UNREACHABLE,
        Reason.UNSUPPORTED_OPERATION,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        Reason.NO_ROUTER_AVAILABLE,
        Reason.SERVICE_UNAVAILABLE,
    }
)
"""Reasons with which a scheduler refuses; any other error at the beginning of a script is a runner's."""
_KEY = b"k" * 32
_CHUNK_BYTES = 16_384
_NOT_OF_THE_ANSWER = frozenset({b"transfer-encoding", b"connection", TRY_NEXT_HEADER.encode()})
_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive", "te", "upgrade", "expect"})


class _Current:
    """The way of the test that runs."""

    way = "gateway"


def both_ways(*, of_all: bool = True) -> Any:
    """A fixture `way`: each test of its module runs by each way, but for cases of paths that go to the gateway.

    Not `of_all`: only those tests that use the fixture.
    """

    @pytest.fixture(params=WAYS, autouse=of_all)
    def way(request: pytest.FixtureRequest) -> Iterator[str]:
        if request.param == "lane":
            given = getattr(request.node, "callspec", None)
            path = None if given is None else given.params.get("path")
            if path is not None and path not in LANE_PATHS:
                pytest.skip("the proxy sends it to the gateway without a question")
        _Current.way = request.param
        yield request.param
        _Current.way = "gateway"

    return way


by_both_ways = pytest.mark.usefixtures("way")
"""Marks a test that runs by each way, in a module whose other tests do not."""


def ways_of(cases: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, str]]:
    """Cases, each with its path first, by each way that leads there: values of the fixture `way`, to be given to it."""
    return [(path, given, way) for path, given in cases for way in (WAYS if path in LANE_PATHS else WAYS[:1])]


def serving(
    dispatcher: ScriptedDispatcher | None = None, *, rate_limits: RateLimitStatus | None = None, **parts: Any
) -> AbstractAsyncContextManager[RunningGateway]:
    """Serves a mesh by the way of the test that runs; see `gateway_script.serving`."""
    script = dispatcher or ScriptedDispatcher()
    if _Current.way == "gateway":
        return serving_gateway(LimitedDispatcher(script, rate_limits) if rate_limits else script, **parts)
    return serving_lane(script, rate_limits=rate_limits, **parts)


class LimitedDispatcher(ScriptedDispatcher):
    """A dispatcher whose scheduler says what its caller may still ask for."""

    def __init__(self, script: ScriptedDispatcher, rate_limits: RateLimitStatus) -> None:
        super().__init__(script.steps, script.vectors, whole=script.whole)
        self._rate_limits = rate_limits

    def note(self, call: Call[Any]) -> None:
        super().note(call)
        call.rate_limits = self._rate_limits


class GrantingScheduler(PlacementPort):
    """Grants each request on the runner `r1`, unless the script of the dispatcher begins with a scheduler's refusal."""

    def __init__(self, script: ScriptedDispatcher, rate_limits: RateLimitStatus | None) -> None:
        self._script = script
        self._rate_limits = rate_limits
        self.placed: list[PlacementRequest] = []
        self.ended: list[Reason] = []

    def place(self, request: PlacementRequest) -> "GrantedPlace":
        self.placed.append(request)
        return GrantedPlace(self, request)

    def refusal(self, operation: Operation) -> WeftError | None:
        steps = [self._script.vectors] if operation is Operation.EMBEDDING else self._script.steps
        decisive = next((step for step in steps if not _only_waits(step)), None)
        return decisive if isinstance(decisive, WeftError) and decisive.reason in OF_THE_SCHEDULER else None

    def grant(self, request: PlacementRequest) -> Grant:
        claims = ticket_pb2.TicketClaims(
            request_id=request.request_id,
            ticket_id=f"ticket-{len(self.placed)}",
            tenant=request.tenant,
            model=request.model,
            runner="r1",
            runner_incarnation="1",
            attempt=1,
            allow_remote=request.allow_remote,
        )
        claims.expire_time.FromNanoseconds(int((time.time() + 30.0) * 1e9))
        set_lane_terms(claims.lane, request, LaneWaits(all_seconds=0.0, load_seconds=0.0), None, request.seconds_left)
        raw = claims.SerializeToString()
        return Grant(
            claims=raw,
            mac=sign(raw, _KEY),
            runner="r1",
            runner_incarnation="1",
            address="unix:/nowhere",
            host="h",
            model=request.model,
            attempt=1,
            rate_limits=self._rate_limits,
        )


def _only_waits(step: Any) -> bool:
    return isinstance(step, list) and all(
        isinstance(event, event_pb2.InferenceEvent) and event.WhichOneof("event") in ("queued", "loading")
        for event in step
    )


class GrantedPlace(Placement):
    """The place of one request."""

    def __init__(self, scheduler: GrantingScheduler, request: PlacementRequest) -> None:
        self._scheduler = scheduler
        self._request = request

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def next_decision(self) -> Grant:
        refusal = self._scheduler.refusal(self._request.operation)
        if refusal is not None:
            raise refusal
        return self._scheduler.grant(self._request)

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None: ...

    async def report_first_content(self, attempt: int) -> None: ...

    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None: ...

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        self._scheduler.ended.append(reason)
        return True


class Runner:
    """What a runner's API knows of its runner, and its queue."""

    load = (0, 0)

    def facts(self) -> RunnerFacts:
        return RunnerFacts(name="r1", kind="fake", stage=RunnerStage.SERVING)

    async def devices(self) -> None:
        return None


class ToThePicker:
    """Passes the reports of a runner to the picker."""

    def __init__(self) -> None:
        self.on_fate: Any = None
        self.picker: gateway.picker.service.PickerService | None = None

    def send(self, _router: str, report: lane_service_pb2.AttemptReport) -> None:
        assert self.picker is not None
        claims = ticket_pb2.TicketClaims.FromString(report.ticket.claims)
        self.picker.reports.note_attempt(claims, report)


@dataclass
class LaneFleet:
    """A fleet whose models are on the runner `r1`, which a proxy reaches."""

    source: FleetSource
    url: str

    @property
    def view(self) -> FleetView:
        runner = RunnerView(
            name="r1",
            incarnation="1",
            address="unix:/nowhere",
            host="h",
            runtime="fake",
            active=True,
            draining=False,
            ticket_key=_KEY,
            instances={},
            lane_url=self.url,
        )
        return replace(self.source.view, runners={"r1": runner})


class Proxy:
    """A proxy in the form of an ASGI application: asks the picker, then carries the request."""

    def __init__(self, channel: Any, gateway_url: str, http: aiohttp.ClientSession) -> None:
        self._channel = channel
        self._gateway = gateway_url.removeprefix("http://")
        self._http = http
        self.asked = 0
        """Requests about which the picker was asked."""
        self.carried = 0
        """Requests that went to a runner."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
            if not name.lower().startswith(OWN_HEADERS.encode())
        ]
        target = scope["raw_path"].decode("latin-1") if scope.get("raw_path") else scope["path"]
        if scope["query_string"]:
            target += f"?{scope['query_string'].decode('latin-1')}"
        is_lane = scope["method"] == "POST" and scope["path"] in LANE_PATHS and "origin" not in dict(headers)
        if not is_lane:
            body = b"".join([chunk async for chunk, _ in _body_of(receive)])
            await self._carry(Carried(self._gateway, target, headers, body, {}), scope, receive, send)
            return
        self.asked += 1
        answers = await self._ask(target, headers, scope, receive)
        first = answers[0]
        if first.WhichOneof("response") == "immediate_response":
            await _send_direct(send, first.immediate_response)
            return
        mutation = first.request_headers.response.header_mutation
        changed = {each.header.key: each.header.raw_value.decode("latin-1") for each in mutation.set_headers}
        destination = changed.pop(DESTINATION)
        gone = {*mutation.remove_headers, *changed, DESTINATION}
        kept = [(name, value) for name, value in headers if name not in gone]
        again = b"".join(each.request_body.response.body_mutation.streamed_response.body for each in answers[1:])
        added: dict[str, str] = {}
        if destination != self._gateway:
            self.carried += 1
            told = first.dynamic_metadata.fields[ANSWER_NAMESPACE].struct_value.fields
            added = {name: value.string_value for name, value in told.items()}
            added[REQUEST_ID_HEADER] = changed[REQUEST_ID_HEADER]
        carried = Carried(destination, target, [*kept, *changed.items()], again, added)
        await self._carry(carried, scope, receive, send)

    async def _ask(
        self, target: str, headers: Iterable[tuple[str, str]], scope: Scope, receive: Receive
    ) -> list[pb.ProcessingResponse]:
        call = self._channel.stream_stream(
            PROCESS_METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()
        head = pb.ProcessingRequest()
        head.protocol_config.request_body_mode = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
        authority = dict(headers).get("host", "")
        pseudo = ((":method", scope["method"]), (":path", target), (":authority", authority), (":scheme", "http"))
        for name, value in (*pseudo, *((name, value) for name, value in headers if name != "host")):
            head.request_headers.headers.headers.add(key=name, raw_value=value.encode("latin-1"))
        async with AsyncExitStack() as stack:
            stack.callback(call.cancel)
            named = dict(headers)
            has_body = "transfer-encoding" in named or named.get("content-length", "0") != "0"
            head.request_headers.end_of_stream = not has_body
            await call.write(head)
            # The picker may answer before all of the body has come.
            answering = asyncio.create_task(_answers(call, has_body=has_body))
            stack.callback(answering.cancel)
            if has_body:
                await _pass_on(call, _body_of(receive), answering)
            # The caller's end of the connection ends the question, as Envoy resets the stream.
            with WhileConnected(scope, receive):
                return await answering

    async def _carry(self, carried: "Carried", scope: Scope, receive: Receive, send: Send) -> None:
        headers = CIMultiDict((name, value) for name, value in carried.headers if name not in _HOP_BY_HOP)
        asking = self._http.request(
            scope["method"],
            f"http://{carried.destination}{carried.target}",
            data=carried.body or None,
            headers=headers,
            skip_auto_headers=("user-agent", "accept"),
            allow_redirects=False,
        )
        with WhileConnected(scope, receive):
            async with asking as answer:
                shown = [
                    (name.lower(), value)
                    for name, value in answer.raw_headers
                    if name.lower() not in _NOT_OF_THE_ANSWER and name.lower().decode() not in carried.added
                ]
                shown += [(name.encode(), value.encode("latin-1")) for name, value in carried.added.items()]
                await send({"type": "http.response.start", "status": answer.status, "headers": shown})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})


@dataclass(frozen=True)
class Carried:
    """A request as the proxy sends it on."""

    destination: str
    target: str
    headers: Iterable[tuple[str, str]]
    body: bytes
    added: dict[str, str]
    """Headers of the answer that the proxy writes."""


async def _body_of(receive: Receive) -> AsyncIterator[tuple[bytes, bool]]:
    """Yields the body as it comes, each piece with whether it is the last one."""
    is_end = False
    while not is_end:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        is_end = not message.get("more_body")
        yield message.get("body", b""), is_end


async def _pass_on(call: Any, body: AsyncIterator[tuple[bytes, bool]], answering: asyncio.Task[Any]) -> None:
    """Sends a body to the picker as it comes, until it answers."""
    is_end = False
    while not is_end:
        following = asyncio.ensure_future(anext(body))
        await asyncio.wait({following, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            following.cancel()
            return
        piece, is_end = following.result()
        chunks = [piece[start : start + _CHUNK_BYTES] for start in range(0, len(piece), _CHUNK_BYTES)] or [b""]
        for number, chunk in enumerate(chunks, 1):
            message = pb.HttpBody(body=chunk, end_of_stream=is_end and number == len(chunks))
            await call.write(pb.ProcessingRequest(request_body=message))


async def _answers(call: Any, *, has_body: bool) -> list[pb.ProcessingResponse]:
    found: list[pb.ProcessingResponse] = []
    while isinstance(message := await call.read(), pb.ProcessingResponse):
        found.append(message)
        kind = message.WhichOneof("response")
        is_end = message.request_body.response.body_mutation.streamed_response.end_of_stream
        if kind == "immediate_response" or (kind == "request_headers" and not has_body) or is_end:
            break
    assert found, "the picker has answered nothing"
    return found


async def _send_direct(send: Send, immediate: pb.ImmediateResponse) -> None:
    headers = [(each.header.key.encode(), each.header.raw_value) for each in immediate.headers.set_headers]
    headers.append((b"content-length", str(len(immediate.body)).encode()))
    await send({"type": "http.response.start", "status": immediate.status.code, "headers": headers})
    await send({"type": "http.response.body", "body": immediate.body})


@dataclass
class RunningLane(RunningGateway):
    """The lane, as if it were a gateway."""

    scheduler: GrantingScheduler
    proxy: Proxy


def _sidecar(
    script: ScriptedDispatcher, config: GatewayConfig, fleet: FleetSource, reporter: ToThePicker
) -> RunnerApiService:
    gate = TicketGate(runner="r1", incarnation="1")
    gate.use_key(_KEY)
    admission = RequestAdmission(
        identity=RunnerIdentity(runner="r1", incarnation="1", host="h"),
        gate=gate,
        instances={},
        caches=cast("Any", None),
        remote_models=frozenset(),
        clock=SystemClock(),
    )
    runner = Runner()
    return gateway.runner_service.build(
        RunnerApiConfig(edge=replace(config, port=0)),
        RunnerApiPorts(
            runner=runner,
            dispatcher=script,
            fleet=fleet,
            queue=runner,
            operations=cast("Any", None),
            lane=LanePorts(
                tickets=admission,
                runner=TicketRunner(address="unix:/nowhere", host="h"),
                dispatcher=lambda _: script,
                reporter=cast("Any", reporter),
            ),
        ),
    )


@asynccontextmanager
async def serving_lane(
    script: ScriptedDispatcher,
    *,
    config: GatewayConfig | None = None,
    fleet: FleetSource | None = None,
    keys: KeyRingSource | None = None,
    rate_limits: RateLimitStatus | None = None,
    **parts: Any,
) -> AsyncIterator[RunningLane]:
    """A proxy with its picker, a runner, and a gateway for what the lane cannot do."""
    config = config or GatewayConfig(port=0)
    source = fleet or FixedFleet.of(model("tiny"), model("small", pool="chat"))
    clock, reporter, channels = SystemClock(), ToThePicker(), ChannelPool()
    async with AsyncExitStack() as stack:
        own = serving_gateway(script, config=config, fleet=source, keys=keys, **parts)
        behind = await stack.enter_async_context(own)
        sidecar = _sidecar(script, config, source, reporter)
        await sidecar.start()
        stack.push_async_callback(sidecar.stop, 0.0)
        lane_fleet, scheduler = LaneFleet(source, sidecar.url), GrantingScheduler(script, rate_limits)
        deps = InferenceDeps(
            config=config,
            dispatcher=cast("Any", None),
            fleet=lane_fleet,
            metrics=GatewayMetrics(),
            clock=clock,
            gate=gate_of(keys, clock),
        )
        ports = lane_requests.LanePorts(
            placement=scheduler,
            fleet=lane_fleet,
            channels=channels,
            clock=clock,
            report_to="router-1",
            steady=ReconnectConfig(view_lag_limit_seconds=0.0),
        )
        picker = gateway.picker.service.build(
            PickerLimits(),
            deps,
            ports,
            JournalPolicy(lane_fleet),
            gateway=behind.service.url.removeprefix("http://"),
        )
        reporter.picker = picker
        server = LocalServer()
        picker.register(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0.5)
        await picker.start()
        stack.push_async_callback(picker.stop, 0.0)
        channel = await stack.enter_async_context(open_channel(address))
        http = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        proxy = Proxy(channel, behind.service.url, http)
        front = AppServer(
            proxy, exposure=config.exposure(), limits=config.connections, on_refused=lambda _: None, name="proxy"
        )
        await front.start()
        stack.callback(front.request_stop, 0.0)
        trust = DefaultAsyncHttpxClient(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        sdk = AsyncOpenAI(base_url=f"{front.url}/v1", api_key="unused", max_retries=0, http_client=trust)
        await stack.enter_async_context(sdk)
        yield RunningLane(cast("Any", front), script, sdk, scheduler, proxy)
        front.request_stop(0.0)
        await front.wait_stopped()
        await asyncio.sleep(0)

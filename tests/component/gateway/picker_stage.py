"""A picker over a scripted scheduler, called as a proxy calls it: real gRPC, messages of weft.api.envoy.v1."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from gateway_script import FixedFleet
from google.protobuf.any_pb2 import Any as AnyMessage

from gateway.auth.authentication import Gate, OpenGate
from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.metrics import GatewayMetrics
from gateway.picker.lane_requests import LanePorts
from gateway.picker.limits import PickerLimits
from gateway.picker.service import PickerService, build
from weft.api.common.v1 import receipt_pb2
from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus
from weft.api.envoy.v1 import access_log_pb2, token_usage_pb2
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.fleet import FleetView, ModelView, RunnerView
from weft.dispatch.placement import Decision, Grant, OnCancelled, PlacementRequest
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import DESTINATION_NAMESPACE, DESTINATION_SERVED, PROCESS_METHOD, STREAM_ACCESS_LOGS_METHOD
from weft.kernel.metrics import MetricsPage
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import ChannelPool, new_server, open_channel
from weft.kernel.rpc_server.server import LocalServer
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    import grpc

OPERATIONS = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDING})
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
URLS = ("http://10.0.0.1:8081", "http://10.0.0.2:8081")


def grant(attempt: int = 1, runner: str = "r1", *fallbacks: Grant) -> Grant:
    """A grant whose ticket names it."""
    claims = ticket_pb2.TicketClaims(runner=runner, runner_incarnation="1", attempt=attempt, model="tiny")
    return Grant(
        claims=claims.SerializeToString(),
        mac=b"mac",
        runner=runner,
        runner_incarnation="1",
        address="unix:/nowhere",
        host="h",
        model="tiny",
        attempt=attempt,
        fallbacks=fallbacks,
    )


def limited() -> RateLimitStatus:
    """What a caller with a limit of requests may still ask for."""
    status = RateLimitStatus()
    status.requests.limit, status.requests.remaining = 20, 19
    status.requests.reset.FromMilliseconds(3_000)
    return status


LIMITED_HEADERS = {
    "x-ratelimit-limit-requests": "20",
    "x-ratelimit-remaining-requests": "19",
    "x-ratelimit-reset-requests": "3s",
}


class ScriptedScheduler:
    """Gives each request the next decisions of its script; records what it hears."""

    def __init__(self) -> None:
        self.script: asyncio.Queue[Decision | WeftError] = asyncio.Queue()
        self.placed: list[PlacementRequest] = []
        self.failed: list[tuple[int, Reason]] = []
        self.begun: list[int] = []
        self.freed = 0
        """Slots that were given back before the end."""
        self.waited_for = asyncio.Event()
        """Set once a request has heard all of the script and waits for more."""
        self.finished: asyncio.Queue[tuple[Reason, receipt_pb2.Receipt]] = asyncio.Queue()
        self.on_cancelled: OnCancelled | None = None
        """Ends the latest request."""

    def place(self, request: PlacementRequest) -> Self:
        self.placed.append(request)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def next_decision(self) -> Decision:
        if self.placed and self.script.empty():
            self.waited_for.set()
        decision = await self.script.get()
        if isinstance(decision, WeftError):
            raise decision
        return decision

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        self.on_cancelled = on_cancelled

    async def report_first_content(self, attempt: int) -> None:
        self.begun.append(attempt)

    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None:
        self.failed.append((attempt, reason))

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        assert receipt is not None
        self.finished.put_nowait((reason, receipt))
        return True

    def free_slot_at_once(self) -> None:
        self.freed += 1

    def end_at_once(self, reason: Reason, receipt: receipt_pb2.Receipt, *, content_of: int | None) -> bool:
        """It is a scheduler of another process."""
        return False


class PickerStage:
    """A running picker, and what a proxy says to it."""

    def __init__(
        self, picker: PickerService, scheduler: ScriptedScheduler, clock: FakeClock, page: MetricsPage
    ) -> None:
        self.picker = picker
        self.scheduler = scheduler
        self.clock = clock
        self.page = page
        self.amended: list[receipt_pb2.Receipt] = []
        self.address = ""
        self.channel: grpc.aio.Channel = cast("grpc.aio.Channel", None)

    @asynccontextmanager
    async def asking(
        self, body: bytes = BODY, path: str = "/v1/chat/completions", *, is_whole: bool = True, **headers: str
    ) -> AsyncIterator[Any]:
        """A stream of a request that was sent, whole or but the end of its body; reads are left to the test."""
        call = self.channel.stream_stream(
            PROCESS_METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()
        await call.write(request_head(path, **headers))
        await call.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=is_whole)))
        try:
            yield call
        finally:
            call.cancel()

    async def ask(
        self, body: bytes = BODY, path: str = "/v1/chat/completions", **headers: str
    ) -> list[pb.ProcessingResponse]:
        """All answers to a request."""
        async with self.asking(body, path, is_whole=True, **headers) as call:
            await call.done_writing()
            return [answer async for answer in call]

    @asynccontextmanager
    async def logging(self) -> AsyncIterator[Any]:
        """A stream of the access log, which ends with the block."""
        call = self.channel.stream_unary(
            STREAM_ACCESS_LOGS_METHOD,
            request_serializer=access_log_pb2.StreamAccessLogsMessage.SerializeToString,
            response_deserializer=access_log_pb2.StreamAccessLogsResponse.FromString,
        )()

        async def write(*entries: access_log_pb2.HTTPAccessLogEntry) -> None:
            message = access_log_pb2.StreamAccessLogsMessage()
            message.http_logs.log_entry.extend(entries)
            await call.write(message)

        yield write
        await call.done_writing()
        await call

    async def log(self, *entries: access_log_pb2.HTTPAccessLogEntry) -> None:
        """Send entries of the access log, on a stream of their own."""
        async with self.logging() as write:
            await write(*entries)

    def report(self, runner_grant: Grant, receipt: receipt_pb2.Receipt, *, first_content: float | None = 0.5) -> bool:
        """Report the end of an attempt as its runner does."""
        claims = ticket_pb2.TicketClaims.FromString(runner_grant.claims)
        claims.request_id = self.scheduler.placed[-1].request_id
        report = lane_service_pb2.AttemptReport(receipt=receipt)
        if first_content is not None:
            report.time_to_first_content.FromNanoseconds(int(first_content * 1e9))
        return self.picker.reports.note_attempt(claims, report)

    async def end(self) -> tuple[Reason, receipt_pb2.Receipt]:
        """How the next request that ends has ended."""
        return await asyncio.wait_for(self.scheduler.finished.get(), 5.0)

    async def figure(self, line: str) -> float:
        """A figure of the metrics page."""
        found = [
            text.rpartition(" ")[2]
            for text in (await self.page.render()).body.decode().splitlines()
            if text.startswith(line)
        ]
        return float(found[0]) if found else 0.0


def request_head(path: str = "/v1/chat/completions", **headers: str) -> pb.ProcessingRequest:
    """The headers of a request, as Envoy sends them."""
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
    named = {
        ":method": "POST",
        ":path": path,
        ":authority": "localhost",
        ":scheme": "http",
        "content-type": "application/json",
        "x-request-id": "req-1",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    for name, value in named.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def log_entry(
    *flags: str,
    request_id: str = "req-1",
    status: int = 200,
    usage: tuple[int, int] | None = None,
    endpoint: str = "10.0.0.1:8081",
) -> access_log_pb2.HTTPAccessLogEntry:
    """An entry of the access log of a request that has ended."""
    entry = access_log_pb2.HTTPAccessLogEntry()
    common = entry.common_properties
    entry.request.request_id = request_id
    entry.response.response_code.value = status
    entry.response.response_body_bytes = 100
    common.upstream_request_attempt_count = 1
    for flag in flags:
        setattr(common.response_flags, flag, True)
    served = common.metadata.filter_metadata[DESTINATION_NAMESPACE]
    served.fields[DESTINATION_SERVED].string_value = endpoint
    if usage is not None:
        found = token_usage_pb2.TokenUsage(extraction_status=token_usage_pb2.TokenUsage.EXTRACTION_STATUS_COMPLETE)
        found.input_tokens.value, found.output_tokens.value = usage
        packed = AnyMessage(type_url="type.googleapis.com/envoy.data.ai.v3.TokenUsage", value=found.SerializeToString())
        common.metadata.typed_filter_metadata["usage"].CopyFrom(packed)
    return entry


def fleet_view(lane_urls: Iterable[str] = URLS) -> FleetView:
    """A view with the model `tiny` of the pool `tiny`, one copy on each runner."""
    runners, models = {}, {}
    for index, url in enumerate(lane_urls, 1):
        name = "tiny" if index == 1 else f"tiny-{index}"
        runners[f"r{index}"] = RunnerView(
            name=f"r{index}",
            incarnation="1",
            address="unix:/nowhere",
            host="h",
            runtime="fake",
            active=True,
            draining=False,
            ticket_key=b"k" * 32,
            instances={},
            lane_url=url,
        )
        models[name] = ModelView(
            name=name,
            pool="tiny",
            runner=f"r{index}",
            operations=OPERATIONS,
            remote=False,
            active=True,
            context_tokens=0,
            created_at_seconds=0,
        )
    return FleetView(1, runners, models)


@asynccontextmanager
async def picker_stage(
    folder: Path,
    *,
    view: FleetView | None = None,
    config: GatewayConfig | None = None,
    gate: Gate | None = None,
    limits: PickerLimits | None = None,
    gateway: str = "",
    host: str = "",
    is_local: bool = True,
) -> AsyncIterator[PickerStage]:
    """A picker; not `is_local`: on gRPC's own server, at a socket in `folder`."""
    scheduler, clock, page, channels = ScriptedScheduler(), FakeClock(), MetricsPage(), ChannelPool()
    fleet = FixedFleet(fleet_view() if view is None else view)
    deps = InferenceDeps(
        config=config or GatewayConfig(),
        dispatcher=cast("Any", None),
        fleet=fleet,
        metrics=GatewayMetrics(),
        clock=clock,
        gate=gate or OpenGate(),
    )
    amended: list[receipt_pb2.Receipt] = []
    ports = LanePorts(
        placement=scheduler,
        fleet=fleet,
        channels=channels,
        clock=clock,
        report_to="router-1",
        host=host,
        steady=ReconnectConfig(),
        amend=lambda _, receipt: amended.append(receipt),
    )
    picker = build(limits or PickerLimits(), deps, ports, JournalPolicy(fleet), gateway=gateway, metrics=page)
    stage = PickerStage(picker, scheduler, clock, page)
    stage.amended = amended
    # A proxy of this machine is served by a server of its own kind.
    server = LocalServer() if is_local else new_server()
    picker.register(server)
    address = f"unix:{folder / 'picker.sock'}"
    if is_local:
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        server.add_insecure_port(address)
    await server.start()
    await picker.start()
    try:
        async with open_channel(address) as channel:
            stage.address, stage.channel = address, channel
            yield stage
    finally:
        await picker.stop(0.0)
        await server.stop(grace=0.5)
        await channels.close()

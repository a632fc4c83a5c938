"""The processes of `bench.lane`: the stub that answers, the picker, and a plain external processor for comparison."""

import asyncio
from typing import Any

import grpc

from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.metrics import GatewayMetrics
from gateway.picker.lane_requests import LanePorts
from gateway.picker.limits import PickerLimits
from gateway.picker.service import PickerService, build
from router_svc.loop import LoopDeps, RouterRecords, SchedulingLoop, TicketIssuer, WakeFinished
from router_svc.placement import LocalPlacement
from router_svc.policy.decisions import Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings
from weft.api.envoy.v1 import external_processor_pb2
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.engine_slots import HOLD_SLOT
from weft.dispatch.fleet import FleetView, ModelView, RunnerView
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.clock import SystemClock
from weft.kernel.gc_tuning import settle_garbage_collector
from weft.kernel.lane_names import ACCESS_LOG_SERVICE, DESTINATION, DESTINATION_NAMESPACE, EXTERNAL_PROCESSOR
from weft.kernel.request import Operation
from weft.kernel.rpc import ChannelPool, add_methods, new_server
from weft.kernel.rpc_server.server import LocalServer
from weft.link.carried_calls import CarriedCalls

EVENTS = 403
"""Events of a stream."""
_CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"token"},"finish_reason":null}]}\n\n'
_USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":400,"total_tokens":409}}\n\ndata: [DONE]\n\n'
)
_UNARY = (
    b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)
_ENGINE_MODEL = "in-engine"


async def serve_stub(port: int) -> None:
    """Serves answers of a fixed form: a stream of EVENTS chunks, each written by itself, or one object."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _until_head(reader):
            body = await _body(reader, head)
            if b'"stream":true' not in body.replace(b" ", b""):
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                    % (len(_UNARY), _UNARY)
                )
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for index in range(EVENTS):
                chunk = _USAGE if index == EVENTS - 1 else _CHUNK
                writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await asyncio.sleep(0.002)
            writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


async def _until_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    lower = head.lower()
    if b"content-length:" in lower:
        return await reader.readexactly(int(lower.split(b"content-length:")[1].split(b"\r\n")[0]))
    found = b""
    while size := int(await reader.readline(), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return found


class _Slots:
    """A runner that grants a slot of its engine to every call."""

    def __init__(self, engine: int) -> None:
        self._engine = f"http://127.0.0.1:{engine}"

    async def hold_slot(self, _: Any, context: Any) -> None:
        await context.write(HOLD_SLOT.response(url=self._engine, api_key="k" * 32, model=_ENGINE_MODEL))
        await asyncio.Event().wait()


async def serve_runner(address: str, engine: int) -> None:
    """Serves the gRPC address of a runner whose engine a proxy calls itself."""
    server = new_server()
    slots, carried = _Slots(engine), CarriedCalls()
    add_methods(server, {HOLD_SLOT: slots.hold_slot})
    carried.serve(HOLD_SLOT, slots.hold_slot)
    carried.add_to_server(server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


async def serve_plain(server: grpc.aio.Server, port: int, stub: int) -> None:
    """Serves an external processor that checks nothing: each request goes to the stub.

    It reads the whole request and answers headers and body, as the protocol demands. Its messages are made once.
    """
    pb = external_processor_pb2
    place = f"127.0.0.1:{stub}"
    head = pb.ProcessingResponse()
    option = head.request_headers.response.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value = DESTINATION, place.encode()
    head.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value.fields[DESTINATION].string_value = place
    answer = head.SerializeToString()

    async def process(_: object, context: Any) -> None:
        chunks = []
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.WhichOneof("request") != "request_body":
                continue
            chunks.append(message.request_body.body)
            if message.request_body.end_of_stream:
                body = pb.ProcessingResponse()
                streamed = body.request_body.response.body_mutation.streamed_response
                streamed.body, streamed.end_of_stream = b"".join(chunks), True
                await context.write(answer)
                await context.write(body.SerializeToString())

    async def log(_: object, context: Any) -> bytes:
        while await context.read() is not grpc.aio.EOF:
            pass
        return b""

    handlers: dict[str, dict[str, Any]] = {
        EXTERNAL_PROCESSOR: {
            "Process": grpc.stream_stream_rpc_method_handler(process, pb.ProcessingRequest.FromString)
        },
        ACCESS_LOG_SERVICE: {"StreamAccessLogs": grpc.stream_unary_rpc_method_handler(log)},
    }
    for service, methods in handlers.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    settle_garbage_collector()
    await server.wait_for_termination()


class _NoWakes:
    """A waker that nothing asks."""

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        """Begins nothing."""

    def give_up(self, model: str) -> None:
        """Ends nothing."""


class _Fleet:
    """One runner with one ready model, whose requests go to the runner's HTTP port or to its engine's."""

    def __init__(self, url: str, runner: str) -> None:
        """`runner`: its gRPC address where requests go to the engine; empty: they go to `url`."""
        instance = runner_pb2.InstanceState(
            model="tiny", phase=runner_pb2.InstanceState.PHASE_READY, slots_total=4096, engine_lane=bool(runner)
        )
        runners = {
            "r": RunnerView(
                name="r",
                incarnation="1",
                address=runner or "unix:/nowhere",
                host="h",
                runtime="stub",
                active=True,
                draining=False,
                ticket_key=b"k" * 32,
                instances={"tiny": instance},
                lane_url=url,
            )
        }
        model = ModelView(
            name="tiny",
            pool="tiny",
            runner="r",
            operations=frozenset({Operation.CHAT}),
            remote=False,
            active=True,
            context_tokens=0,
            created_at_seconds=0,
        )
        self.view = FleetView(1, runners, {"tiny": model})


def picker_of(stub: int, runner: str) -> PickerService:
    """Returns a picker over a real scheduler; `runner`: see `_Fleet`."""
    clock, channels = SystemClock(), ChannelPool()
    fleet = _Fleet(f"http://127.0.0.1:{stub}", runner)
    tickets = TicketIssuer(clock, lifetime_seconds=30.0)
    deps = LoopDeps(waker=_NoWakes(), tickets=tickets, records=RouterRecords.empty(clock))
    loop = SchedulingLoop(SchedulerLimits(), Settings(), clock, deps)
    loop.update_view(fleet.view)
    placement = LocalPlacement(loop)
    inference = InferenceDeps(
        config=GatewayConfig(),
        dispatcher=Dispatcher(placement, channels, clock=clock),
        fleet=fleet,
        metrics=GatewayMetrics(),
        clock=clock,
    )
    ports = LanePorts(
        placement=placement, fleet=fleet, channels=channels, clock=clock, report_to="router", steady=ReconnectConfig()
    )
    return build(PickerLimits(report_wait_seconds=0.2), inference, ports, JournalPolicy(fleet))


async def serve_picker(port: int, stub: int, runner: str) -> None:
    """Serves the picker of `picker_of`."""
    picker = picker_of(stub, runner)
    # As a mesh serves it at an address of this machine.
    server = LocalServer()
    picker.register(server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await picker.start()
    settle_garbage_collector()
    await server.wait_for_termination()

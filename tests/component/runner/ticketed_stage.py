"""A runner with its HTTP API and a router that hears reports, for requests with tickets."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import grpc
from kit.engine_settings import engine_settings
from runner_harness import TICKET_KEY, RunningRunner, running_runner

from gateway.config import GatewayConfig
from gateway.runner_api.ports import LanePorts, RunnerApiPorts, RunnerFacts, RunnerStage
from gateway.runner_api.state import RunnerApiConfig
from gateway.runner_service import RunnerApiService, build
from router_svc.lane_servicer import LaneServicer
from runner_svc.instance.settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.llama_server.backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.settings import LlamaServerModel
from weft.api.router.v1 import lane_service_pb2, lane_service_pb2_grpc
from weft.api.runner.v1 import ticket_pb2, ticketed_request_service_pb2_grpc
from weft.api.runner.v1 import ticketed_request_service_pb2 as pb
from weft.dispatch.attempt_reporter import AttemptReporter
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import FleetView, RouterView, RunnerView
from weft.dispatch.ticket_placement import AT_ONCE, TicketRunner
from weft.dispatch.tickets import TICKET_HEADER, sign, ticket_text, tickets_in
from weft.kernel.clock import SystemClock
from weft.kernel.metrics import MetricsPage
from weft.kernel.reasons import Reason
from weft.kernel.report_limits import ReportLimits
from weft.kernel.rpc import ChannelPool, error_from_call, new_server, open_channel
from weft_testing.fake_backend.process import fake_backend_command

if TYPE_CHECKING:
    from gateway.operations import OperationsPort
    from weft.api.runner.v1.ticketed_request_service_pb2_grpc import TicketedRequestServiceAsyncStub

ROUTER = "router-1"
WAIT_SECONDS = 20.0


class NotingRouter:
    """Notes each report of a ticket once."""

    def __init__(self) -> None:
        self.ends: list[tuple[ticket_pb2.TicketClaims, lane_service_pb2.AttemptReport]] = []
        self.calls = 0

    def note_attempt(self, claims: ticket_pb2.TicketClaims, report: lane_service_pb2.AttemptReport) -> bool:
        self.calls += 1
        if claims.ticket_id in {known.ticket_id for known, _ in self.ends}:
            return False
        self.ends.append((claims, report))
        return True

    async def until(self, count: int) -> list[lane_service_pb2.AttemptReport]:
        """Wait for that many ends; their reports."""
        await until(lambda: len(self.ends) >= count)
        return [report for _, report in self.ends]


@dataclass
class _Fleet:
    view: FleetView


class _Runner:
    def facts(self) -> RunnerFacts:
        return RunnerFacts(name="r1", kind="fake", stage=RunnerStage.SERVING)

    async def devices(self) -> None:
        return None


@dataclass
class _Queue:
    load: tuple[int, int] = (0, 0)


@dataclass
class TicketedStage:
    runner: RunningRunner
    service: RunnerApiService
    router: NotingRouter
    reporter: AttemptReporter
    http: aiohttp.ClientSession
    page: MetricsPage
    folder: Path
    _numbers: list[int] = field(default_factory=list)

    def ticket(self, *, key: bytes = TICKET_KEY, seconds: float = 30.0, **changes: Any) -> str:
        """A ticket for one request, as the header has it."""
        self._numbers.append(len(self._numbers) + 1)
        fields: dict[str, Any] = {
            "request_id": f"req-{len(self._numbers)}",
            "ticket_id": f"ticket-{len(self._numbers)}",
            "tenant": "ann",
            "model": "m",
            "runner": "r1",
            "runner_incarnation": self.runner.registry.opened[-1].runner.incarnation,
            "attempt": 1,
            "lane": ticket_pb2.LaneTerms(report_to=ROUTER, caller="key:abc"),
        }
        claims = ticket_pb2.TicketClaims(**fields | changes)
        claims.expire_time.FromNanoseconds(int((time.time() + seconds) * 1e9))
        raw = claims.SerializeToString()
        return ticket_text(raw, sign(raw, key))

    def post(self, ticket: str, path: str = "/v1/chat/completions", body: object = None, **headers: str) -> Any:
        """A request with a ticket, as a block."""
        return self.http.post(
            f"{self.service.url}{path}",
            json=chat() if body is None else body,
            headers={TICKET_HEADER: ticket} | headers,
        )

    async def cancel(self, ticket: str, cancelled_by: str = "key:ops") -> str:
        """Cancel the request of a ticket as a router does; what was found, or the reason of a refusal."""
        async with open_channel(f"unix:{self.folder}/runner.sock") as channel:
            made = ticketed_request_service_pb2_grpc.TicketedRequestServiceStub(channel)
            stub = cast("TicketedRequestServiceAsyncStub", made)
            request = pb.CancelTicketedRequestRequest(ticket=tickets_in(ticket)[0], cancelled_by=cancelled_by)
            try:
                answer = await stub.CancelTicketedRequest(request)
            except grpc.aio.AioRpcError as error:
                return error_from_call(error, Reason.WORKER_LOST).reason.name
        return pb.CancelTicketedRequestResponse.Outcome.Name(answer.outcome).removeprefix("OUTCOME_")

    async def void(self, ticket: str) -> bool:
        """Void a ticket as a router does; returns whether it had not been used."""
        async with open_channel(f"unix:{self.folder}/runner.sock") as channel:
            made = ticketed_request_service_pb2_grpc.TicketedRequestServiceStub(channel)
            stub = cast("TicketedRequestServiceAsyncStub", made)
            return (await stub.VoidTicket(pb.VoidTicketRequest(ticket=tickets_in(ticket)[0]))).voided

    def served(self) -> float:
        """Requests that were counted as finished."""
        return sum(
            sample.value
            for family in self.page.collect()
            for sample in family.samples
            if sample.name == "weft_runner_requests_total"
        )

    def fates(self) -> dict[str, float]:
        """Reports by what became of them."""
        return {
            sample.labels["fate"]: sample.value
            for family in self.page.collect()
            for sample in family.samples
            if sample.name == "weft_runner_lane_reports_total"
        }


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.01)


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a chat request, for a model of another name."""
    return {"model": "best", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 8, **fields}


def counting_model(name: str = "m", **switches: Any) -> ServedModel:
    """A model on a fake engine, which counts."""
    config = engine_settings(
        LlamaServerModel, command=tuple(fake_backend_command(**switches)), path=Path(__file__), name=name
    )
    return ServedModel(name=name, make_backend=lambda: LlamaServerBackend(*config), slots=2)


@asynccontextmanager
async def ticketed_runner(
    folder: Path,
    model: ServedModel | None = None,
    *,
    limits: ReportLimits | None = None,
    has_router: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> AsyncIterator[TicketedStage]:
    """A ready runner `r1` behind its HTTP API, and the router that its reports go to."""
    clock, router, page = SystemClock(), NotingRouter(), MetricsPage()
    address = f"unix:{folder}/router.sock"
    mesh = FleetView(1, routers={ROUTER: RouterView(name=ROUTER, incarnation="1", address=address)})
    signers = FleetView(1, {"r1": _signer()})
    server = new_server()
    lane_service_pb2_grpc.add_LaneServiceServicer_to_server(LaneServicer(router, lambda: signers), server)
    server.add_insecure_port(address)
    await server.start()
    channels = ChannelPool()
    reporter = AttemptReporter(lambda: mesh if has_router() else FleetView(1), channels, clock, limits)
    async with running_runner(folder, [model or counting_model()], **settings) as runner:
        await runner.until(Phase.READY)
        fleet = _Fleet(FleetView(1))
        service = build(
            RunnerApiConfig(edge=GatewayConfig(port=0)),
            RunnerApiPorts(
                runner=_Runner(),
                dispatcher=cast("Any", None),
                fleet=fleet,
                queue=_Queue(),
                operations=cast("OperationsPort", None),
                lane=LanePorts(
                    tickets=runner.service.admission,
                    runner=TicketRunner(address=f"unix:{folder}/runner.sock", host="h"),
                    dispatcher=Dispatcher(cast("Any", None), channels, clock=clock, steady=AT_ONCE, fleet=fleet).over,
                    reporter=reporter,
                ),
            ),
            metrics=page,
        )
        await service.start()
        try:
            async with aiohttp.ClientSession() as http:
                yield TicketedStage(runner, service, router, reporter, http, page, folder)
        finally:
            await service.stop(grace_seconds=0.0)
            await reporter.stop(grace_seconds=5.0)
            await channels.close()
            await server.stop(grace=None)


def _signer() -> RunnerView:
    return RunnerView(
        name="r1",
        incarnation="",
        address="",
        host="",
        runtime="",
        active=True,
        draining=False,
        ticket_key=TICKET_KEY,
        instances={},
    )
